"""Settings of a local cluster."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import setting
from outrider.service.config import ROUTER_PORT
from outrider.speculation.proposers.factory import DRAFT_CHOICES, DraftChoice, parse_draft_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: which processes `outrider up` starts."""

    prefill_nodes: int = setting(1, at_least=1, at_most=64, help="Number of prefill nodes.")
    decode_nodes: int = setting(1, at_least=1, at_most=64, help="Number of decode nodes.")
    draft_nodes: int = setting(1, at_least=0, at_most=64, help="Number of draft nodes.")
    routers: int = setting(
        1, at_least=1, at_most=64, help="Number of routers, on consecutive ports; several share router.store."
    )
    draft: str = setting("ngram", help=f"The proposer: {', '.join(DRAFT_CHOICES)} (no speculation).")
    port: int = setting(
        ROUTER_PORT, at_least=0, at_most=65535, help="The (first) router's port; 0: the system chooses."
    )

    def __post_init__(self) -> None:
        parse_draft_choice(self.draft)

    @property
    def draft_choice(self) -> DraftChoice:
        """`draft`, parsed."""
        return parse_draft_choice(self.draft)
