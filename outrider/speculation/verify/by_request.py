"""Verifies each draft of a step with its request's verification method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.arrays import Array, ids_like
from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler
from outrider.request import VerificationMethod
from outrider.speculation.verify.base import DraftRows, Verified, Verifier
from outrider.speculation.verify.coupled import CoupledVerifier
from outrider.speculation.verify.rejection import RejectionVerifier
from outrider.speculation.verify.rows import row_starts, runs_of
from outrider.speculation.verify.typical import TypicalVerifier


class RequestVerifier:
    """Applies all verification methods with one sampler. One thread owns it."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.verifiers: dict[VerificationMethod, Verifier] = {
            VerificationMethod.COUPLED: CoupledVerifier(sampler),
            VerificationMethod.REJECTION: RejectionVerifier(sampler),
            VerificationMethod.TYPICAL: TypicalVerifier(sampler),
        }

    def prepare(self, drafts: Sequence[DraftRows]) -> None:
        """Starts computing the constraint masks of these drafts while the forward that yields their logits runs."""
        constrained = [draft for draft in drafts if draft.rows.state.constraint is not None]
        if constrained:
            self._sampler.prepare_masks([run for draft in constrained for run in runs_of(draft)])

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        """Returns the outcome for each draft, in order. Arguments as for `Verifier.queue`; `drafts` may be empty.

        Reading the result waits for the device once, however many methods are used.
        """
        if {draft.method for draft in drafts} == {VerificationMethod.COUPLED}:
            return self.verifiers[VerificationMethod.COUPLED].queue(logits, drafts)
        by_method: dict[VerificationMethod, list[int]] = {}
        for place, draft in enumerate(drafts):
            # At temperature 0 the target allows only one token, so all methods give the same result.
            method = VerificationMethod.COUPLED if draft.rows.state.params.is_greedy else draft.method
            assert not draft.parents or method is VerificationMethod.COUPLED, "only coupled sampling verifies trees"
            by_method.setdefault(method, []).append(place)
        starts = row_starts(drafts)
        queued: list[Pending[list[Verified]]] = []
        for method, places in by_method.items():
            part = logits
            if len(by_method) > 1:
                rows = [starts[place] + row for place in places for row in range(drafts[place].rows.num_rows)]
                part = logits[ids_like(rows, logits)]
            queued.append(self.verifiers[method].queue(part, [drafts[place] for place in places]))

        def in_order(arrays: Sequence[Any]) -> list[Verified]:
            left = iter(arrays)
            found: dict[int, Verified] = {}
            for places, pending in zip(by_method.values(), queued, strict=True):
                found.update(zip(places, pending.finish([next(left) for _ in pending.arrays]), strict=True))
            return [found[place] for place in range(len(drafts))]

        return Pending(tuple(array for pending in queued for array in pending.arrays), in_order)
