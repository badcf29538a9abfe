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
    """The router's settings. A target is host:port; a name that resolves to several addresses is several nodes."""

    prefill_targets: tuple[str, ...] = setting(
        (), help="Prefill nodes, host:port. Without one, decode nodes compute prompts."
    )
    decode_targets: tuple[str, ...] = setting((), help="Decode nodes, host:port.")
    draft_targets: tuple[str, ...] = setting(
        (), help="Draft nodes, host:port. The router only watches them; decode nodes connect to them."
    )
    max_waiting: int = setting(
        256, at_least=0, at_most=1_000_000, help="Maximum requests in the queue; more get RESOURCE_EXHAUSTED."
    )
    max_waiting_tokens: int = setting(
        262_144, at_least=0, at_most=1 << 40, help="Maximum prompt tokens in the queue; more get RESOURCE_EXHAUSTED."
    )
    journal_bytes: int = setting(
        256 << 20,
        at_least=1 << 16,
        at_most=1 << 44,
        help="Bytes of memory for answers. Requests get RESOURCE_EXHAUSTED when it is full.",
    )
    liveness_timeout_seconds: float = setting(
        2.0, at_least=1.0, at_most=600.0, help="Seconds without progress after which a node is lost."
    )
    no_node_timeout_seconds: float = setting(
        30.0, at_least=0.0, at_most=3600.0, help="Seconds that a request waits if no decode node serves."
    )
    store: str = setting(
        MEMORY,
        help="Where requests with a resume window are kept: memory, or valkey://host:port/database, which several "
        "routers may share (valkeys:// for TLS). Its password is better in OUTRIDER_STORE_PASSWORD.",
    )
    store_lost: str = setting(
        "refuse",
        choices=("refuse", "serve"),
        help="What happens to requests with a resume window while the store does not answer. refuse: they get "
        "UNAVAILABLE; serve: they are answered, but only this router can resume them.",
    )
    store_timeout_seconds: float = setting(0.5, at_least=0.01, at_most=60.0, help="Seconds to wait for the store.")
    receipts: str = setting(
        "",
        help="Where receipts of answers are kept for `outrider replay`: a directory, or store (the one of "
        "router.store). They contain prompts and answers; see docs/replay.md. Empty: none are kept.",
    )
    receipts_bytes: int = setting(
        256 << 20,
        at_least=1 << 20,
        at_most=1 << 44,
        help="Maximum bytes of a directory of receipts, for all routers that share it. The oldest are deleted.",
    )
    token_file: Path | None = setting(
        None,
        help="File with the tokens that clients need, in lines NAME sha256:HEX [priority=N] [rate=N]; see "
        "docs/security.md.",
    )
    verification_method: str = setting(
        "coupled",
        choices=tuple(VerificationMethod),
        help="How drafts are verified if a request does not say. coupled: tokens do not depend on drafts; "
        "rejection: exact in distribution only; typical: lossy, tokens do not have the model's distribution.",
    )
    timelines: int = setting(
        256,
        at_least=0,
        at_most=1_000,
        help="Number of latest requests that the page on server.metrics_port shows; 0: none.",
    )
    vllm_engine: str = setting(
        "auto",
        choices=("auto", "on", "off"),
        help="Whether gateways may use the router as a vLLM engine (vllm.grpc.engine.VllmEngine), as the OpenAI API "
        "does. auto: if smg-grpc-proto is installed.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)  # if clients see another certificate than nodes do

    prefill_outstanding_tokens: int = fixed(1024)  # uncached tokens; for prefill nodes that report no chunk size
    open_timeout_seconds: float = fixed(10.0)  # for a decode node's grant or refusal, which it sends between steps
    kv_ready_timeout_seconds: float = fixed(10.0)  # from the end of a prefill to complete KV; the last frames take less
    resolve_interval_seconds: float = fixed(2.0)  # new containers are found soon, and a lookup is cheap
    # An owner that does not renew its lease loses the request. Clients take about as long to notice a lost router.
    store_lease_seconds: float = fixed(2.0)
    store_append_seconds: float = fixed(0.2)  # tokens that a lost router has not stored are recomputed
    tokenizer_threads: int = fixed(2)  # encoding a prompt takes milliseconds; more threads would take CPUs from nodes

    def __post_init__(self) -> None:
        if self.store != MEMORY:
            ValkeyAddress.parse(self.store)
        elif self.receipts == STORE:
            raise ValueError(f"receipts={STORE} needs store=valkey://host:port; otherwise name a directory")


SECTIONS = {**SERVICE_SECTIONS, "router": RouterConfig, "gateway": GatewayConfig}
"""The configuration sections that a router reads."""
