"""The router's settings, mainly the nodes' addresses and the queue's limits. Everything else comes from the nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.config.settings import fixed, setting
from outrider.request import VerificationMethod
from outrider.rpc.tls import TlsConfig
from outrider.service.config import SERVICE_SECTIONS, GatewayConfig
from router.store_address import MEMORY, ValkeyAddress

STORE = "store"
"""The value of `router.receipts` that keeps receipts in the store that routers share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's settings. A target is host:port; a name with several addresses stands for several nodes."""

    prefill_targets: tuple[str, ...] = setting(
        (), help="Addresses (host:port) of prefill nodes. Empty: decode nodes compute prompts."
    )
    decode_targets: tuple[str, ...] = setting((), help="Addresses (host:port) of decode nodes.")
    draft_targets: tuple[str, ...] = setting(
        (), help="Addresses (host:port) of draft nodes. The router only monitors them; decode nodes connect to them."
    )
    max_waiting: int = setting(
        256,
        at_least=0,
        at_most=1_000_000,
        help="Maximum number of requests in the queue. They may have 1,024 prompt tokens each in the mean, or 262,144 "
        "together if that is more. A request beyond either limit ends with RESOURCE_EXHAUSTED.",
    )
    answer_memory_bytes: int = setting(
        256 << 20,
        at_least=1 << 16,
        at_most=1 << 44,
        help="Memory in bytes for the answers that the router holds, running or resumable. A request for which "
        "there is no room ends with RESOURCE_EXHAUSTED.",
    )
    liveness_timeout_seconds: float = setting(
        2.0, at_least=1.0, at_most=600.0, help="Seconds without progress after which a node counts as lost."
    )
    no_node_timeout_seconds: float = setting(
        30.0, at_least=0.0, at_most=3600.0, help="Seconds that requests wait while no decode node serves."
    )
    store: str = setting(
        MEMORY,
        help="Where requests with a resume window are stored: memory, or valkey://host:port/database, which several "
        "routers may share (valkeys:// for TLS). Pass its password in OUTRIDER_STORE_PASSWORD rather than "
        "here.",
    )
    store_lost: str = setting(
        "refuse",
        choices=("refuse", "serve"),
        help="What happens to requests with a resume window while the store does not respond. refuse: they get "
        "UNAVAILABLE. serve: they are answered, but only this router can resume the answer.",
    )
    store_timeout_seconds: float = setting(
        0.5, at_least=0.01, at_most=60.0, help="Seconds that the store may take to respond."
    )
    receipts: str = setting(
        "",
        help="Where receipts of answers are kept for `outrider replay`: a directory, or `store` (the one of "
        "router.store). Receipts contain prompts and answers; see docs/replay.md. Empty: no receipts are kept.",
    )
    receipts_bytes: int = setting(
        256 << 20,
        at_least=1 << 20,
        at_most=1 << 44,
        help="Maximum size in bytes of a directory of receipts, for all routers that share it. The oldest receipts "
        "are deleted first.",
    )
    token_file: Path | None = setting(
        None,
        help="File of the tokens that clients must send, with lines NAME sha256:HEX [priority=N] [rate=N] [adapters]; "
        "see docs/security.md. null: clients need no token.",
    )
    verification_method: str = setting(
        "coupled",
        choices=tuple(VerificationMethod),
        help="How draft tokens are verified if a request does not say. coupled: the tokens do not depend on drafts. "
        "rejection: only their distribution is exact. typical: LOSSY, the tokens do not have the model's "
        "distribution.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)  # set if clients and nodes see different certificates

    min_waiting_tokens: int = fixed(256 << 10)  # prompt tokens that may wait even if `max_waiting` is small
    tokens_per_waiting: int = fixed(1024)  # prompt tokens that may wait for each of `max_waiting` requests
    # Maximum outstanding uncached tokens on a prefill node that does not report its chunk size.
    prefill_outstanding_tokens: int = fixed(1024)
    open_timeout_seconds: float = fixed(10.0)  # time for a decode node to grant or reject, which it does between steps
    kv_ready_timeout_seconds: float = fixed(10.0)  # from a prefill's end to complete KV; the last frames need less
    resolve_interval_seconds: float = fixed(2.0)  # short, so that new containers are found soon; a lookup is cheap
    # A request that is not renewed for this long has no owner. A router's loss shows after about this time.
    store_lease_seconds: float = fixed(2.0)
    store_append_seconds: float = fixed(0.2)  # tokens not yet stored when a router is lost are recomputed
    tokenizer_threads: int = fixed(2)  # encoding a prompt takes milliseconds; more threads would take CPUs from nodes

    @property
    def max_waiting_tokens(self) -> int:
        """Maximum number of prompt tokens in the queue."""
        return max(self.min_waiting_tokens, self.max_waiting * self.tokens_per_waiting)

    def __post_init__(self) -> None:
        if self.store != MEMORY:
            ValkeyAddress.parse(self.store)
        elif self.receipts == STORE:
            raise ValueError(f"receipts={STORE} needs store=valkey://host:port; otherwise name a directory")


SECTIONS = {**SERVICE_SECTIONS, "router": RouterConfig, "gateway": GatewayConfig}
"""The configuration sections that a router reads."""
