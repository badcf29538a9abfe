"""The router's settings: addresses of nodes, and limits of the queue. Everything else comes from the nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.config.settings import fixed, setting
from outrider.request import VerificationMethod
from outrider.rpc.tls import TlsConfig
from outrider.service.config import SERVICE_SECTIONS, GatewayConfig
from router.store_address import MEMORY, ValkeyAddress

STORE = "store"
"""The value of `router.receipts` for the store that routers share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's settings. A target is host:port; a name that resolves to several addresses is several nodes."""

    prefill_targets: tuple[str, ...] = setting(
        (), help="Prefill nodes, host:port. Without one, decode nodes compute prompts."
    )
    decode_targets: tuple[str, ...] = setting((), help="Decode nodes, host:port.")
    draft_targets: tuple[str, ...] = setting((), help="Draft nodes, host:port; watched only, decode nodes dial them.")
    max_waiting: int = setting(
        256,
        at_least=0,
        at_most=1_000_000,
        help="Maximum number of requests in the queue, and of 1,024 times as many prompt tokens; a request beyond "
        "either limit ends with RESOURCE_EXHAUSTED.",
    )
    answer_memory_bytes: int = setting(
        256 << 20, at_least=1 << 16, at_most=1 << 44, help="Memory for running answers; beyond: RESOURCE_EXHAUSTED."
    )
    liveness_timeout_seconds: float = setting(
        2.0, at_least=1.0, at_most=600.0, help="A node whose progress stops for this long is lost."
    )
    no_node_timeout_seconds: float = setting(
        30.0, at_least=0.0, at_most=3600.0, help="How long requests wait while no decode node serves."
    )
    store: str = setting(
        MEMORY,
        help="Where requests with a resume window are kept: memory, or valkey://host:port/database, which several "
        "routers may share (valkeys:// for TLS). Its password is better in OUTRIDER_STORE_PASSWORD.",
    )
    store_lost: str = setting(
        "refuse",
        choices=("refuse", "serve"),
        help="What requests with a resume window get while the store does not answer: UNAVAILABLE, or an answer that "
        "only this router can resume.",
    )
    store_timeout_seconds: float = setting(
        0.5, at_least=0.01, at_most=60.0, help="How long the store may take for an answer."
    )
    receipts: str = setting(
        "",
        help="Where receipts of answers are kept, for `outrider replay`: a directory, or store (the one of "
        "router.store). They contain prompts and answers; see docs/replay.md. Empty: none are kept.",
    )
    receipts_bytes: int = setting(
        256 << 20,
        at_least=1 << 20,
        at_most=1 << 44,
        help="Size of a directory of receipts, of all routers that share it; the oldest go first.",
    )
    token_file: Path | None = setting(
        None,
        help="Asks clients for tokens: a file of lines NAME sha256:HEX [priority=N] [rate=N]; see docs/security.md.",
    )
    verification_method: str = setting(
        "coupled",
        choices=tuple(VerificationMethod),
        help="How drafts are verified where a request does not say. coupled: tokens do not depend on drafts; "
        "rejection: exact in distribution only; typical: lossy, tokens do not have the model's distribution.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)  # for clients, if they see another certificate

    waiting_prompt_tokens: int = fixed(1024)  # for each of `max_waiting` requests, in the mean
    prefill_outstanding_tokens: int = fixed(1024)  # uncached, for a prefill node that does not report its chunk size
    open_timeout_seconds: float = fixed(10.0)  # for a decode node to grant or reject, which it does between steps
    kv_ready_timeout_seconds: float = fixed(10.0)  # from a prefill's end to complete KV; its last frames take less
    resolve_interval_seconds: float = fixed(2.0)  # finds new containers soon, and a lookup is cheap
    store_lease_seconds: float = fixed(2.0)  # unrenewed requests then have no owner: about when a router's loss shows
    store_append_seconds: float = fixed(0.2)  # tokens that a lost router has not stored are recomputed
    tokenizer_threads: int = fixed(2)  # a prompt is encoded in milliseconds; more would take CPUs from nodes

    def __post_init__(self) -> None:
        if self.store != MEMORY:
            ValkeyAddress.parse(self.store)
        elif self.receipts == STORE:
            raise ValueError(f"receipts is {STORE}, which needs store=valkey://host:port; or name a directory")


SECTIONS = {**SERVICE_SECTIONS, "router": RouterConfig, "gateway": GatewayConfig}
"""The configuration sections that a router reads."""
