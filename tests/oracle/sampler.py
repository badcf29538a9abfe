"""The contract's SamplingParams in numpy, one row at a time, with sorting and an evaluation of every token.

Every decision of native kernels, numpy and torch is compared with the oracle's. The oracle uses float32, and the
operations of `outrider/engine/sampler` where they affect decisions (docs/adr/0016). The only code that it takes from
there is the state of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.engine.sampler import SampledRows, Sampler, SampleRows
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.request import LogprobsMode, SamplingParams, TokenLogprobs
from tests.oracle.arrivals import RaceKey, all_arrivals
from tests.oracle.elementary import logarithm, masses_of

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

MASS_ONE = 2**44


class OracleSampler(Sampler):
    """The oracle in place of a Sampler, with the same states."""

    def __init__(self, *, vocab_size: int, known_token_ids: Bools, constraints: GrammarCompiler | None = None) -> None:
        super().__init__(vocab_size=vocab_size, known_token_ids=known_token_ids, constraints=constraints)
        self._known = known_token_ids

    def sample(self, logits: Floats, rows: Sequence[SampleRows]) -> SampledRows:
        decisions = [decision for part in rows for decision in part.decisions()]
        sampled = SampledRows([], [])
        with np.errstate(over="ignore", invalid="ignore"):
            for row, decision in zip(logits, decisions, strict=True):
                values = edited(row, self._known, decision)
                token_id = decide(values, decision)
                sampled.token_ids.append(token_id)
                sampled.logprobs.append(logprobs_of(row, values, decision, token_id))
        return sampled


def edited(logits: Floats, known: Bools, decision: Decision) -> Floats:
    """Does steps 1 to 4: returns [num_ids] float32, for ids up to the last known one."""
    row = logits.copy()
    row[~known] = -np.inf
    if decision.mask is not None:
        row[np.unpackbits(decision.mask.view(np.uint8), bitorder="little")[: len(row)] == 0] = -np.inf
    apply_penalties(row, decision.params, decision.state.penalties, decision.assumed_token_ids)
    return row[: np.flatnonzero(known)[-1] + 1]


def apply_penalties(
    row: Floats, params: SamplingParams, penalties: PenaltyState, assumed_token_ids: Sequence[int]
) -> None:
    """Does steps 2 to 4 on `row` [vocab] float32, in place."""
    if penalties.num_generated + len(assumed_token_ids) < params.min_tokens:
        row[penalties.stop_ids] = -np.inf
    for token_id, bias in params.logit_bias:
        if token_id < len(row):
            row[token_id] += np.float32(bias)
    if penalties.counts is None:
        return
    ids, counts = penalties.counts.with_assumed(assumed_token_ids)
    repetition = np.float32(params.repetition_penalty)
    values = np.where(row[ids] > 0.0, row[ids] / repetition, row[ids] * repetition)
    values = values - np.float32(params.frequency_penalty) * counts
    row[ids] = values - np.float32(params.presence_penalty) * (counts > 0.0).astype(np.float32)


def decide(values: Floats, decision: Decision) -> int:
    """Does steps 5 to 7 on `values` [num_ids] float32: returns the id."""
    params = decision.params
    if params.is_greedy or np.isnan(values).any():
        return int(values.argmax())  # numpy returns the first of equal values, and the first NaN
    values = values / np.float32(params.temperature)
    key = RaceKey(params.seed, decision.state.sample, decision.position)
    scores = values - logarithm(all_arrivals(key, len(values)))
    scores[~kept(values, params)] = -np.inf
    return int(scores.argmax())


def kept(values: Floats, params: SamplingParams) -> Bools:
    """Does step 6 by sorting: returns a mask [num_ids]."""
    is_kept = np.ones(len(values), dtype=np.bool_)
    order = np.argsort(-values, kind="stable")  # equal values by ascending id
    if params.min_p > 0.0:
        is_kept &= values >= values.max() + np.float32(math.log(params.min_p))
    if params.top_k > 0:
        is_kept[order[params.top_k :]] = False
    if params.top_p < 1.0:
        order = order[is_kept[order]]
        masses = masses_of(values[order], values.max())
        mass_before = np.cumsum(masses) - masses
        num_kept = int(np.searchsorted(mass_before, math.ceil(params.top_p * float(masses.sum()))))
        is_kept[order[max(1, num_kept) :]] = False
    return is_kept


def logprobs_of(logits: Floats, values: Floats, decision: Decision, token_id: int) -> TokenLogprobs | None:
    """Returns logprobs by the sample's mode: those of the raw logits [vocab], or of `values` after steps 5 and 6."""
    wanted, params = decision.state.logprobs, decision.params
    if wanted is None:
        return None
    if wanted.mode is LogprobsMode.MODEL:
        values = logits
    elif not params.is_greedy:
        values = values / np.float32(params.temperature)
        values = np.where(kept(values, params), values, np.float32(-np.inf))
    largest = float(values.max())
    total = largest
    if math.isfinite(largest):
        total += math.log(float(masses_of(values, values.max()).sum()) / MASS_ONE)
    top = np.argsort(-values, kind="stable")[: wanted.num_top].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=min(0.0, float(values[token_id]) - total),
        rank=1 + int(np.count_nonzero(values > values[token_id])),
        top=tuple((each, min(0.0, float(values[each]) - total)) for each in top if values[each] > -np.inf),
    )
