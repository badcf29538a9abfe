"""Settings of the prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.kv_transfer.config import KvTransferConfig
from outrider.service.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNodeConfig:
    """Section `prefill_node`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    kv_transfer: KvTransferConfig = field(default_factory=KvTransferConfig)
    max_rows_per_step: int = setting(
        256, at_least=16, at_most=65536, help="Prompt tokens of one forward pass: the size of a chunk."
    )
    max_running: int = setting(16, at_least=1, at_most=1024, help="Prompts in computation at the same time.")
    max_waiting: int = setting(
        256, at_least=1, at_most=65536, help="Prompts that may wait; more are refused with RESOURCE_EXHAUSTED."
    )
    turns_file: str = setting(
        "",
        help="Nodes that compute on the same processors and name the same file take turns there; empty: at once. "
        "`outrider up` chooses.",
    )
    turn_seconds: float = setting(
        0.12,
        at_least=0,
        at_most=60,
        help="In turns with decode nodes, how long they wait for this one between two steps (and for a layer to end). "
        "Shorter: running answers go on faster, first tokens come later.",
    )
