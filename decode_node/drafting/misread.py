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
        self._verdicts: dict[str, list[bool]] = {}  # of first tokens, by proposer

    def observe(self, source: str, *, is_first_accepted: bool) -> None:
        """One verdict. Proposers without a model, whose names have no colon, may well be wrong about a text."""
        verdicts = self._verdicts.setdefault(source, [])
        if len(verdicts) == NUM_DRAFTS or (source != DRAFT_NODE and ":" not in source):
            return
        verdicts.append(is_first_accepted)
        if len(verdicts) == NUM_DRAFTS and sum(verdicts) < LEAST_ACCEPTED * NUM_DRAFTS:
            _log.warning(
                "next to nothing of these drafts is accepted: a head or draft model is probably read wrongly, or was "
                "made for another target; check that it names this target, its layer ids (counted from the input of a "
                "layer or from its output), the flags of its norms, and its d2t",
                proposer=source,
                num_drafts=NUM_DRAFTS,
                num_first_tokens_accepted=sum(verdicts),
            )
