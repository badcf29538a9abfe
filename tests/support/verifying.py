"""Verification whose result is returned at once."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.arrays import Array
from outrider.engine.pending import read
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.by_request import RequestVerifier
from tests.support.sampler_kinds import as_taken_by


def verify_now(verifier: RequestVerifier, logits: Array, drafts: Sequence[DraftRows]) -> list[Verified]:
    """Verifies logits of either library, and returns the outcomes."""
    (verified,) = read(verifier.queue(as_taken_by(verifier._sampler, logits), drafts))
    return list(verified)
