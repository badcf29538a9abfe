"""What the sampler knows of constraints: a mask of allowed tokens for each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.errors import NotSupportedError
from outrider.request import Constraint

Masks = npt.NDArray[np.int32]
"""[num_rows, num_words]: bit i of word w says whether token 32 w + i is allowed. Words cover the vocabulary."""

ALL_ALLOWED = -1
"""A word of such a mask that allows all of its tokens."""


class SequenceConstraint(Protocol):
    """One sample's place in its grammar: a function of the tokens that it has generated. Not thread-safe."""

    @property
    def failure(self) -> str:
        """Why the sample cannot go on; empty while it can. Its masks mean nothing from then on."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Goes on by generated tokens. A token that the grammar does not allow is a failure."""

    def masks(self, assumed_token_ids: tuple[int, ...], draft_token_ids: tuple[int, ...]) -> Masks:
        """What may follow the assumed tokens and each of the drafts after them: [len(draft_token_ids) + 1, num_words].

        A row after a token that the grammar forbids can never be reached: its mask allows everything. The result is not
        to be changed; it may be the one of an earlier call.
        """

    def forced_tokens(self) -> list[int]:
        """Tokens that spell what alone can follow; empty where there is a choice."""


class ConstraintCompiler(Protocol):
    """Thread-safe."""

    def warm_up(self) -> None:
        """Before the first constraint: what takes long and keeps the interpreter's lock."""

    def prepare(self, constraint: Constraint) -> Future[Any]:
        """Compiles it in another thread: `start` is quick once this is done, for as long as it is kept.

        Its exception is what `start` raises.
        """

    def start(self, constraint: Constraint, generated_token_ids: Sequence[int] = ()) -> SequenceConstraint:
        """For a new sample, which has generated these tokens already.

        Raises: InvalidRequestError for a constraint that cannot be compiled, NotSupportedError for a tokenizer whose
        tokens are not known as bytes.
        """


class NoConstraints:
    """A `ConstraintCompiler` where there is no tokenizer: it knows none."""

    def warm_up(self) -> None:
        """Nothing to do."""

    def prepare(self, constraint: Constraint) -> Future[Any]:
        refusal: Future[Any] = Future()
        message = "no tokenizer to compile constraints for"
        refusal.set_exception(NotSupportedError(message, field=f"sampling.{constraint.kind}"))
        return refusal

    def start(self, constraint: Constraint, generated_token_ids: Sequence[int] = ()) -> SequenceConstraint:
        started: SequenceConstraint = self.prepare(constraint).result()
        return started
