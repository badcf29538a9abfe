"""An engine without torch, with which tests of loops and protocols take milliseconds.

`ScriptedEngine` has the surface of `outrider.engine.engine.Engine`. Its model is a hash:
the next token is a function of the tokens before it, *as read back from the KV cache
through the block table*. So a block that is lost, shared wrongly, not copied or not
rolled back shows up as a wrong token, or as an InternalError at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.divided_pool import DividedPool
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.pending import Pending
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_clock import StepClock
from outrider.errors import NotSupportedError
from outrider.profile import Part
from outrider.request import Adapter, Constraint, LogprobsRequest, SamplingParams
from tests.support.fake_kv_cache import FEATURES, ScriptedKVCache

_MASK = (1 << 64) - 1


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
        """Returns pseudo logits in [0, 8) of the token that follows `context`: one for each id."""
        seen = context if self._order is None else context[-self._order :]
        state = _mix(self._seed + 1)
        for token_id in seen:
            state = _mix(state ^ (token_id + 1))
        return [_mix(state + token_id) / 2.0**61 for token_id in range(self.vocab_size)]

    def next_token_id(self, context: Sequence[int]) -> int:
        """Returns the greedy choice. Ties go to the lowest id."""
        return greedy(self.logits(context))

    def generate(self, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the answer of a correct engine: `num_tokens` greedy tokens after the prompt."""
        context = list(prompt_token_ids)
        for _ in range(num_tokens):
            context.append(self.next_token_id(context))
        return context[len(prompt_token_ids) :]


@dataclass(frozen=True, slots=True)
class ScriptedRows:
    """The fields of `outrider.engine.input_batch.SequenceRows`, without its import of torch. Tests may use either."""

    token_ids: Sequence[int]
    start_position: int
    block_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] = ()
    adapter: ScriptedModel | None = None  # replaces the model


class ScriptedModelRunner:
    """Runs a ScriptedModel over the rows of a step, writing and reading the KV cache as a real one would."""

    is_asynchronous = False

    def __init__(self, model: ScriptedModel, kv_cache: ScriptedKVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.num_forwards = 0
        self.num_rows: list[int] = []  # rows of each forward

    def forward(
        self, rows: Sequence[ScriptedRows], *, on_layer_done: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        """Returns pseudo logits of the rows that need them, in order.  # [num_logits][vocab_size]"""
        cache = self.kv_cache
        for layer in range(cache.num_layers):
            for row in rows:
                for place, token_id in enumerate(row.token_ids):
                    slot = self._slot(row, row.start_position + place)
                    position = row.start_position + _depth(row, place)
                    cache.write_token(layer, slot, token_id=token_id, position=position)
            if on_layer_done is not None:
                on_layer_done(layer)
        for row in rows:
            for place, token_id in enumerate(row.token_ids):
                position = row.start_position + _depth(row, place)
                cache.write_feature(self._slot(row, row.start_position + place), token_id=token_id, position=position)
        self.num_forwards += 1
        self.num_rows.append(sum(len(row.token_ids) for row in rows))
        logits: list[list[float]] = []
        for row in rows:
            end = row.start_position + len(row.token_ids) - len(row.parents)
            model = row.adapter or self.model
            context = cache.context(row.block_ids, end)
            num_known = row.num_logits - len(row.parents)  # rows of known tokens that need logits
            logits += [model.logits(context[: end - later]) for later in range(num_known - 1, -1, -1)]
            for draft in range(len(row.parents)):
                path = [self._slot(row, end + each) for each in _path(row.parents, draft)]
                logits.append(model.logits(cache.context(row.block_ids, end, path)))
        return logits

    def _slot(self, row: ScriptedRows, place: int) -> int:
        """Returns the slot at this place of a row's block table."""
        size = self.kv_cache.block_size
        return row.block_ids[place // size] * size + place % size

    def target_token_ids(self, rows: Sequence[ScriptedRows]) -> list[int]:
        """Returns the greedy choice of every row that needs logits, in order."""
        return [greedy(row) for row in self.forward(rows)]

    def warm_up(self) -> None:
        """Does nothing."""


@dataclass(slots=True, eq=False)
class ScriptedSampling:
    """The state of one sample: its start, and the tokens committed since."""

    params: SamplingParams
    sample: int
    stop_token_ids: tuple[int, ...]
    generated_token_ids: list[int]
    logprobs: LogprobsRequest | None = None
    constraint: str | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ScriptedSampledRows:
    """The fields of SampledRows that tests read."""

    token_ids: list[int]  # [num_rows]
    logprobs: list[None]  # [num_rows]


class NoConstraints:
    """A GrammarCompiler for a tokenizer whose tokens are not known as bytes."""

    def prepare(self, constraint: Constraint) -> Future[Any]:
        refusal: Future[Any] = Future()
        refusal.set_exception(NotSupportedError("no constraints", field=f"sampling.{constraint.kind}"))
        return refusal


class ScriptedSampler:
    """A greedy sampler. As with the real one, min_tokens masks stop token ids and counts the drafts before a row.

    `fails_at` maps a sample to the index of the generated token that the sample's constraint does not allow.
    """

    def __init__(self) -> None:
        self.fails_at: dict[int, int] = {}
        self.constraints = NoConstraints()

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
        constraint = "a scripted one" if sample in self.fails_at else None
        return ScriptedSampling(params, sample, tuple(stop_token_ids), list(generated_token_ids), logprobs, constraint)

    def prepare_masks(self, rows: Sequence[Any]) -> None:
        """Does nothing, since there are no masks."""

    def commit(self, state: ScriptedSampling, token_ids: Sequence[int]) -> None:
        state.generated_token_ids.extend(token_ids)
        if len(state.generated_token_ids) > self.fails_at.get(state.sample, len(state.generated_token_ids)):
            state.failure = "the constraint takes too much work"

    def queue(self, logits: Sequence[Sequence[float]], rows: Sequence[Any]) -> Pending[ScriptedSampledRows]:
        """Returns rows that are sampled when they are read."""
        return Pending((), lambda _: self.sample(logits, rows))

    def sample(self, logits: Sequence[Sequence[float]], rows: Sequence[Any]) -> ScriptedSampledRows:
        """Samples the rows: SampleRows, or objects with their fields, over states of this sampler."""
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
    """A replacement for Engine with the same fields and the same `forward`."""

    pool: BlockPool
    scheduler: Scheduler
    kv_cache: ScriptedKVCache
    runner: ScriptedModelRunner
    sampler: ScriptedSampler = field(default_factory=ScriptedSampler)
    clock: StepClock = field(default_factory=StepClock)
    find_adapter: Callable[[Adapter], ScriptedModel | None] = lambda _: None

    @classmethod
    def create(
        cls,
        model: ScriptedModel | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 64,
        max_rows_per_step: int = 512,
        features: PlaneSpec | None = FEATURES,
        num_parts: int = 1,
    ) -> ScriptedEngine:
        """Returns a whole engine of the given size. `num_parts`: parts into which its blocks are divided."""
        settings: Any = {"num_blocks": num_blocks // num_parts, "block_size": block_size, "hash_seed": b"scripted"}
        pool = BlockPool(**settings) if num_parts == 1 else DividedPool(num_parts, **settings)
        kv_cache = ScriptedKVCache(num_blocks=num_blocks, block_size=block_size, features=features)
        return cls(
            pool=pool,
            scheduler=Scheduler(pool, max_running=max_running, max_rows_per_step=max_rows_per_step),
            kv_cache=kv_cache,
            runner=ScriptedModelRunner(model or ScriptedModel(), kv_cache),
        )

    def forward(
        self,
        block_copies: Sequence[tuple[int, int]],
        rows: Sequence[ScriptedRows],
        *,
        on_layer_done: Callable[[int], None] | None = None,
    ) -> Sequence[Sequence[float]]:
        self.kv_cache.copy_blocks(block_copies)
        self.clock.mark(Part.BATCH)
        options = {} if on_layer_done is None else {"on_layer_done": on_layer_done}
        logits = self.runner.forward(rows, **options)
        self.clock.mark(Part.FORWARD)
        return logits

    def prepare_ahead(self, rows: Sequence[ScriptedRows]) -> list[ScriptedRows]:
        return [
            ScriptedRows((), row.start_position, tuple(row.block_ids), row.num_logits, adapter=row.adapter)
            for row in rows
        ]

    def run(self, batch: Sequence[ScriptedRows], token_ids: Sequence[int]) -> Sequence[Sequence[float]]:
        rows = [replace(row, token_ids=(token_id,)) for row, token_id in zip(batch, token_ids, strict=True)]
        self.clock.mark(Part.BATCH)
        logits = self.runner.forward(rows)
        self.clock.mark(Part.FORWARD)
        return logits


def _path(parents: Sequence[int], draft: int) -> list[int]:
    """Returns the drafts of a tree from the root to this one."""
    path = [draft]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _depth(row: ScriptedRows, place: int) -> int:
    """Returns the number of tokens among a sequence's rows that precede this one in the text."""
    num_known = len(row.token_ids) - len(row.parents)
    return place if place < num_known else num_known + len(_path(row.parents, place - num_known)) - 1


def greedy(logits: Sequence[float]) -> int:
    """Returns the id of the largest logit, or the lowest such id."""
    return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))


def _mix(value: int) -> int:
    """Applies the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
