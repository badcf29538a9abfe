"""The sampler: logits rows in, chosen tokens and their logprobs out.

A decision depends on its own row of logits, its sample's parameters, the seed, the sample
and the position, and on the tokens before it: never on what else is in the batch, nor on
where a draft came from. All arithmetic is row by row, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.sampler.arrivals import BLOCK_SIZE, ArrivalCache, RaceKey
from outrider.engine.sampler.filters import Filters, has_filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.logprobs import model_logprobs, sampled_logprobs
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.race import run_race
from outrider.engine.sampler.sequence_sampling import SampledRows, SampleRows, SequenceSampling
from outrider.errors import InternalError
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_CACHE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Decision:
    """One logits row and whom it is for."""

    index: int  # logits row
    state: SequenceSampling
    position: int  # absolute
    assumed_token_ids: tuple[int, ...]  # count as generated, besides the committed

    @property
    def is_greedy(self) -> bool:
        return self.state.params.is_greedy

    @property
    def is_plainly_greedy(self) -> bool:
        state = self.state
        return (
            state.params.is_greedy
            and state.logprobs is None
            and not state.penalties.changes(len(self.assumed_token_ids))
        )

    @property
    def race_key(self) -> RaceKey:
        return RaceKey(self.state.params.seed, self.state.sample, self.position)


@dataclass(frozen=True, slots=True)
class _Group:
    """Decisions that are taken together: all greedy or none, and from one matrix."""

    logits: Floats  # [num_logits, vocab] float32, after steps 1 to 4
    rows: Ints  # [num_decisions] int64, index into `logits`
    decisions: list[_Decision]


class Sampler:
    """Steps 1 to 7 of the contract's SamplingParams, for all rows of a step at once.

    Target and drafter use it alike: the drafter runs the same race on its own logits, and
    the same luck on both sides is what makes their tokens agree.

    Works on the CPU: logits of another device are copied over, unless every row is plainly
    greedy. Not thread-safe: one owner, as it keeps a cache of arrivals.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        known_token_ids: Tensor,
        device: torch.device | str = "cpu",
        arrival_cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """Args:
        vocab_size: width of the logits.
        known_token_ids: [vocab_size] bool, ids that the tokenizer has; at least one.
        device: where the logits will be; on CUDA they come over through page-locked memory.
        arrival_cache_bytes: bound of the cache of arrivals.
        """
        known = known_token_ids.detach().cpu().numpy().astype(np.bool_)
        assert known.shape == (vocab_size,), f"known_token_ids {known.shape} does not fit vocab_size {vocab_size}"
        assert known.any(), "no known token"
        self.vocab_size = vocab_size
        # Padding at the end costs nothing: the rows are cut before it. Holes are masked.
        self._num_ids = int(np.flatnonzero(known)[-1]) + 1
        self._holes = np.flatnonzero(~known[: self._num_ids])
        self._stages = torch.device(device).type == "cuda"
        self._staging = torch.empty((0, vocab_size))  # page-locked, grown to the largest step so far
        self._arrivals = ArrivalCache(num_blocks=-(-self._num_ids // BLOCK_SIZE), max_bytes=arrival_cache_bytes)

    def start(
        self,
        params: SamplingParams,
        *,
        sample: int,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: LogprobsRequest | None = None,
    ) -> SequenceSampling:
        """The state of one sample.

        Args:
            params: of the request.
            sample: 0 to n - 1.
            prompt_token_ids: what repetition_penalty counts besides generated tokens.
            generated_token_ids: already committed.
            stop_token_ids: cannot be drawn while fewer than min_tokens are generated;
                end-of-text ids included unless the request ignores them.
            logprobs: None for none.
        """
        penalties = PenaltyState(
            params,
            prompt_token_ids=prompt_token_ids,
            generated_token_ids=generated_token_ids,
            stop_token_ids=stop_token_ids,
            vocab_size=self.vocab_size,
        )
        return SequenceSampling(params=params, sample=sample, logprobs=logprobs, penalties=penalties)

    def commit(self, state: SequenceSampling, token_ids: Sequence[int]) -> None:
        """Counts accepted tokens as generated."""
        state.penalties.commit(token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRows]) -> SampledRows:
        """Decides every row.

        Args:
            logits: [num_rows, vocab] float32, not changed.
            rows: whose they are, in order; their `num_rows` add up to num_rows.

        Returns:
            A token for each row, and logprobs for those of samples that asked for them.
        """
        decisions = _decisions(rows)
        if logits.shape != (len(decisions), self.vocab_size):
            raise InternalError(f"logits {tuple(logits.shape)} do not fit {len(decisions)} rows of {self.vocab_size}")
        sampled = SampledRows(token_ids=[0] * len(decisions), logprobs=[None] * len(decisions))
        with torch.inference_mode(), np.errstate(over="ignore", invalid="ignore"):
            if not self._holes.size and all(row.is_plainly_greedy for row in decisions):
                sampled.token_ids[:] = self._argmax(logits)
                return sampled
            host = self._to_host(logits)
            for group in self._groups(host, decisions):
                self._decide(group, host, sampled)
        return sampled

    def _to_host(self, logits: Tensor) -> Floats:
        """The logits here, without a copy where they are already: [num_rows, vocab] float32, contiguous."""
        if not self._stages or logits.device.type == "cpu":
            return logits.detach().to("cpu", torch.float32).contiguous().numpy()
        if len(self._staging) < len(logits):
            self._staging = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        staged = self._staging[: len(logits)]
        return staged.copy_(logits).numpy()

    def _argmax(self, logits: Tensor) -> list[int]:
        """The largest of each row, the lowest id among equals: [num_rows, vocab] -> num_rows ids."""
        logits = logits.detach()[:, : self._num_ids]
        if logits.device.type == "cpu":  # numpy promises the first of equals, and is faster
            return logits.float().numpy().argmax(axis=1).tolist()
        return first_of_largest(logits).tolist()

    def _groups(self, host: Floats, decisions: Sequence[_Decision]) -> list[_Group]:
        """Rows after steps 1 to 4. Those that these change are copies; greedy and drawn rows part."""
        as_they_are = [row for row in decisions if not self._changes(row)]
        changed = [row for row in decisions if self._changes(row)]
        edited = host[[row.index for row in changed]]
        for logits, row in zip(edited, changed, strict=True):
            logits[self._holes] = -np.inf
            row.state.penalties.apply(logits, row.assumed_token_ids)
        groups = [
            (host, [(row.index, row) for row in as_they_are]),
            (edited, list(enumerate(changed))),
        ]
        return [
            _Group(logits, np.asarray([place for place, _ in chosen], dtype=np.int64), [row for _, row in chosen])
            for logits, placed in groups
            for is_greedy in (True, False)
            if (chosen := [(place, row) for place, row in placed if row.is_greedy == is_greedy])
        ]

    def _changes(self, row: _Decision) -> bool:
        return bool(self._holes.size) or row.state.penalties.changes(len(row.assumed_token_ids))

    def _decide(self, group: _Group, host: Floats, sampled: SampledRows) -> None:
        """Steps 5 to 7 of one group; writes its tokens and logprobs into `sampled`."""
        if group.decisions[0].is_greedy:
            blocks = None
            everything = len(group.rows) == len(group.logits)
            logits = group.logits if everything else group.logits[group.rows]
            token_ids = logits[:, : self._num_ids].argmax(axis=1).tolist()
        else:
            blocks = self._blocks(group)
            token_ids = self._draw(group, blocks)
        for i, (row, token_id) in enumerate(zip(group.decisions, token_ids, strict=True)):
            sampled.token_ids[row.index] = token_id
            wanted = row.state.logprobs
            if wanted is None:
                continue
            if wanted.mode is LogprobsMode.MODEL:
                answer = model_logprobs(host[row.index], token_id, num_top=wanted.num_top)
            else:
                blocks = blocks or self._blocks(group)
                answer = sampled_logprobs(blocks, i, row.state.params, token_id, num_top=wanted.num_top)
            sampled.logprobs[row.index] = answer

    def _blocks(self, group: _Group) -> LogitBlocks:
        temperatures = [1.0 if row.is_greedy else row.state.params.temperature for row in group.decisions]
        return LogitBlocks.of(
            group.logits, group.rows, np.asarray(temperatures, dtype=np.float32), num_ids=self._num_ids
        )

    def _draw(self, group: _Group, blocks: LogitBlocks) -> list[int]:
        """Steps 6 and 7: the race of each row among what its filters keep."""
        keys = [row.race_key for row in group.decisions]
        arrivals = self._arrivals.rows(keys)
        if not any(has_filters(row.state.params) for row in group.decisions):
            return run_race(blocks, arrivals, keys)
        filters = Filters([row.state.params for row in group.decisions], blocks)
        token_ids = run_race(blocks, arrivals, keys, filters.limits)
        # Rows whose winner top_p leaves out run again among the tokens before it. Each time
        # the limit comes strictly earlier, and the first token is always kept: this ends.
        again = filters.outside(range(len(keys)), token_ids)
        while again:
            rows = np.asarray(list(again), dtype=np.int64)
            winners = run_race(
                blocks.select(rows), arrivals.select(rows), [keys[row] for row in again], list(again.values())
            )
            for row, token_id in zip(again, winners, strict=True):
                token_ids[row] = token_id
            again = filters.outside(list(again), winners)
        return token_ids


def first_of_largest(logits: Tensor) -> Tensor:
    """Argmax of each row with ties to the lowest id, which torch.argmax does not promise on every device.

    [num_rows, num_ids] -> [num_rows] int64.
    """
    is_largest = logits == logits.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(is_largest, ids, logits.shape[1] - 1).amin(dim=1)


def _decisions(rows: Sequence[SampleRows]) -> list[_Decision]:
    """One for each logits row, in order."""
    decisions: list[_Decision] = []
    for part in rows:
        for j in range(part.num_rows):
            decisions.append(_Decision(len(decisions), part.state, part.position + j, part.assumed_at(j)))
    return decisions
