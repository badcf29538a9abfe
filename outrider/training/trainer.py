"""Phase 3: trains a head on the target's distributions, over several draft steps at once."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.heap import trim_heap
from outrider.training.dataset import Batch, Dataset
from outrider.training.plan import SEED, PhaseClock, Progress, Say, TrainingPlan, write_atomically
from outrider.training.student import Student

STEP_WEIGHT = 0.8  # weight of a step's loss, relative to the step before
OUTPUT_LAYER_RATE = 0.3  # relative learning rate of the output layer, which starts as a copy of the target's
WARM_UP_STEPS = 40
MIN_RATE = 0.02
NEIGHBOURS = 64  # number of texts of similar length from which a batch is drawn
WATCHED_TEXTS = 24  # maximum number of held-out texts that are evaluated during training


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """The figures of a head at one time in its training. Lists have one entry per draft position."""

    seconds: float
    step: int
    loss: list[float]  # running means of training losses
    held_out_loss: list[float]
    acceptance: list[float]  # fraction of held-out rows where, after right drafts, head and target choose alike


class Trainer:
    """Trains a head, with an optimiser and a history. Training continues from `checkpoint` if that file exists."""

    def __init__(self, plan: TrainingPlan, student: Student, dataset: Dataset) -> None:
        self._plan, self._dataset, self.student = plan, dataset, student
        self._device = student.device
        is_output = {name: "lm_head." in name or ".head." in name for name in student.weights}
        output = [weight for name, weight in student.weights.items() if is_output[name]]
        others = [weight for name, weight in student.weights.items() if not is_output[name]]
        groups = [(others, plan.learning_rate), (output, plan.learning_rate * OUTPUT_LAYER_RATE)]
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters, "peak": rate} for parameters, rate in groups if parameters],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        self.step = 0
        self.history: list[HistoryPoint] = []
        self._running: Tensor | None = None  # [num_steps]: running means of losses
        self.checkpoint = plan.work / "checkpoint.pt"
        if self.checkpoint.is_file():
            self._load()

    def run(self, clock: PhaseClock, *, seconds: float, say: Say, progress: Progress) -> None:
        """Trains until the phase has taken `seconds`. Saves at the end, even if training is interrupted."""
        kept_at = clock.seconds
        if not self.history:
            self._watch(clock, say)
        try:
            for texts in self._batches():
                part = clock.seconds / seconds
                if part >= 1 and self.step:
                    break
                self._learn(Batch.of(self._dataset, texts, self._device), part)
                progress("training, seconds", int(clock.seconds), int(seconds))
                if clock.seconds - kept_at >= self._plan.checkpoint_seconds:
                    self._watch(clock, say)
                    self.save(clock)
                    kept_at = clock.seconds
            self._watch(clock, say)
        finally:
            self.save(clock)

    def save(self, clock: PhaseClock) -> None:
        """Writes the checkpoint atomically, so that the next run finds the old or the new one."""
        content = io.BytesIO()  # not saved to the file directly, because torch's errors do not mention a full disk
        torch.save(
            {
                "weights": self.student.weights,
                "optimizer": self._optimizer.state_dict(),
                "step": self.step,
                "running": self._running,
                "history": [asdict(point) for point in self.history],
            },
            content,
        )
        write_atomically(self.checkpoint, content.getvalue())
        clock.keep()
        # Batches differ in shape, and oneDNN keeps a compiled kernel for each of the last thousand shapes. The small
        # blocks of these lie between large freed ones, which glibc would keep: some gigabytes after an hour.
        trim_heap()

    def _load(self) -> None:
        saved: dict[str, Any] = torch.load(self.checkpoint, map_location=self._device)
        if saved.get("weights", {}).keys() != self.student.weights.keys():
            raise ConfigError(f"{self._plan.out} holds a checkpoint with other weights: give another --out")
        with torch.no_grad():
            for name, weight in self.student.weights.items():
                weight.copy_(saved["weights"][name])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.step, self._running = saved["step"], saved["running"]
        self.history = [HistoryPoint(**point) for point in saved["history"]]

    def _batches(self) -> Iterator[Sequence[int]]:
        """Yields batches of texts of similar length, without end, in a new random order in each round."""
        rng = random.Random(f"{SEED} {self.step}")  # noqa: S311 no secret
        texts, size = self._dataset.texts, self._plan.batch_size
        by_length = sorted(self._dataset.training, key=lambda text: len(texts[text].token_ids))
        while True:
            places = sorted(range(len(by_length)), key=lambda place: place + rng.uniform(0, NEIGHBOURS))
            order = [by_length[place] for place in places]
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            rng.shuffle(groups)
            yield from groups

    def _learn(self, batch: Batch, part: float) -> None:
        """Makes one training step when the fraction `part` of the training time has passed.

        Raises: ModelError if the loss is not finite; the weights stay unchanged.
        """
        rate = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        rate *= MIN_RATE + (1 - MIN_RATE) * 0.5 * (1 + math.cos(math.pi * part))
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        losses, *_ = self.student.losses(batch, self._plan.num_steps)
        total = sum(STEP_WEIGHT**step * loss for step, loss in enumerate(losses))
        if not total.isfinite():
            raise ModelError(f"training step {self.step}: the loss is {total.item()}; train again with a lower --rate")
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.student.weights.values(), 1.0)
        self._optimizer.step()
        self.step += 1
        now = losses.detach()
        self._running = now if self._running is None else torch.lerp(self._running, now, 0.05)

    @torch.no_grad()
    def _watch(self, clock: PhaseClock, say: Say) -> None:
        """Evaluates held-out texts and adds the figures to the history."""
        held_out, size, num_steps = self._dataset.held_out[:WATCHED_TEXTS], self._plan.batch_size, self._plan.num_steps
        sums = torch.zeros(3, num_steps)  # loss, hits, rows
        for start in range(0, len(held_out), size):
            batch = Batch.of(self._dataset, held_out[start : start + size], self._device)
            losses, hits, reached = self.student.losses(batch, num_steps)
            num_rows = reached.sum(1)
            sums += torch.stack([losses * num_rows, hits.sum(1), num_rows]).cpu()
        held_out_loss = (sums[0] / sums[2].clamp_min(1)).tolist()
        point = HistoryPoint(
            seconds=clock.seconds,
            step=self.step,
            loss=held_out_loss if self._running is None else self._running.tolist(),
            held_out_loss=held_out_loss,
            acceptance=(sums[1] / sums[2].clamp_min(1)).tolist(),
        )
        self.history.append(point)
        say(
            f"training {point.seconds:.0f} s, step {point.step}: loss {point.loss[0]:.3f}, held out "
            f"{point.held_out_loss[0]:.3f}, acceptance " + " ".join(f"{share:.3f}" for share in point.acceptance)
        )
