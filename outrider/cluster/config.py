"""Settings of a local cluster."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import setting

DRAFT_MODEL_PREFIX = "draft_model:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: which processes there are, and how they are kept."""

    prefill_nodes: int = setting(1, at_least=1, at_most=64, help="Prefill nodes.")
    decode_nodes: int = setting(1, at_least=1, at_most=64, help="Decode nodes.")
    draft_nodes: int = setting(1, at_least=0, at_most=64, help="Draft nodes.")
    draft: str = setting("ngram", help="Who proposes: ngram, draft_model:PATH, or none (plain decoding).")
    port: int | None = setting(
        None, at_least=0, at_most=65535, help="The router's port; 0: the system chooses; null: router.server.port."
    )
    metrics: bool = setting(True, help="Prometheus on each process, on ports that the system chooses.")
    drain_seconds: float = setting(
        1.5, at_least=0, at_most=60, help="How long running work may go on at the end, unless a role's section says."
    )
    kill_seconds: float = setting(3.0, above=0, at_most=60, help="SIGKILL this long after SIGTERM.")
    restart_seconds: float = setting(1.0, above=0, help="Before a dead node is started again; doubles each time.")
    restart_most_seconds: float = setting(30.0, above=0, help="The longest such wait.")
    stable_seconds: float = setting(
        60.0, above=0, help="A node that served so long starts over with the shortest wait."
    )

    def __post_init__(self) -> None:
        if self.draft not in ("ngram", "none") and not self.draft.removeprefix(DRAFT_MODEL_PREFIX).strip():
            raise ValueError(f"draft {self.draft!r} needs the path or the id of a model after {DRAFT_MODEL_PREFIX}")
        if self.draft not in ("ngram", "none") and not self.draft.startswith(DRAFT_MODEL_PREFIX):
            raise ValueError(f"draft must be ngram, none or {DRAFT_MODEL_PREFIX}PATH, not {self.draft!r}")
