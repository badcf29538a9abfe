"""Blended prompts (ADR 52): takes the KV of their pieces from the prefix cache, and chooses the tokens to compute.

A piece is computed like a prompt of its own, unless it is in the prefix cache. So the result does not depend on what is
cached. One blended prompt at a time has the KV of its pieces in main memory: from when the pieces are computed until
its tokens are chosen. A blended prompt that waits for blocks holds none itself, so two of them can never each hold the
blocks that the other needs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.moved_kv import NUM_CHECKED_LAYERS, MovedKV
from outrider.engine.scheduler import EngineSequence, Scheduled, StepPlan
from outrider.engine.step_progress import StepProgress
from outrider.profile import Part
from prefill_node.blend_plan import BlendPlan
from prefill_node.task import PrefillTask
from prefill_node.turn import PrefillTurn


class Blending:
    """The blended prompt whose tokens to compute are not chosen yet. Owned by the engine thread.

    Its work is divided into parts of at most a step's rows, each of which is a step and a turn of its own.
    """

    def __init__(self, engine: PromptEngine, turn: PrefillTurn, progress: StepProgress) -> None:
        self.task: PrefillTask | None = None
        self._engine = engine
        self._turn = turn
        self._progress = progress
        self._keys = itertools.count(-1, -1)  # of pieces; those of jobs are positive
        self._pieces: dict[EngineSequence, range] = {}  # pieces that are not read yet, with their places in the prompt
        self._moved: dict[range, MovedKV] = {}  # what is read, in parts
        self._work: deque[Iterator[bool]] = deque()  # each `next` does a part of it

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def start(self, task: PrefillTask) -> None:
        """Starts a job with a plan, whose push runs, if there is no other. It is scheduled when its pieces are read."""
        assert task.blend is not None
        self.task, job = task, task.sequence
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

    def remove(self, task: PrefillTask) -> None:
        """Removes a job that is cancelled or filled, and its pieces. Idempotent."""
        if task is self.task:
            for piece in self._pieces:
                self._engine.scheduler.remove(piece)
            self.task, self._pieces, self._moved = None, {}, {}
            self._work.clear()

    def take(self, plan: StepPlan) -> StepPlan:
        """Returns a step's plan without admitted pieces, and without rows of a job that is not filled yet."""
        jobs, unfilled = [], None
        for sequence in plan.admitted:
            if sequence not in self._pieces:
                jobs.append(sequence)
                if self.task is not None and sequence is self.task.sequence:
                    unfilled = sequence
                    self._suspend(self.task)
            elif sequence.num_uncomputed == 0:
                self._work.append(self._read(sequence))
        scheduled = tuple(item for item in plan.scheduled if item.sequence is not unfilled)
        return plan._replace(admitted=tuple(jobs), scheduled=scheduled)

    def note_computed(self, item: Scheduled) -> None:
        """Notes that a chunk is computed, if it is one of a piece."""
        if self.task is not None and item.sequence in self._pieces:
            self.task.note_progress()
            if item.reaches_end:
                self._work.append(self._read(item.sequence))

    def work(self) -> bool:
        """Does a part of the work, if there is some. Returns whether another job may start now."""
        if self.task is None or not self._work:
            return False
        self._progress.begin()
        self._turn.take()
        self._turn.keep()
        self.task.note_progress()
        work = self._work.popleft()
        if next(work, False):
            self._work.appendleft(work)
        self._engine.clock.mark(Part.FORWARD)
        self._turn.give()
        self._progress.end()
        return self.task is None

    def _suspend(self, task: PrefillTask) -> None:
        """Takes a job with blocks out of the scheduler until it is filled."""
        assert task.blend is not None
        sequence, kv = task.sequence, task.sequence.kv
        sequence.kv = None  # otherwise it would be freed
        self._engine.scheduler.remove(sequence)
        sequence.kv = kv
        self._work.append(self._fill(task, task.blend))

    def _read(self, sequence: EngineSequence) -> Iterator[bool]:
        """Reads the KV of a piece that is computed. After the last piece, schedules the job."""
        engine, place = self._engine, self._pieces[sequence]
        turns = engine.runner.turns(place.start)
        for part in self._parts(place):
            slots = self._slots(sequence, range(part.start - place.start, part.stop - place.start))
            self._moved[part] = MovedKV.read(engine.kv_cache, slots, turns)
            yield True
        del self._pieces[sequence]
        engine.scheduler.remove(sequence)
        if not self._pieces and self.task is not None:
            engine.scheduler.add(self.task.sequence)

    def _fill(self, task: PrefillTask, plan: BlendPlan) -> Iterator[bool]:
        """Writes the KV of the pieces into the job's blocks, computes the first layers of all tokens from the first
        reused one to the last one, and chooses the tokens to compute in all layers.
        """
        kv_cache, sequence, end = self._engine.kv_cache, task.sequence, plan.reused[-1].stop
        moved = [
            (self._moved[part], self._slots(sequence, part)) for place in plan.reused for part in self._parts(place)
        ]
        for piece, slots in moved:
            piece.write(kv_cache, slots)
            yield True
        for part in self._parts(range(sequence.num_computed, end)):
            self._compute_first_layers(sequence, part)
            yield True
        deviations = []
        for piece, slots in moved:
            deviations.append(piece.deviations(kv_cache, slots))
            yield True
        plan.choose(deviations, len(sequence.token_ids))
        self.remove(task)
        self._engine.scheduler.add_running(sequence)

    def _compute_first_layers(self, sequence: EngineSequence, part: range) -> None:
        engine, kv = self._engine, sequence.kv
        assert kv is not None
        total = engine.kv_cache.planes[0].num_layers
        num_layers = min(NUM_CHECKED_LAYERS, total)
        self._progress.expect(-(-len(part) * num_layers // total))  # as many rows take about as long in all layers
        tokens = sequence.token_ids[part.start : part.stop]
        rows = SequenceRows(tokens, part.start, kv.block_table(), num_logits=0, adapter=sequence.adapter)
        engine.runner.compute_layers(build_input_batch([rows], engine.pool.block_size), num_layers)

    def _parts(self, place: range) -> list[range]:
        size = self._engine.scheduler.max_rows_per_step
        return [place[start : start + size] for start in range(0, len(place), size)]

    def _slots(self, sequence: EngineSequence, place: range) -> Slots:
        assert sequence.kv is not None
        return slots_of(sequence.kv.block_ids, place.stop, self._engine.pool.block_size)[place.start :]
