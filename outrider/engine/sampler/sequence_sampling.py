"""The sampler's state of one sample: its parameters and what it has generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from outrider.constraints.compiler import GrammarState, Masks
from outrider.engine.sampler.arrivals import RaceKey
from outrider.engine.sampler.penalties import PenaltyState
from outrider.request import LogprobsRequest, SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class SequenceSampling:
    """Mutable state of one sample of a request, created by `Sampler.start` and advanced by `Sampler.commit`.

    Belongs to the thread that calls the sampler. `Sampler.sample` reads it and changes nothing except `prepared`: draft
    assumptions are passed separately in `SampleRows`.
    """

    params: SamplingParams
    sample: int  # index among the request's n samples; arrival times depend on it
    logprobs: LogprobsRequest | None
    penalties: PenaltyState
    prepared: object = None  # a NativeDecider's cached parameters, set at the first decision
    constraint: GrammarState | None = None  # None: the output is unconstrained
    failure: str = ""  # why the constraint ends the request; empty: it does not


class SampleRows(NamedTuple):
    """One sequence's share of a step: `len(draft_token_ids) + 1` consecutive rows of logits.

    Row j decides position `position + j` and treats as generated what is committed in `state`, then
    `assumed_token_ids`, then `draft_token_ids[:j]`. Verification passes drafts; a draft model, which computes one row
    at a time, passes its tokens so far as `assumed_token_ids` and no drafts.
    """

    state: SequenceSampling
    position: int  # absolute position of the token that the first row decides
    draft_token_ids: tuple[int, ...] = ()
    assumed_token_ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1

    def masks(self) -> Masks | None:
        """Returns bit masks of the tokens that the sample's constraint allows: [num_rows, num_words]. None if all."""
        constraint = self.state.constraint
        return None if constraint is None else constraint.masks(self.assumed_token_ids, self.draft_token_ids)

    def decisions(self) -> Iterator[Decision]:
        """Yields a decision for each row, in order."""
        masks = self.masks()
        for j in range(self.num_rows):
            assumed_token_ids = self.assumed_token_ids + self.draft_token_ids[:j]
            yield Decision(self.state, self.position + j, assumed_token_ids, None if masks is None else masks[j])


@dataclass(frozen=True, slots=True)
class Decision:
    """The sample and position that one row of logits decides."""

    state: SequenceSampling
    position: int  # absolute
    assumed_token_ids: tuple[int, ...]  # tokens that count as generated, after the committed ones
    mask: Masks | None = None  # [num_words], bit mask of tokens that the constraint allows; None: all

    @property
    def params(self) -> SamplingParams:
        return self.state.params

    @property
    def key(self) -> RaceKey:
        return RaceKey(self.state.params.seed, self.state.sample, self.position)


class SampledRows(NamedTuple):
    """The result of one `Sampler.sample`, in the order of the rows of logits."""

    token_ids: list[int]  # [num_rows]
    logprobs: list[TokenLogprobs | None]  # [num_rows]; None: not requested
