"""What the sampler knows about one sample: its parameters and what it has generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.constraints.compiler import GrammarState, Masks
from outrider.engine.sampler.arrivals import RaceKey
from outrider.engine.sampler.penalties import PenaltyState
from outrider.request import LogprobsRequest, SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class SequenceSampling:
    """Mutable state of one sample of a request; made by `Sampler.start`, moved on by `Sampler.commit`.

    Belongs to the thread that calls the sampler. `Sampler.sample` reads it and never
    changes it, but for `prepared`: what a draft assumes is passed beside it in `SampleRows`.
    """

    params: SamplingParams
    sample: int  # which of the n samples: its own word of the arrivals' counter
    logprobs: LogprobsRequest | None
    penalties: PenaltyState
    prepared: object = None  # what a NativeDecider keeps for it, from its first decision on
    constraint: GrammarState | None = None  # None: the output is free
    failure: str = ""  # why the constraint ends the request


class SampleRows(NamedTuple):
    """One sequence's share of a step: `len(draft_token_ids) + 1` consecutive logits rows.

    Row j decides position `position + j` and takes as generated what is committed in
    `state`, then `assumed_token_ids`, then `draft_token_ids[:j]`. A verify pass passes
    drafts; a draft model, which computes one row at a time, passes what it has drafted so
    far as `assumed_token_ids` and no drafts.
    """

    state: SequenceSampling
    position: int  # absolute position of the token that the first row decides
    draft_token_ids: tuple[int, ...] = ()
    assumed_token_ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1

    def masks(self) -> Masks | None:
        """What the sample's constraint allows: [num_rows, num_words]. None: everything."""
        constraint = self.state.constraint
        return None if constraint is None else constraint.masks(self.assumed_token_ids, self.draft_token_ids)

    def decisions(self) -> Iterator[Decision]:
        """One for each of the rows, in order."""
        masks = self.masks()
        for j in range(self.num_rows):
            assumed_token_ids = self.assumed_token_ids + self.draft_token_ids[:j]
            yield Decision(self.state, self.position + j, assumed_token_ids, None if masks is None else masks[j])


@dataclass(frozen=True, slots=True)
class Decision:
    """Whom one row of logits is for."""

    state: SequenceSampling
    position: int  # absolute
    assumed_token_ids: tuple[int, ...]  # count as generated, besides the committed
    mask: Masks | None = None  # [num_words], what the constraint allows; None: everything

    @property
    def params(self) -> SamplingParams:
        return self.state.params

    @property
    def key(self) -> RaceKey:
        return RaceKey(self.state.params.seed, self.state.sample, self.position)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The decisions of one `Sampler.sample`, in the order of the logits rows."""

    token_ids: list[int] = field(default_factory=list)  # [num_rows]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # [num_rows]; None: not asked for
