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
"""Default maximum number of sequences in the running batch, by device. A GPU reads the weights once for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeConfig:
    """The section `decode_node`."""

    kv_cache: KVCacheConfig = fixed(KVCacheConfig())  # the section `kv_cache`
    kv_transfer: KvTransferConfig = fixed(KvTransferConfig())  # the section `kv_transfer`
    session_timeout_seconds: float = setting(
        4.0, at_least=1.0, help="Seconds without a message after which a router counts as dead and its work is freed."
    )
    draft_targets: tuple[str, ...] = setting(
        (),
        help="Addresses (host:port) of draft nodes. A name that resolves to several addresses is several nodes. "
        "Empty: no remote drafts.",
    )
    num_speculative_tokens: int = setting(
        5,
        at_least=0,
        at_most=32,
        help="Maximum number of draft tokens that are verified for a sequence in one step. 0: no speculation.",
    )
    draft_rows: str = setting(
        "best",
        choices=("best", "all"),
        help="Which draft tokens are verified. best: those that are expected to make the batch faster. all: as many "
        "as there is room for, to compare with a fixed number.",
    )
    local_lookup: str = setting(
        "ngram",
        choices=(*LOOKUP_NAMES, NO_PROPOSER),
        help="Lookup that proposes drafts in this process. It competes with draft nodes and the head: the draft "
        "with the highest expected gain is verified.",
    )
    local_head: bool = setting(
        True,
        help="Whether this process proposes with model.head. If false, draft nodes may do that, and this node sends "
        "them the features.",
    )
    max_running_sequences: int | None = setting(
        None,
        at_least=1,
        at_most=4096,
        help="Maximum number of sequences in the running batch. null: 64, or 256 on a GPU.",
    )
    max_rows_per_step: int = setting(
        512,
        at_least=16,
        at_most=65536,
        help="Maximum number of rows of one forward pass: decode rows, draft rows and rows of prompt chunks.",
    )
    keep_answers: str = setting(
        "",
        help="Folder in which answers and their prompts are kept for train-head --from-traffic. It contains users' "
        "texts as token ids. Its size is limited, and the oldest answers are deleted first. Empty: no answers "
        "are kept.",
    )
    keep_answers_bytes: int = fixed(256 << 20)  # maximum size of the whole folder; about forty million tokens
    transfer_timeout_seconds: float = fixed(30.0)  # maximum wait for the next frame before a KV transfer fails
    draft_trees: bool = fixed(True)  # whether drafts may have alternatives, which are verified in the same step
    resolve_interval_seconds: float = fixed(2.0)  # short, so that new draft nodes are found soon; lookups are cheap
    draft_wait_seconds: float = fixed(0.002)  # maximum wait of a step for drafts, also limited to 20 % of a step
    max_local_prefill_tokens: int = fixed(32)  # maximum missing tokens that this node computes itself


SECTIONS = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "kv_transfer": KvTransferConfig,
    **SERVICE_SECTIONS,
    "decode_node": DecodeNodeConfig,
}
"""The sections that a decode node reads."""
