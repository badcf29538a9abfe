"""Fakes of the engine's parts, without torch: loops and protocols are tested on them in milliseconds.

`ScriptedEngine` has the surface of `outrider.engine.engine.Engine`. Its model is a hash:
the next token is a function of the tokens before it, *as read back from the KV cache
through the block table*. So a block that is lost, shared wrongly, not copied or not
rolled back shows up as a wrong token, or as an InternalError at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.pending import Pending
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_clock import StepClock
from outrider.errors import InternalError
from outrider.profile import Part
from outrider.request import LogprobsRequest, SamplingParams

_MASK = (1 << 64) - 1
_UNWRITTEN = -1


class FakeClock:
    """A monotonic clock in seconds that moves only when told to. Called like time.monotonic."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds


class ScriptedTurns:
    """CpuTurns among others whose part the test plays."""

    description = "scripted"

    def __init__(self, *, num_refusals: int = 0, is_over: bool = False) -> None:
        """`num_refusals`: takes that fail before each one that does not. `is_over`: what `is_over` answers."""
        self.num_refusals = num_refusals
        self.on_refusal: Callable[[], None] = lambda: None
        self.is_held = False
        self.num_taken = 0
        self.kept_for: list[float] = []
        self._is_over = is_over
        self._num_refused = 0

    def take(self, timeout_seconds: float) -> bool:
        if self._num_refused < self.num_refusals:
            self._num_refused += 1
            self.on_refusal()
            return False
        self._num_refused = 0
        self.is_held = True
        self.num_taken += 1
        return True

    def keep(self, expected_seconds: float) -> bool:
        self.kept_for.append(expected_seconds)
        return self.is_held

    def is_over(self, seconds: float) -> bool:
        assert self.is_held
        return self._is_over

    def give(self) -> None:
        self.is_held = False


class ScriptedModel:
    """A target model that is a hash of its context. Equal contexts have equal logits, in every process.

    `order` limits the context to its last tokens; with a small vocabulary the text then
    soon repeats, which is what n-gram proposers need. None: the whole context counts.
    """

    def __init__(self, *, vocab_size: int = 32, seed: int = 0, order: int | None = None) -> None:
        assert vocab_size >= 1
        self.vocab_size = vocab_size
        self._seed = seed
        self._order = order

    def logits(self, context: Sequence[int]) -> list[float]:
        """Pseudo logits in [0, 8), one for each id, of the token that follows `context`."""
        seen = context if self._order is None else context[-self._order :]
        state = _mix(self._seed + 1)
        for token_id in seen:
            state = _mix(state ^ (token_id + 1))
        return [_mix(state + token_id) / 2.0**61 for token_id in range(self.vocab_size)]

    def next_token_id(self, context: Sequence[int]) -> int:
        """The greedy choice; ties go to the lowest id."""
        return greedy(self.logits(context))

    def generate(self, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What a correct engine answers: `num_tokens` greedy tokens after the prompt."""
        context = list(prompt_token_ids)
        for _ in range(num_tokens):
            context.append(self.next_token_id(context))
        return context[len(prompt_token_ids) :]


class ScriptedKVCache:
    """A paged cache whose k is the token id and whose v is its position, in every layer. See PagedKVCache."""

    def __init__(self, *, num_blocks: int, block_size: int, num_layers: int = 2) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self.planes = tuple(PlaneSpec(name, num_layers, 1, 1, "float32") for name in ("k", "v"))
        # Each [num_layers, num_slots] int32: four bytes a token and layer, as the planes say.
        self._slots = {
            plane.name: np.full((num_layers, num_blocks * block_size), _UNWRITTEN, dtype=np.int32)
            for plane in self.planes
        }

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        for stored in self._slots.values():
            blocks = stored.reshape(self.num_layers, self.num_blocks, self.block_size)
            blocks[:, [destination for _, destination in pairs]] = blocks[:, [source for source, _ in pairs]]

    def fence(self) -> None:
        """Everything is written at once."""

    @property
    def head_ranges(self) -> tuple[range, ...]:
        return (range(1),)

    def read(
        self, plane: str, layers: range, slots: Any, after: Any = None, *, heads: range | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """KV of `slots` ([num_tokens] integers: list, array or CPU tensor), layer by layer, as uint8."""
        taken = self._slots[plane][layers.start : layers.stop][:, np.asarray(slots)]
        return np.ascontiguousarray(taken).view(np.uint8).reshape(-1)

    def write(
        self,
        plane: str,
        layers: range,
        slots: Any,
        payload: bytes | bytearray | memoryview,
        *,
        heads: range | None = None,
    ) -> None:
        """Writes what `read` gave. Raises InternalError when it does not fit."""
        where = np.asarray(slots)
        values = np.frombuffer(payload, dtype=np.int32)
        if plane not in self._slots or values.size != len(layers) * where.size or layers.stop > self.num_layers:
            raise InternalError(f"{values.size} values do not fit plane {plane!r}, {layers}, {where.size} slots")
        self._slots[plane][layers.start : layers.stop, where] = values.reshape(len(layers), where.size)

    def write_token(self, layer: int, slot: int, *, token_id: int, position: int) -> None:
        self._slots["k"][layer, slot] = token_id
        self._slots["v"][layer, slot] = position

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        for stored in self._slots.values():
            stored[:, [destination for _, destination in pairs]] = stored[:, [source for source, _ in pairs]]

    def context(self, block_ids: Sequence[int], num_tokens: int, path: Sequence[int] = ()) -> list[int]:
        """The first `num_tokens` tokens of a block table, then those of other slots.

        Raises InternalError where a slot holds something else than the KV of its position.
        """
        in_table = np.arange(num_tokens)
        blocks = np.asarray(block_ids, dtype=np.int64)[in_table // self.block_size]
        slots = np.concatenate(
            [blocks * self.block_size + in_table % self.block_size, np.asarray(path, dtype=np.int64)]
        )
        positions = np.arange(len(slots))
        token_ids, stored_positions = self._slots["k"][:, slots], self._slots["v"][:, slots]
        wrong = np.flatnonzero((stored_positions != positions).any(axis=0) | (token_ids != token_ids[0]).any(axis=0))
        if wrong.size:
            position = int(wrong[0])
            raise InternalError(f"slot {slots[position]} does not hold the KV of position {position}")
        tokens: list[int] = token_ids[0].tolist()
        return tokens


class Rows(Protocol):
    """What `outrider.engine.input_batch.SequenceRows` has."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def start_position(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def parents(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class ScriptedRows:
    """A `Rows` for tests that do without input_batch, which imports torch."""

    token_ids: Sequence[int]
    start_position: int
    block_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] = ()


class ScriptedModelRunner:
    """Runs a ScriptedModel over the rows of a step, writing and reading the KV cache as a real one would."""

    is_asynchronous = False

    def __init__(self, model: ScriptedModel, kv_cache: ScriptedKVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.num_forwards = 0
        self.num_rows: list[int] = []  # of each forward

    def forward(self, rows: Sequence[Rows], *, on_layer_done: Callable[[int], None] | None = None) -> list[list[float]]:
        """Pseudo logits of the rows that need them, in order.  # [num_logits][vocab_size]"""
        cache = self.kv_cache
        for layer in range(cache.num_layers):
            for row in rows:
                for place, token_id in enumerate(row.token_ids):
                    slot = self._slot(row, row.start_position + place)
                    position = row.start_position + _depth(row, place)
                    cache.write_token(layer, slot, token_id=token_id, position=position)
            if on_layer_done is not None:
                on_layer_done(layer)
        self.num_forwards += 1
        self.num_rows.append(sum(len(row.token_ids) for row in rows))
        logits: list[list[float]] = []
        for row in rows:
            end = row.start_position + len(row.token_ids) - len(row.parents)
            context = cache.context(row.block_ids, end)
            num_known = row.num_logits - len(row.parents)  # of the rows that need logits
            logits += [self.model.logits(context[: end - later]) for later in range(num_known - 1, -1, -1)]
            for draft in range(len(row.parents)):
                path = [self._slot(row, end + each) for each in _path(row.parents, draft)]
                logits.append(self.model.logits(cache.context(row.block_ids, end, path)))
        return logits

    def _slot(self, row: Rows, place: int) -> int:
        """Where the tokens of a sequence lie in the order of its rows."""
        size = self.kv_cache.block_size
        return row.block_ids[place // size] * size + place % size

    def target_token_ids(self, rows: Sequence[Rows]) -> list[int]:
        """The greedy choice of every row that needs logits, in order."""
        return [greedy(row) for row in self.forward(rows)]

    def warm_up(self) -> None:
        """Nothing to warm."""


@dataclass(slots=True, eq=False)
class ScriptedSampling:
    """State of one sample: what it was started with and what was committed since."""

    params: SamplingParams
    sample: int
    stop_token_ids: tuple[int, ...]
    generated_token_ids: list[int]
    logprobs: LogprobsRequest | None = None


@dataclass(frozen=True, slots=True)
class ScriptedSampledRows:
    """See SampledRows."""

    token_ids: list[int]  # [num_rows]
    logprobs: list[None]  # [num_rows]


class ScriptedSampler:
    """Always greedy; min_tokens masks stop token ids, counting the drafts before a row, as the contract says."""

    def start(
        self,
        params: SamplingParams,
        *,
        sample: int,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: LogprobsRequest | None = None,
    ) -> ScriptedSampling:
        return ScriptedSampling(params, sample, tuple(stop_token_ids), list(generated_token_ids), logprobs)

    def commit(self, state: ScriptedSampling, token_ids: Sequence[int]) -> None:
        state.generated_token_ids.extend(token_ids)

    def queue(self, logits: Sequence[Sequence[float]], rows: Sequence[Any]) -> Pending[ScriptedSampledRows]:
        """As `sample`; on no device."""
        return Pending((), lambda _: self.sample(logits, rows))

    def sample(self, logits: Sequence[Sequence[float]], rows: Sequence[Any]) -> ScriptedSampledRows:
        """`rows` are SampleRows (or alike) over states of this sampler."""
        token_ids: list[int] = []
        for row in rows:
            state: ScriptedSampling = row.state
            for num_drafts in range(len(row.draft_token_ids) + 1):
                values = logits[len(token_ids)]
                num_assumed = len(row.assumed_token_ids) + num_drafts
                if len(state.generated_token_ids) + num_assumed < state.params.min_tokens:
                    masked = set(state.stop_token_ids)
                    values = [-1.0 if token_id in masked else value for token_id, value in enumerate(values)]
                token_ids.append(greedy(values))
        assert len(token_ids) == len(logits)
        return ScriptedSampledRows(token_ids, [None] * len(token_ids))


@dataclass(frozen=True, slots=True)
class ScriptedEngine:
    """Stands in for Engine: same fields, same `forward`."""

    pool: BlockPool
    scheduler: Scheduler
    kv_cache: ScriptedKVCache
    runner: ScriptedModelRunner
    sampler: ScriptedSampler = field(default_factory=ScriptedSampler)
    clock: StepClock = field(default_factory=StepClock)

    @classmethod
    def create(
        cls,
        model: ScriptedModel | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 64,
        max_rows_per_step: int = 512,
    ) -> ScriptedEngine:
        """A whole engine of the given size."""
        pool = BlockPool(num_blocks=num_blocks, block_size=block_size, hash_seed=b"scripted")
        kv_cache = ScriptedKVCache(num_blocks=num_blocks, block_size=block_size)
        return cls(
            pool=pool,
            scheduler=Scheduler(pool, max_running=max_running, max_rows_per_step=max_rows_per_step),
            kv_cache=kv_cache,
            runner=ScriptedModelRunner(model or ScriptedModel(), kv_cache),
        )

    @property
    def is_asynchronous(self) -> bool:
        return self.runner.is_asynchronous

    def forward(self, block_copies: Sequence[tuple[int, int]], rows: Sequence[Rows]) -> Sequence[Sequence[float]]:
        self.kv_cache.copy_blocks(block_copies)
        self.clock.mark(Part.BATCH)
        logits = self.runner.forward(rows)
        self.clock.mark(Part.FORWARD)
        return logits


def _path(parents: Sequence[int], draft: int) -> list[int]:
    """The drafts of a tree from the root to this one."""
    path = [draft]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _depth(row: Rows, place: int) -> int:
    """How many tokens of a sequence's rows come before this one in the text."""
    num_known = len(row.token_ids) - len(row.parents)
    return place if place < num_known else num_known + len(_path(row.parents, place - num_known)) - 1


def greedy(logits: Sequence[float]) -> int:
    """The largest logit's id, the lowest of equals."""
    return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
