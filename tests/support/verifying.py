"""What verification methods commit, as soon as it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.transfer import read
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.by_request import RequestVerifier


def verify_now(verifier: RequestVerifier, logits: Tensor, drafts: Sequence[DraftRows]) -> list[Verified]:
    """As `queue`, and waits for the outcomes."""
    (verified,) = read(verifier.queue(logits, drafts))
    return list(verified)
