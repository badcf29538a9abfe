"""Settings of the decode node."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.kv_transfer.config import KvTransferConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import SERVICE_SECTIONS
from outrider.speculation.proposers.factory import LOOKUP_NAMES, NO_PROPOSER

MAX_RUNNING = {"cpu": 64, "cuda": 256}
"""Default maximum number of sequences in the running batch, by device. A GPU reads the weights once for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeConfig:
    """The section `decode_node`."""

    kv_cache: KVCacheConfig = fixed(KVCacheConfig())  # the section `kv_cache`
    kv_transfer: KvTransferConfig = fixed(KvTransferConfig())  # the section `kv_transfer`
    transfer_timeout_seconds: float = setting(
        30.0,
        above=0,
        help="Seconds without a new frame after which a KV transfer fails; if no other one is started within the same "
        "time, its group fails and the reserved blocks are freed.",
    )
    session_timeout_seconds: float = setting(
        4.0, at_least=1.0, help="Seconds without a message after which a router's session ends and its requests stop."
    )
    draft_targets: tuple[str, ...] = setting(
        (), help="host:port of the draft nodes; a name may resolve to several; empty: no remote drafts."
    )
    num_speculative_tokens: int = setting(
        5, at_least=0, at_most=32, help="Maximum draft tokens verified for a sequence in one step; 0: no speculation."
    )
    draft_trees: str = setting(
        "auto",
        choices=("auto", "off"),
        help="auto: drafts include the likeliest alternatives to their tokens, which are verified in the same step if "
        "that gains more than a longer draft; off: drafts are single paths.",
    )
    draft_rows: str = setting(
        "best",
        choices=("best", "all"),
        help="best: the draft tokens that make the batch faster are verified; all: every draft token that there is "
        "room for is verified, for comparisons.",
    )
    local_fallback: str = setting(
        "ngram",
        choices=(*LOOKUP_NAMES, NO_PROPOSER),
        help="The lookup that proposes drafts in this process; it competes with draft nodes and the head.",
    )
    local_head: bool = setting(
        True, help="Run model.head in this process; if off, draft nodes may run it with features from this node."
    )
    max_running_sequences: int | None = setting(
        None, at_least=1, at_most=4096, help="Maximum sequences in the running batch; null: 64, on a GPU 256."
    )
    max_rows_per_step: int = setting(
        512, at_least=16, at_most=65536, help="Maximum rows of one forward pass: decode rows, drafts and prompt chunks."
    )
    keep_features: str = setting(
        "",
        help="A folder in which prompts and answers (users' texts, as token ids) are kept for train-head "
        "--from-traffic. Its size is limited, the oldest are deleted first; empty: none are kept.",
    )
    keep_features_bytes: int = fixed(256 << 20)  # for all nodes that share the folder; about forty million tokens
    resolve_interval_seconds: float = fixed(2.0)  # finds new draft nodes soon, and a lookup is cheap
    draft_wait_seconds: float = fixed(0.002)  # maximum wait of a step for drafts; it is also at most 20 % of a step
    max_local_prefill_tokens: int = fixed(32)  # maximum missing tokens that are computed instead of transferred


SECTIONS = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "kv_transfer": KvTransferConfig,
    **SERVICE_SECTIONS,
    "decode_node": DecodeNodeConfig,
}
"""The sections that a decode node reads."""
