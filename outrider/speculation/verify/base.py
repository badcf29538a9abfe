"""The interface of verification methods: logits and drafts in, committed tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.request import TokenLogprobs, VerificationMethod
from outrider.speculation.token_distribution import TokenDistribution

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.pending import Pending
    from outrider.engine.sampler import SampleRows


class DraftRows(NamedTuple):
    """One sequence's rows in a step.

    The first row decides the token after the known ones; each further row decides the token after one draft token.
    """

    rows: SampleRows
    distributions: tuple[TokenDistribution, ...] = ()  # one per draft token; empty: each token had probability 1
    method: VerificationMethod = VerificationMethod.COUPLED
    parents: tuple[int, ...] = ()  # as in DraftTree; empty for a chain. Only coupled sampling verifies trees

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.rows.draft_token_ids


class Verified(NamedTuple):
    """The tokens committed for one sequence: the accepted draft tokens, then a recovered or a bonus token."""

    token_ids: tuple[int, ...]  # at least one
    logprobs: tuple[TokenLogprobs | None, ...]  # one for each token; empty or None if not requested
    path: tuple[int, ...] = ()  # if the draft is a tree: the indices of the accepted draft tokens

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


class Verifier(Protocol):
    """A verification method. One thread owns it.

    A sequence's outcome depends on its own logits, parameters, tokens and draft, never on the rest of the batch.
    Without a draft, every method commits the token that coupled sampling would commit.
    """

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        """Returns the outcome for each draft, in order, without waiting for the logits' device.

        Args:
            logits: [num_rows, vocab_size] float32, the rows of all drafts in order; not changed.
            drafts: at least one.
        """
