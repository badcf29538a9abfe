"""The forward passes of a drafter head. Its rows are tokens with the target's features or the head's own states."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.engine.arrays import Array, ids_like, namespace, to_array_like, without_warnings
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.device import device_type
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.array_plane import WORDS
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.pending import read
from outrider.engine.sampler import Sampler
from outrider.heads.packed_head import PackedHead
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import MAX_PROPOSAL_TOKENS, SequenceStart
from outrider.speculation.features import HeadRules
from outrider.speculation.path_tree import DraftedToken
from outrider.speculation.proposers.base import MAX_SEQUENCES
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows, sample_rows
from outrider.speculation.proposers.native_head import NativeHeadSteps

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.rollouts import RolloutForward, Rollouts
    from outrider.heads.base import HeadModel
    from outrider.heads.module_steps import ModuleHeadSteps

BLOCK_SIZE = 16
WARM_UP_ROWS = 64
MAX_PATHS = 16 * MAX_SEQUENCES
"""Maximum number of paths of a head without KV. Each path takes one block of a pool that has no memory."""


@dataclass(frozen=True, slots=True)
class HeadForward(DraftForward):
    """A head, its paged cache and a sampler over the target's vocabulary.

    Features, states and logits are numpy or torch arrays, depending on the head's steps.
    """

    pool: BlockPool
    kv_cache: PagedKVCache | None  # None: the head keeps no KV
    model: HeadModel | PackedHead
    steps: ModuleHeadSteps | NativeHeadSteps
    sampler: Sampler
    max_model_len: int
    vocab_size: int
    head: HeadRules
    rollouts: Rollouts | None = None

    @classmethod
    def of(
        cls,
        model: HeadModel | PackedHead,
        *,
        num_cached_tokens: int,
        known_token_ids: npt.NDArray[np.bool_],
        constraints: GrammarCompiler | None = None,
        device: str = "cpu",
        kernels: CpuKernels | None = None,
    ) -> HeadForward:
        """Makes the pool, the cache and the sampler of a loaded head.

        Args:
            model: the loaded head.
            num_cached_tokens: capacity of its cache, over all sequences; longer sequences get no drafts.
            known_token_ids: [vocab_size] bool, as for the target's Sampler.
            constraints: as for the target's Sampler.
            device: a torch device name.
            kernels: on a CPU, the target's kernels; a packed head must be packed for them. None: torch computes.
        """
        spec = model.spec
        of_cache = None
        is_in_panels = all(plane.head_dim % 16 == 0 for plane in spec.planes)
        if kernels is not None and spec.dtype in ("float32", "bfloat16") and is_in_panels:
            of_cache = kernels
        cache, num_blocks, block_size = None, MAX_PATHS, spec.max_model_len
        if spec.planes:
            num_blocks, block_size = -(-num_cached_tokens // BLOCK_SIZE), BLOCK_SIZE
            cache = PagedKVCache(
                spec.planes,
                num_blocks=num_blocks,
                block_size=block_size,
                device=device,
                num_scratch_blocks=0 if device_type(device) == "cpu" else 1,  # for padding rows (`step_graphs`)
                kernels=of_cache,
            )
        pool = BlockPool(num_blocks=num_blocks, block_size=block_size, hash_seed=b"", enable_prefix_cache=False)
        sampler = Sampler(
            vocab_size=spec.vocab_size,
            known_token_ids=known_token_ids,
            device=device,
            kernels=kernels,
            constraints=constraints,
        )
        sampler.warm_up()
        max_own_rows = None if spec.max_depth is None else spec.max_depth - 1
        rules = HeadRules(
            keeps_kv=bool(spec.planes),
            keeps_own_rows=not spec.attends_both_ways,
            max_own_rows=max_own_rows,
            num_parallel_rows=len(spec.parallel_tokens(0)),
            drafts_blocks=spec.num_parallel > 1,
        )
        if kernels is not None and not isinstance(model, PackedHead) and model.suits_kernels:
            model = model.pack(kernels)
        steps: ModuleHeadSteps | NativeHeadSteps
        if isinstance(model, PackedHead):
            assert kernels is not None
            assert cache is not None
            steps = NativeHeadSteps(model, kernels, cache, known_token_ids)
        else:
            from outrider.heads.module_steps import ModuleHeadSteps  # imports torch

            steps = ModuleHeadSteps(model, cache, device=device, kernels=of_cache)
        max_model_len = min(spec.max_model_len, num_blocks * block_size - rules.num_parallel_rows)
        return cls(pool, cache, model, steps, sampler, max_model_len, spec.vocab_size, rules)

    @property
    def max_tokens(self) -> int:
        if isinstance(self.steps, NativeHeadSteps):
            return MAX_PROPOSAL_TOKENS
        return 1 if self.rollouts is None else 1 + self.rollouts.max_tokens

    def rolling(self) -> RolloutForward | None:
        steps = self.steps
        if isinstance(steps, NativeHeadSteps) or not steps.can_be_captured:
            return None
        from outrider.engine.rollouts import RolloutForward  # imports torch and triton

        def forward(batch: InputBatch, states: Tensor, depths: Tensor, temps: Tensor) -> tuple[Tensor, Tensor, Array]:
            hidden, logits = steps.compute(batch, states, depths, batch)
            return hidden, logits, confidences_of(logits, temps, steps.target_ids)

        return RolloutForward(forward, steps.plan, self.model.spec.width, steps.dtype)

    def warm_up(self) -> None:
        """Decides once after many rows and once after one, so that no request waits for allocation and compilation."""
        for num_rows in (min(WARM_UP_ROWS, self.max_model_len), 1):
            rows = self.blank_path(1, num_rows)
            self.decide([rows], ())
            self.pool.release(rows.block_ids)

    def blank_path(self, start_position: int, num_rows: int = 1) -> PathRows:
        """Returns rows of zeros that decide one token, with newly allocated blocks, for warming up and measuring."""
        options = RequestOptions(sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0))
        sampling = self.start(SequenceStart(options=options, sample=0, prompt_length=1), (0,))
        spec, end_position = self.model.spec, start_position + num_rows
        states = (self.steps.rows(np.zeros((1, spec.width), dtype=WORDS[spec.dtype]))[0],) * num_rows
        blocks = self.pool.allocate(self.pool.num_blocks_for(end_position - 1 + self.head.num_parallel_rows))
        tokens = (0,) * num_rows
        return PathRows(tokens, start_position, blocks, sampling, (), 1, num_committed=end_position, states=states)

    def _run(self, rows: Sequence[PathRows]) -> list[DraftedToken]:
        spec, num_parallel = self.model.spec, self.model.spec.num_parallel
        fed_rows = [(row, *self._tokens_of(row)) for row in rows]
        batch = build_input_batch(
            [
                SequenceRows(
                    [*own, *parallel], row.start_position - 1, row.block_ids, num_parallel if row.num_decisions else 0
                )
                for row, own, parallel in fed_rows
            ],
            self.pool.block_size,
        )
        parts = [part for row, own, parallel in fed_rows for part in self._fed_with(row, len(own), len(parallel))]
        if isinstance(self.steps, NativeHeadSteps):
            return self._draft(self.steps, batch, parts, rows)
        features = parts[0] if len(parts) == 1 else namespace(parts[0]).concat(parts)
        depths = [depth for row, own, parallel in fed_rows for depth in _depths(row, len(own) + len(parallel))]
        attended = batch
        if spec.attends_both_ways:
            attended = attend_both_ways(batch, [len(parallel) for *_, parallel in fed_rows])
        hidden, logits = self.steps.forward(batch, features, depths, attended)
        if not batch.num_logits:
            return [DraftedToken(()) for _ in rows]
        params = [row.sampling.params for row in rows if row.num_decisions]
        temperatures = np.array([[1.0 if each.is_greedy else each.temperature] for each in params], dtype=np.float32)
        winners, confidences = None, None
        if spec.is_chained:
            logits, confidences, winners = self._chain(logits, hidden, [row for row in rows if row.num_decisions])
        if confidences is None:
            temperatures = to_array_like(np.repeat(temperatures, num_parallel, axis=0), logits)
            confidences = confidences_of(logits, temperatures, self.steps.target_ids)
        return self._decide(
            logits,
            rows,
            num_parallel=num_parallel,
            confidences=confidences,
            states=None if spec.attends_both_ways else hidden,
            chosen=winners,
        )

    def _chain(self, logits: Array, hidden: Array, rows: Sequence[PathRows]) -> tuple[Array, Array | None, Array]:
        """Decides a block's tokens one after another, each by logits that know the tokens before it.

        `logits`: [len(rows) * num_parallel, draft_vocab_size], and `hidden` [len(rows) * num_parallel, width], of paths
        that all get decisions. Returns logits [len(rows) * num_parallel, vocab_size], the head's confidences
        [len(rows) * num_parallel] or None, and the winners [len(rows) * num_parallel] int64 of the races.
        """
        assert not isinstance(self.steps, NativeHeadSteps)
        xp, num_parallel = namespace(logits), self.model.spec.num_parallel
        previous = ids_like([row.token_ids[-1] for row in rows], logits)[:, None]
        found, sure = [], []
        for ahead in range(num_parallel):
            corrected, confidence = self.steps.logits_after(logits, hidden, previous)
            winners = self.sampler.decide(corrected, [sample_rows(row, ahead) for row in rows])
            previous = xp.concat([previous, winners[:, None]], axis=1)
            found.append(corrected)
            sure.append(confidence)
        confidences = None if sure[0] is None else xp.stack(sure, axis=1).reshape(-1)
        return xp.stack(found, axis=1).reshape(len(logits), -1), confidences, previous[:, 1:].reshape(-1)

    def _draft(
        self, steps: NativeHeadSteps, batch: InputBatch, parts: Sequence[Array], rows: Sequence[PathRows]
    ) -> list[DraftedToken]:
        """Returns what `_decide` does. The kernels decide, and feed the tokens of paths that may get several.

        `parts`: the inputs of the batch's rows.
        """
        features = parts[0]
        if len(parts) > 1:  # joined as bytes, since numpy gives up Python's lock for a copy, and then waits for it
            features = np.frombuffer(b"".join(parts), dtype=features.dtype).reshape(-1, features.shape[1])
        deciding = [row for row in rows if row.num_decisions]
        asking = [place for place, row in enumerate(deciding) if row.wants_distribution]
        drafts, logits = steps.draft(batch, features, deciding, wants_logits=bool(asking))
        if logits is not None:
            (found,) = read(self._distributions(logits, [sample_rows(row, 0) for row in deciding], asking))
            drafts = [each._replace(distribution=found.get(place)) for place, each in enumerate(drafts)]
        made = iter(drafts)
        return [next(made) if row.num_decisions else DraftedToken(()) for row in rows]

    def _tokens_of(self, row: PathRows) -> tuple[Sequence[int], tuple[int, ...]]:
        """Returns the tokens of the path's own rows and of its parallel rows."""
        spec, num_own = self.model.spec, len(row.token_ids)
        if not row.num_decisions:
            return row.token_ids, ()
        if spec.attends_both_ways:
            num_own -= max(0, row.start_position + num_own - row.num_committed)
        own, assumed = row.token_ids[:num_own], row.token_ids[num_own:]
        return own, spec.parallel_tokens(own[-1], *assumed)

    def _fed_with(self, row: PathRows, num_own: int, num_parallel_rows: int) -> list[Array]:
        """Returns the inputs of the path's own rows and of its parallel rows, as arrays [n, width]."""
        parts: list[Array] = []
        states = row.states[: len(row.states) - len(row.token_ids) + num_own]
        if num_true := num_own - len(states):
            assert row.features is not None
            parts.append(self.steps.rows(row.features.read(row.start_position - 1, row.start_position - 1 + num_true)))
        if states:
            parts.append(namespace(states[0]).stack(states))
        if num_parallel_rows:
            feature = self.steps.parallel_feature
            assert feature is not None, "a parallel head has one"
            parts.append(feature.expand(num_parallel_rows, -1))
        return parts


@without_warnings
def confidences_of(logits: Array, temperatures: Array, target_ids: Array | None) -> Array:
    """Returns each row's largest probability at its temperature: [num_rows] float64; 0 if features were NaN.

    Args:
        logits: [num_rows, vocab_size] float32.
        temperatures: [num_rows, 1] float32, above 0.
        target_ids: [n] int64, the ids that count; None: all.
    """
    xp = namespace(logits)
    # Computed in place, since allocating memory takes longer than the arithmetic.
    values = xp.asarray(logits, copy=True) if target_ids is None else xp.take(logits, target_ids, axis=1)
    values -= xp.max(values, axis=1, keepdims=True)
    values /= temperatures
    xp.exp(values, out=values)
    largest = 1.0 / xp.sum(values, axis=1, dtype=xp.float64)
    return xp.where(xp.isnan(largest), 0.0, largest)


def attend_both_ways(batch: InputBatch, num_together: Sequence[int]) -> InputBatch:
    """Returns the batch in which the last `num_together` rows of each sequence attend to each other in both directions.

    These rows also attend to everything before them. For attention, each of these rows has the position of the last
    one, and its path consists of the slots of all of them.
    """
    arrays = batch.arrays
    positions, path_starts, path_slots = array("q", arrays.positions), array("q", (0,)), array("q")
    for first_row, end_row, num in zip(
        arrays.query_start_loc[:-1], arrays.query_start_loc[1:], num_together, strict=True
    ):
        path_starts.extend([len(path_slots)] * (end_row - num - first_row))
        for row in range(end_row - num, end_row):
            positions[row] = arrays.positions[end_row - 1]
            path_slots.extend(arrays.slot_mapping[end_row - num : end_row])
            path_starts.append(len(path_slots))
    if not path_slots:
        return batch
    arrays = replace(arrays, positions=positions, path_starts=path_starts, path_slots=path_slots)
    return InputBatch(arrays, batch.block_size)


def _depths(row: PathRows, num_rows: int) -> list[int]:
    """Returns the depths of the path's rows and its parallel rows, `num_rows` in all.

    The depth is 0 for rows that are fed with a feature of the target; it grows by 1 with each row after these.
    """
    num_known = row.num_committed - row.start_position - 1  # index of the last row that is fed with a target's feature
    return [max(0, index - num_known) for index in range(num_rows)]
