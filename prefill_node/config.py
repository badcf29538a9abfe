"""Settings of the prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.kv_transfer.config import KvTransferConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import SERVICE_SECTIONS

MAX_RUNNING = {"cpu": 16, "cuda": 64}
"""Default maximum number of prompts in computation, by device. A GPU's step has room for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNodeConfig:
    """The section `prefill_node`."""

    kv_cache: KVCacheConfig = fixed(KVCacheConfig())  # the section `kv_cache`
    kv_transfer: KvTransferConfig = fixed(KvTransferConfig())  # the section `kv_transfer`
    max_running_sequences: int | None = setting(
        None,
        at_least=1,
        at_most=1024,
        help="Maximum number of prompts that are computed at the same time. null: 16, or 64 on a GPU.",
    )
    max_waiting: int = fixed(256)  # number of prompts, as many as a router queues, so that the router refuses first


SECTIONS = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "kv_transfer": KvTransferConfig,
    **SERVICE_SECTIONS,
    "prefill_node": PrefillNodeConfig,
}
"""The sections that a prefill node reads."""
