"""The router's settings: where the nodes are, and how much may wait. Everything else comes from the nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.config import setting
from outrider.request import VerificationMethod
from outrider.service.config import ServerConfig
from router.store.address import MEMORY, ValkeyAddress

DEFAULT_PORT = 50051


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """A target is host:port; a name that resolves to several addresses is several nodes."""

    prefill_targets: tuple[str, ...] = setting((), help="Prefill nodes, host:port.")
    decode_targets: tuple[str, ...] = setting((), help="Decode nodes, host:port.")
    draft_targets: tuple[str, ...] = setting((), help="Draft nodes, host:port; watched only, decode nodes dial them.")
    max_waiting: int = setting(
        256, at_least=0, at_most=1_000_000, help="Requests in the queue; beyond: RESOURCE_EXHAUSTED."
    )
    max_waiting_tokens: int = setting(
        262_144, at_least=0, at_most=1 << 40, help="Prompt tokens in the queue; beyond: RESOURCE_EXHAUSTED."
    )
    max_left_requests: int = setting(
        32,
        at_least=0,
        at_most=1_000_000,
        help="Requests that one client may begin and leave, besides as many as it reads to their ends and two a "
        "second; beyond: RESOURCE_EXHAUSTED. 0: any number.",
    )
    prefill_outstanding_tokens: int = setting(
        1024, at_least=1, at_most=1 << 30, help="Uncached prompt tokens under way on one prefill node (four chunks)."
    )
    journal_bytes: int = setting(
        256 << 20, at_least=1 << 16, at_most=1 << 44, help="Memory for running answers; beyond: RESOURCE_EXHAUSTED."
    )
    liveness_timeout_seconds: float = setting(
        2.0, at_least=1.0, at_most=600.0, help="A node whose progress stops for this long is lost."
    )
    open_timeout_seconds: float = setting(
        10.0, at_least=1.0, at_most=600.0, help="How long a decode node may take to grant or reject a request."
    )
    kv_ready_timeout_seconds: float = setting(
        10.0,
        at_least=1.0,
        at_most=600.0,
        help="From the end of a prefill to the decode node's word that KV is complete.",
    )
    no_node_timeout_seconds: float = setting(
        30.0, at_least=0.0, at_most=3600.0, help="How long requests wait while no decode or no prefill node serves."
    )
    resolve_interval_seconds: float = setting(
        5.0, at_least=0.1, at_most=3600.0, help="How often targets are looked up again."
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
    store_lease_seconds: float = setting(
        2.0, at_least=0.1, at_most=600.0, help="A request whose router has not renewed it for so long has no owner."
    )
    store_append_seconds: float = setting(0.2, at_least=0.01, at_most=60.0, help="How often new tokens are stored.")
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
    tokenizer_threads: int = setting(2, at_least=1, at_most=64, help="Threads that encode prompts.")
    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=DEFAULT_PORT))

    def __post_init__(self) -> None:
        if self.store != MEMORY:
            ValkeyAddress.parse(self.store)
