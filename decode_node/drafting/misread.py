"""Says once of a draft model or head that nearly nothing it drafts is accepted: then it is probably read wrongly."""

from __future__ import annotations

from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_tree import DRAFT_NODE

NUM_DRAFTS = 64
"""Verified drafts of a proposer after which it is judged, once."""

LEAST_ACCEPTED = 0.05
"""Of their first tokens. A head that is read as it was trained has 0.3 to 0.9; one of random weights has nothing."""

_log = get_logger("drafts")


class MisreadWatch:
    """Counts first tokens by proposer. Engine thread only."""

    def __init__(self) -> None:
        self._num_drafts: dict[str, int] = {}
        self._num_accepted: dict[str, int] = {}

    def observe(self, source: str, *, is_first_accepted: bool) -> None:
        """One verdict. Proposers without a model, whose names have no colon, may well be wrong about a text."""
        num_drafts = self._num_drafts.get(source, 0)
        if num_drafts == NUM_DRAFTS or (source != DRAFT_NODE and ":" not in source):
            return
        self._num_drafts[source] = num_drafts + 1
        self._num_accepted[source] = self._num_accepted.get(source, 0) + is_first_accepted
        if num_drafts + 1 == NUM_DRAFTS and self._num_accepted[source] < LEAST_ACCEPTED * NUM_DRAFTS:
            _log.warning(
                "next to nothing of these drafts is accepted: a head or draft model is probably read wrongly, or was "
                "made for another target; check that it names this target, its layer ids (counted from the input of a "
                "layer or from its output), the flags of its norms, and its d2t",
                proposer=source,
                num_drafts=NUM_DRAFTS,
                num_first_tokens_accepted=self._num_accepted[source],
            )
