"""Blended prompts (ADR 52): takes the KV of their pieces from the prefix cache, and chooses the tokens to compute.

A piece is computed like a prompt of its own, unless it is in the prefix cache. So the result does not depend on what is
cached. One blended prompt at a time has the KV of its pieces in main memory: from when the pieces are computed until
it has blocks of its own. Until then, it holds no blocks, so prompts that wait for blocks never wait for each other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.moved_kv import NUM_CHECKED_LAYERS, MovedKV
from outrider.engine.scheduler import EngineSequence
from outrider.engine.step_progress import StepProgress
from prefill_node.blend_plan import BlendPlan
from prefill_node.task import PrefillTask
from prefill_node.turn import PrefillTurn


class Blending:
    """The blended prompts whose tokens to compute are not chosen yet. Owned by the engine thread."""

    def __init__(self, engine: PromptEngine, turn: PrefillTurn, progress: StepProgress) -> None:
        self._engine = engine
        self._turn = turn
        self._progress = progress
        self._tasks: deque[PrefillTask] = deque()  # the first one's pieces are computed or read
        self._keys = itertools.count(-1, -1)  # of pieces; those of jobs are positive
        self._pieces: dict[EngineSequence, range] = {}  # pieces that are computed, with their places in the prompt
        self._moved: dict[range, MovedKV] = {}  # those that are read

    def add(self, task: PrefillTask) -> None:
        """Adds a job with a plan. It is scheduled when its pieces have been read."""
        self._tasks.append(task)
        if len(self._tasks) == 1:
            self._compute_pieces(task)

    def remove(self, task: PrefillTask) -> None:
        """Removes a job that is cancelled or filled, and its pieces. Idempotent."""
        if task not in self._tasks:
            return
        is_first = task is self._tasks[0]
        self._tasks.remove(task)
        if is_first:
            for piece in self._pieces:
                self._engine.scheduler.remove(piece)
            self._pieces, self._moved = {}, {}
            if self._tasks:
                self._compute_pieces(self._tasks[0])

    def take_admitted(self, admitted: Iterable[EngineSequence]) -> list[EngineSequence]:
        """Reads those admitted pieces that are in the prefix cache. Returns the admitted sequences of jobs."""
        jobs = []
        for sequence in admitted:
            if sequence not in self._pieces:
                jobs.append(sequence)
            elif sequence.num_uncomputed == 0:
                self.read(sequence)
        return jobs

    def read(self, sequence: EngineSequence) -> None:
        """Reads the KV of a sequence that is computed, if it is a piece."""
        engine, place = self._engine, self._pieces.pop(sequence, None)
        if place is None:
            return
        assert sequence.kv is not None
        slots = slots_of(sequence.kv.block_ids, len(place), engine.pool.block_size)
        self._moved[place] = MovedKV.read(engine.kv_cache, slots, engine.runner.turns(place.start))
        engine.scheduler.remove(sequence)
        if not self._pieces:
            engine.scheduler.add(self._tasks[0].sequence)

    def fill(self, task: PrefillTask | None) -> BlendPlan | None:
        """Returns the job's plan; None if there is none. The first time, it writes the KV of the pieces into the job's
        blocks, and chooses the tokens to compute.

        For this it computes the first layers of all tokens from the first reused one to the last one.
        """
        plan = None if task is None else task.blend
        if task is None or plan is None or plan.computed is not None:
            return plan
        kv_cache, sequence = self._engine.kv_cache, task.sequence
        moved = [(self._moved[place], self._slots(sequence, place)) for place in plan.reused]
        for piece, slots in moved:
            piece.write(kv_cache, slots)
        self._compute_first_layers(sequence, plan)
        deviations = [piece.deviations(kv_cache, slots) for piece, slots in moved]
        plan.choose(deviations, len(sequence.token_ids))
        self.remove(task)
        return plan

    def _compute_pieces(self, task: PrefillTask) -> None:
        assert task.blend is not None
        job = task.sequence
        for place in task.blend.reused:
            piece = EngineSequence(
                key=next(self._keys),
                token_ids=job.token_ids[place.start : place.stop],
                priority=job.priority,
                cache_salt=job.cache_salt,
                adapter=job.adapter,
                arrival=job.arrival,
                needs_logits=False,
            )
            self._pieces[piece] = place
            self._engine.scheduler.add(piece)

    def _compute_first_layers(self, sequence: EngineSequence, plan: BlendPlan) -> None:
        engine, kv = self._engine, sequence.kv
        assert kv is not None
        num_layers = min(NUM_CHECKED_LAYERS, engine.kv_cache.planes[0].num_layers)
        end, size = plan.reused[-1].stop, engine.scheduler.max_rows_per_step
        for start in range(kv.num_tokens, end, size):
            tokens = sequence.token_ids[start : min(start + size, end)]
            self._turn.yield_turn()
            self._progress.expect(len(tokens))
            rows = SequenceRows(tokens, start, kv.block_table(), num_logits=0, adapter=sequence.adapter)
            engine.runner.compute_layers(build_input_batch([rows], engine.pool.block_size), num_layers)

    def _slots(self, sequence: EngineSequence, place: range) -> Slots:
        assert sequence.kv is not None
        return slots_of(sequence.kv.block_ids, place.stop, self._engine.pool.block_size)[place.start :]
