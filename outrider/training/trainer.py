"""Phase 3: trains a head on the target's distributions, over several draft steps at once."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.heap import trim_heap
from outrider.training.dataset import Batch, Dataset, batches
from outrider.training.plan import SEED, PhaseClock, Progress, Say, TrainingPlan, write_atomically
from outrider.training.student import Student

STEP_WEIGHT = 0.8  # weight of a step's loss, relative to the step before
OUTPUT_LAYER_RATE = 0.3  # relative learning rate of the output layer, which starts as a copy of the target's
WARM_UP_STEPS = 40
DECAY_SHARE = 0.3
"""Fraction of the training in which the learning rate falls to 0. Before, it is constant (warm-up, stable, decay: Hu et
al. 2024, arXiv 2404.06395), so that a run that is given more time later continues from the weights before the decay."""
WATCHED_TEXTS = 20  # maximum number of held-out texts of each kind that are evaluated during training
WATCHES = 60  # number of evaluations over the whole training
PATIENCE = 10  # evaluations without a lower held-out loss after which the learning rate falls early
MIN_WORKER_TOKENS = 256  # answer tokens of a worker in a step; matrix products of fewer rows are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """The figures of a head at one time in its training. Lists have one entry per draft position."""

    seconds: float
    step: int
    passes: float  # number of times that all training texts were visited
    loss: list[float]  # running means of training losses
    held_out_loss: list[float]
    acceptance: list[float]  # fraction of held-out rows where, after right drafts, head and target choose alike
    kinds: dict[str, list[list[float]]]  # by kind of text: held-out losses, acceptance

    def judged(self) -> float:
        """Returns the held-out loss of all steps, weighted as in training."""
        return sum(STEP_WEIGHT**step * loss for step, loss in enumerate(self.held_out_loss))


class Trainer:
    """Trains a head, with an optimiser and a history. Training continues from `checkpoint` if that file exists."""

    def __init__(self, plan: TrainingPlan, student: Student, dataset: Dataset) -> None:
        self._plan, self._dataset, self.student = plan, dataset, student
        self._device = student.device
        output = [weight for name, weight in student.weights.items() if "lm_head." in name]
        others = [weight for name, weight in student.weights.items() if "lm_head." not in name]
        groups = [(others, plan.learning_rate), (output, plan.learning_rate * OUTPUT_LAYER_RATE)]
        groups = [(parameters, rate) for parameters, rate in groups if parameters]
        self._peaks = [rate for _, rate in groups]
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters, _ in groups],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        # Each worker computes the gradients of a part of a step with its own threads. The threads of one operator wait
        # for each other: beside other work, two workers of one thread are twice as fast as one worker of two.
        num_threads = torch.get_num_threads()
        on_cpu = self._device.type == "cpu"
        self._num_workers = max(1, min(num_threads, plan.batch_tokens // MIN_WORKER_TOKENS)) if on_cpu else 1
        self._workers = ThreadPoolExecutor(
            self._num_workers, initializer=torch.set_num_threads, initargs=(max(1, num_threads // self._num_workers),)
        )
        self.step = 0
        self.num_visited = 0  # training texts, in all passes
        self.history: list[HistoryPoint] = []
        self._running: Tensor | None = None  # [num_steps]: running means of losses
        self._best: tuple[dict[str, Tensor], HistoryPoint] | None = None
        """The weights with the lowest held-out loss, also of training that was done again with more time."""
        self._part = 0.0  # fraction of the training that is done
        self._decay_from: float | None = None  # value of `_part` at which the learning rate began to fall
        by_kind: dict[str, list[int]] = {}
        for text in dataset.held_out:
            by_kind.setdefault(dataset.kind(text), []).append(text)
        self._watched = [text for texts in by_kind.values() for text in texts[:WATCHED_TEXTS]]
        self.checkpoint = plan.work / "checkpoint.pt"
        self.before_decay = plan.work / "before-decay.pt"
        if self.checkpoint.is_file():
            self._load(self.checkpoint)

    def run(
        self,
        clock: PhaseClock,
        *,
        part: Callable[[float], float],
        prepare: Callable[[int], None],
        say: Say,
        progress: Progress,
    ) -> None:
        """Trains until `part(passes)`, the fraction of the training that is done, is 1.

        The learning rate falls earlier, and training ends earlier, if held-out texts no longer improve. Saves at the
        end, even if training is interrupted. `prepare(shard)` provides the shard's hidden states.
        """
        if not self.history:
            self._watch(clock, say)
        now = part(self._passes)
        if self._decay_from is not None and now < 0.99 * self._part:
            best = self._best
            self._load(self.before_decay)
            now = part(self._passes)
            if now > 1 - DECAY_SHARE:
                self._load(self.checkpoint)
                say("the added time is too short to continue: the head stays unchanged; give 1.5 times the time")
                return
            say("there is more time than before: training continues from the weights before the learning rate fell")
            self._best = best
        kept_at, watched_at = clock.seconds, now
        try:
            while not self._is_over(now):
                shard, left = self._next_texts()
                prepare(shard)
                for texts in batches(self._dataset, left, self._plan.batch_tokens):
                    if self._decay_from is None and (now >= 1 - DECAY_SHARE or self._stagnates):
                        self.save(clock, self.before_decay)
                        self._decay_from = now
                    self._learn(texts, self._rate(now))
                    self.num_visited += len(texts)
                    now = self._part = part(self._passes)
                    progress("training, percent", int(100 * min(now, 1)), 100)
                    if self._is_over(now):
                        break
                    if clock.seconds - kept_at >= self._plan.checkpoint_seconds:
                        if now - watched_at >= 1 / WATCHES:
                            self._watch(clock, say)
                            watched_at = now
                        self.save(clock, self.checkpoint)
                        kept_at = clock.seconds
            if self.history[-1].step < self.step:
                self._watch(clock, say)
        finally:
            self.save(clock, self.checkpoint)

    def use_best(self) -> HistoryPoint:
        """Gives the student the weights with the lowest held-out loss. Returns their figures."""
        assert self._best is not None, "evaluated"
        weights, point = self._best
        self._set(weights)
        return point

    @property
    def _passes(self) -> float:
        """The number of times that all training texts were visited."""
        return self.num_visited / len(self._dataset.training)

    def _next_texts(self) -> tuple[int, list[int]]:
        """Returns the shard that is visited, and those of its texts that this pass has not visited, in its order."""
        num_passes, place = divmod(self.num_visited, len(self._dataset.training))
        text = self._dataset.training[place]
        shard = self._dataset.shard_of(text)
        order = list(self._dataset.shards[shard])
        num_visited = text - order[0]
        random.Random(f"{SEED} {num_passes} {shard}").shuffle(order)  # noqa: S311 no secret
        return shard, order[num_visited:]

    @property
    def _decay_end(self) -> float:
        return 1.0 if self._decay_from is None else min(1.0, self._decay_from / (1 - DECAY_SHARE))

    def _is_over(self, now: float) -> bool:
        return self.step > 0 and now >= self._decay_end

    @property
    def _stagnates(self) -> bool:
        """Whether the held-out loss has not become lower in the last evaluations."""
        losses = [point.judged() for point in self.history]
        return len(losses) - losses.index(min(losses)) > PATIENCE

    def _rate(self, now: float) -> float:
        """Returns the learning rate as a fraction of its peak."""
        rate = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        if self._decay_from is None:
            return rate
        return rate * max(0.0, (self._decay_end - now) / max(self._decay_end - self._decay_from, 1e-9))

    def save(self, clock: PhaseClock, path: Path) -> None:
        """Writes a checkpoint atomically, so that the next run finds the old or the new one."""
        content = io.BytesIO()  # not saved to the file directly, because torch's errors do not mention a full disk
        torch.save(
            {
                "weights": self.student.weights,
                "best": self._best and (self._best[0], asdict(self._best[1])),
                "optimizer": self._optimizer.state_dict(),
                "step": self.step,
                "num_visited": self.num_visited,
                "part": self._part,
                "decay_from": self._decay_from,
                "running": self._running,
                "history": [asdict(point) for point in self.history],
            },
            content,
        )
        write_atomically(path, content.getvalue())
        clock.keep()
        # Batches differ in shape, and oneDNN keeps a compiled kernel for each of the last thousand shapes. The small
        # blocks of these lie between large freed ones, which glibc would keep: some gigabytes after an hour.
        trim_heap()

    def _load(self, path: Path) -> None:
        saved: dict[str, Any] = torch.load(path, map_location=self._device)
        if saved.get("weights", {}).keys() != self.student.weights.keys() or "num_visited" not in saved:
            raise ConfigError(f"{self._plan.out} holds a checkpoint with other weights: give another --out")
        self._set(saved["weights"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.step, self.num_visited, self._running = saved["step"], saved["num_visited"], saved["running"]
        self._part, self._decay_from, best = saved["part"], saved["decay_from"], saved["best"]
        self._best = best and (best[0], HistoryPoint(**best[1]))
        self.history = [HistoryPoint(**point) for point in saved["history"]]

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.student.weights.items():
            weight.copy_(weights[name])

    def _learn(self, texts: Sequence[int], rate: float) -> None:
        """Makes one training step. `rate`: the learning rate as a fraction of its peak.

        Raises: ModelError if the loss is not finite; the weights stay unchanged.
        """
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * rate
        lengths = torch.from_numpy(self._dataset.response_lengths[list(texts)])
        num_reached = torch.stack([(lengths - step).clamp_min(0).sum() for step in range(self._plan.num_steps)])
        scales = (STEP_WEIGHT ** torch.arange(self._plan.num_steps) / num_reached.clamp_min(1)).to(self._device)
        parts = list(self._workers.map(lambda part: self._gradients(part, scales), self._split(texts)))
        losses, counted = torch.stack([sums for sums, _ in parts]).sum(0)
        if not losses.isfinite().all():
            raise ModelError(f"training step {self.step}: the loss is {losses[0]}; train again with a lower --rate")
        for weight, *gradients in zip(self.student.weights.values(), *(part for _, part in parts), strict=True):
            weight.grad = functools.reduce(torch.add, gradients)
        torch.nn.utils.clip_grad_norm_(self.student.weights.values(), 1.0)
        self._optimizer.step()
        self.step += 1
        now = losses / counted.clamp_min(1)
        self._running = now if self._running is None else torch.lerp(self._running, now, 0.05)

    def _split(self, texts: Sequence[int]) -> list[list[int]]:
        """Splits the texts of a step between the workers, so that each has about the same number of answer tokens."""
        lengths = self._dataset.response_lengths
        parts: list[list[int]] = [[] for _ in range(self._num_workers)]
        for text in sorted(texts, key=lambda text: -lengths[text]):
            min(parts, key=lambda part: lengths[part].sum()).append(text)
        return [part for part in parts if part]

    def _gradients(self, texts: Sequence[int], scales: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns sums by step [2, num_steps]: losses and rows that count; and the gradients of all weights.

        `scales`: [num_steps], the weight of each step's losses.
        """
        losses, counted, *_ = self.student.losses(Batch.of(self._dataset, texts, self._device), self._plan.num_steps)
        sums, weights = losses.sum(1), tuple(self.student.weights.values())
        gradients = torch.autograd.grad((sums * scales).sum(), weights, materialize_grads=True)
        return torch.stack([sums.detach(), counted.sum(1)]), gradients

    @torch.no_grad()
    def _figures(self, texts: Sequence[int]) -> Tensor:
        """Returns sums by text and step [num_texts, 4, num_steps]: losses, rows that count, hits, reached rows."""
        batch = Batch.of(self._dataset, texts, self._device)
        figures = torch.stack([each.float() for each in self.student.losses(batch, self._plan.num_steps)])
        return torch.stack([each.sum(-1) for each in figures.split(list(batch.lengths), -1)]).cpu()

    def _watch(self, clock: PhaseClock, say: Say) -> None:
        """Evaluates held-out texts and adds the figures to the history."""
        groups = list(batches(self._dataset, self._watched, self._plan.batch_tokens // self._num_workers))
        kinds: dict[str, Tensor] = {}  # by kind of text: sums as in `_figures`
        for texts, figures in zip(groups, self._workers.map(self._figures, groups), strict=True):
            for text, sums in zip(texts, figures, strict=True):
                kind = self._dataset.kind(text)
                kinds[kind] = kinds.get(kind, torch.zeros_like(sums)) + sums

        def means(sums: Tensor) -> list[list[float]]:
            losses, counted, hits, reached = sums
            return [(losses / counted.clamp_min(1)).tolist(), (hits / reached.clamp_min(1)).tolist()]

        held_out_loss, acceptance = means(torch.stack(list(kinds.values())).sum(0))
        point = HistoryPoint(
            seconds=clock.seconds,
            step=self.step,
            passes=self._passes,
            loss=held_out_loss if self._running is None else self._running.tolist(),
            held_out_loss=held_out_loss,
            acceptance=acceptance,
            kinds={kind: means(sums) for kind, sums in sorted(kinds.items())},
        )
        if self._best is None or point.judged() < self._best[1].judged():
            self._best = {name: weight.detach().clone() for name, weight in self.student.weights.items()}, point
        self.history.append(point)
        say(
            f"training {point.seconds:.0f} s, step {point.step}: loss {point.loss[0]:.3f}, held out "
            f"{held_out_loss[0]:.3f}, acceptance {' '.join(f'{share:.3f}' for share in acceptance)}; "
            f"{point.passes:.2f} passes, first position by kind: "
            + ", ".join(f"{kind} {losses[0]:.3f} {shares[0]:.3f}" for kind, (losses, shares) in point.kinds.items())
        )
