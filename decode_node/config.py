"""Settings of the decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.service.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeConfig:
    """Section `decode_node`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    kv_port: int = setting(0, at_least=0, at_most=65535, help="Port of the KV ingest; 0 lets the system choose.")
    kv_host: str = setting("", help="Interface of the KV ingest; empty: the server's.")
    connectors: tuple[str, ...] = setting(
        ("shared_memory", "grpc"), choices=("shared_memory", "grpc"), help="KV connectors offered, best first."
    )
    transfer_timeout_seconds: float = setting(
        30.0,
        above=0,
        help="A KV transfer without a new frame for so long has failed; reserved blocks that no other transfer fills "
        "for as long again are freed.",
    )
    session_timeout_seconds: float = setting(
        4.0, at_least=1.0, help="A router that says nothing for so long is taken for dead; its work is freed."
    )
    draft_targets: tuple[str, ...] = setting(
        (), help="host:port of the draft nodes; a name with several addresses is several; none: no remote drafts."
    )
    resolve_interval_seconds: float = setting(
        5.0, at_least=0.1, at_most=3600.0, help="How often draft targets are looked up again."
    )
    num_speculative_tokens: int = setting(
        5, at_least=0, at_most=32, help="The most draft tokens verified for a sequence in one step; 0 is none."
    )
    draft_trees: str = setting(
        "off",
        choices=("auto", "off"),
        help="auto: draft nodes send the likeliest alternatives to their tokens, which are verified in the same step "
        "where they are worth more than a longer draft.",
    )
    draft_rows: str = setting(
        "best",
        choices=("best", "all"),
        help="best: the draft tokens that make the batch faster are verified; all: as many as there is room for, "
        "to compare with a fixed number.",
    )
    local_fallback: str = setting(
        "ngram", choices=("ngram", "none"), help="Proposes where no draft node has: prompt lookup, or nothing."
    )
    drafts_share_processors: bool = setting(
        False,
        help="Whether draft nodes compute on this node's processors: then they are asked as long as it makes this node "
        "faster.",
    )
    draft_wait_seconds: float = setting(
        0.002, at_least=0, at_most=0.1, help="The longest a step waits for drafts (never over 20 % of a step)."
    )
    typical_threshold: float = setting(
        0.09,
        above=0,
        at_most=1,
        help="For requests that ask for typical acceptance, which is lossy: so likely draft tokens are accepted.",
    )
    typical_alpha: float = setting(
        0.3,
        above=0,
        at_most=1,
        help="As typical_threshold, where the model is undecided: a probability of alpha * exp(-entropy) is enough.",
    )
    max_running_sequences: int = setting(64, at_least=1, at_most=4096, help="Sequences in the running batch.")
    max_rows_per_step: int = setting(
        512, at_least=16, at_most=65536, help="Rows of one forward pass: decode rows, drafts and prompt chunks."
    )
    max_local_prefill_tokens: int = setting(
        32, at_least=1, help="A prompt remainder up to this length is computed here instead of transferred."
    )
    turns_file: str = setting(
        "",
        help="Nodes that compute on the same processors and name the same file take turns there; empty: at once. "
        "`outrider up` chooses.",
    )
