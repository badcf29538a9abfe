"""A simulated batch without models: a script tells which draft tokens are right, and a curve how long steps take.

As in coupled sampling, whether a draft token is right depends only on its position, not on its source or draft length.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.engine.scheduler import StepReservation
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.draft_tree import DRAFT_NODE, DraftTree
from outrider.speculation.step_cost import StepCostModel

MAX_DRAFT_TOKENS = 8
BUCKETS = [1 << power for power in range(10)]

# The two states of each kind of text: (acceptance, mean number of tokens that the state lasts).
KINDS = {
    "chat": ((0.35, 40), (0.65, 40)),
    "extract": ((0.05, 60), (0.95, 40)),
    "code": ((0.6, 30), (0.9, 30)),
    "even": ((0.8, 50), (0.8, 50)),
    "hopeless": ((0.02, 50), (0.05, 50)),
}


def _measured(rows: Sequence[int], milliseconds: Sequence[float]) -> Callable[[int], float]:
    return lambda num_rows: float(np.interp(num_rows, rows, milliseconds)) / 1000.0


# Seconds of a step as a function of its rows.
CURVES: dict[str, Callable[[int], float]] = {
    "linear": lambda rows: 0.030 + 0.003 * rows,
    "flat then steep": lambda rows: 0.030 + 0.004 * max(0, rows - 8),
    "flat": lambda rows: 0.030 + 0.0001 * rows,
    "steep": lambda rows: 0.010 + 0.010 * rows,
    "stairs": lambda rows: 0.020 + 0.0004 * next(bucket for bucket in BUCKETS if bucket >= rows),
    # Measured with a small model on a CPU: 0 to 5 draft tokens for each of 1, 4 and 16 sequences.
    "measured 1": _measured((1, 2, 3, 4, 5, 6), (11.96, 13.37, 14.04, 13.88, 14.93, 15.7)),
    "measured 4": _measured((4, 8, 12, 16, 20, 24), (17.8, 20.0, 22.0, 32.2, 31.6, 42.0)),
    "measured 16": _measured((16, 32, 48, 64, 80, 96), (35.3, 54.2, 86.3, 113.8, 125.7, 154.3)),
}


def cost_model(curve: str) -> StepCostModel:
    """Returns a node's cost model. If a device pads steps, the model knows the padded sizes (ADR 25)."""
    return StepCostModel(buckets=BUCKETS) if curve == "stairs" else StepCostModel()


def right_tokens(kind: str, seed: int, length: int) -> list[bool]:
    chosen = random.Random(f"{kind}{seed}")
    states, state = KINDS[kind], chosen.randrange(2)
    right = []
    for _ in range(length):
        acceptance, lasts = states[state]
        state = 1 - state if chosen.random() < 1.0 / lasts else state
        right.append(chosen.random() < acceptance)
    return right


@dataclass
class SimulatedBatch:
    """`num_sequences` texts of `length` tokens. When one ends, another begins."""

    kind: str
    curve: str
    num_sequences: int
    length: int = 200
    noise: float = 0.1
    stalls: float = 0.0  # share of steps that take five times as long
    seed: int = 5
    num_rows: int = 0  # rows of the last step
    drafted: dict[int, list[int]] = field(default_factory=dict)  # by sequence: verified tokens of each step

    def __post_init__(self):
        self._random = random.Random(self.seed)
        self._ids = itertools.count()
        self._texts = {}
        for _ in range(self.num_sequences):
            self._begin(self._random.randrange(self.length))

    def _begin(self, position=0):
        sequence_id = next(self._ids)
        self._texts[sequence_id] = [position, right_tokens(self.kind, sequence_id, self.length + MAX_DRAFT_TOKENS)]

    @property
    def sequence_ids(self):
        return list(self._texts)

    def step(self, chosen, on_verdict=lambda *_: None, on_end=lambda *_: None):
        """Verifies `chosen` draft tokens by sequence. Returns (committed tokens, seconds on an idle machine)."""
        self.num_rows, num_tokens = self.num_sequences, 0
        for sequence_id in self.sequence_ids:
            text = self._texts[sequence_id]
            position, right = text
            num_draft = chosen.get(sequence_id, 0)
            following = right[position : position + num_draft]
            num_accepted = following.index(False) if False in following else num_draft
            if num_draft:
                on_verdict(sequence_id, num_accepted)
            self.drafted.setdefault(sequence_id, []).append(num_draft)
            self.num_rows += num_draft
            num_tokens += 1 + num_accepted
            text[0] += 1 + num_accepted
            if text[0] >= self.length:
                del self._texts[sequence_id]
                on_end(sequence_id)
                self._begin()
        return num_tokens, CURVES[self.curve](self.num_rows)

    def disturbed(self, seconds: float) -> float:
        """Returns the duration that a node measures if other work runs on the machine."""
        stalled = 5.0 if self._random.random() < self.stalls else 1.0
        return seconds * stalled * self._random.uniform(1 - self.noise, 1 + self.noise)


def fixed_rate(batch: SimulatedBatch, num_draft: int, *, num_steps: int) -> float:
    """Returns tokens per second with `num_draft` draft tokens for each sequence in each step."""
    steps = [batch.step(dict.fromkeys(batch.sequence_ids, num_draft)) for _ in range(num_steps)]
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


@dataclass
class ControlledBatch:
    """A simulated batch whose drafts a controller chooses."""

    batch: SimulatedBatch
    controller: DraftController
    source: str = DRAFT_NODE
    max_rows: int = 4096
    num_waiting: int = 0

    def step(self):
        controller, batch = self.controller, self.batch
        limits = {
            sequence_id: num_wanted
            for sequence_id in batch.sequence_ids
            if (num_wanted := controller.num_wanted(sequence_id, MAX_DRAFT_TOKENS, self.source))
        }
        drafts = {
            key: controller.rank(key, DraftTree(0, token_ids=(1,) * num_wanted, source=self.source), num_wanted)
            for key, num_wanted in limits.items()
        }
        room = StepReservation(batch.sequence_ids, max_draft_rows=self.max_rows, num_rows=batch.num_sequences)
        chosen = controller.choose(drafts, room, num_waiting=self.num_waiting)
        tokens, seconds = batch.step(
            chosen,
            lambda key, num: controller.observe_verdict(key, drafts[key].tree.cut(chosen[key]), range(num)),
            controller.forget,
        )
        controller.observe_step(
            batch.disturbed(seconds), num_rows=batch.num_rows, num_sequences=batch.num_sequences, num_prompt_rows=0
        )
        return tokens, seconds

    def rate(self, num_steps: int) -> float:
        steps = [self.step() for _ in range(num_steps)]
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def controlled(batch: SimulatedBatch, **options) -> ControlledBatch:
    controller = DraftController(MAX_DRAFT_TOKENS, cost=cost_model(batch.curve))
    return ControlledBatch(batch, controller, **options)
