"""Settings of a local cluster."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import setting

DRAFT_MODEL_PREFIX = "draft_model:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: which processes are started, and how they are supervised."""

    prefill_nodes: int = setting(1, at_least=1, at_most=64, help="Number of prefill nodes.")
    decode_nodes: int = setting(1, at_least=1, at_most=64, help="Number of decode nodes.")
    draft_nodes: int = setting(1, at_least=0, at_most=64, help="Number of draft nodes.")
    routers: int = setting(
        1, at_least=1, at_most=64, help="Number of routers, on consecutive ports; several share router.store."
    )
    draft: str = setting("ngram", help="The proposer: ngram, draft_model:PATH, or none (no speculation).")
    port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="The (first) router's port; 0: the system chooses; null: router.server.port.",
    )
    metrics: bool = setting(True, help="Prometheus metrics of each process, on ports that the system chooses.")
    drain_seconds: float = setting(
        1.5, at_least=0, at_most=60, help="Time for running work after SIGTERM, unless a role's section sets it."
    )
    kill_seconds: float = setting(3.0, above=0, at_most=60, help="Time from SIGTERM to SIGKILL.")
    restart_seconds: float = setting(
        1.0, above=0, help="Wait before a node that dies for the second time is restarted; then it doubles each time."
    )
    restart_most_seconds: float = setting(30.0, above=0, help="Maximum of that wait.")
    stable_seconds: float = setting(
        60.0, above=0, help="After serving for this long, a node is restarted with the shortest wait again."
    )

    def __post_init__(self) -> None:
        if self.draft not in ("ngram", "none") and not self.draft.removeprefix(DRAFT_MODEL_PREFIX).strip():
            raise ValueError(f"draft {self.draft!r} needs the path or the id of a model after {DRAFT_MODEL_PREFIX}")
        if self.draft not in ("ngram", "none") and not self.draft.startswith(DRAFT_MODEL_PREFIX):
            raise ValueError(f"draft must be ngram, none or {DRAFT_MODEL_PREFIX}PATH, not {self.draft!r}")
