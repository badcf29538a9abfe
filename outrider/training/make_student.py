"""Makes the student of a plan: the head that is trained."""

from __future__ import annotations

import torch

from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.errors import ConfigError
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.open import open_head
from outrider.training.block_student import BlockStudent
from outrider.training.dataset import Dataset
from outrider.training.new_heads import eagle3_taps, new_head
from outrider.training.plan import SEED, TrainingPlan
from outrider.training.student import Student

SCALE_SAMPLE = 10_000  # approximate number of tokens from which the scale of features is estimated


def needed_taps(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """Returns the taps of the target's residual stream that the head needs, except the final hidden state.

    Raises: ConfigError, ModelError if training cannot continue from the head of `--init-from`.
    """
    if plan.init_from is None:
        return eagle3_taps(target.num_layers)
    head = open_head(plan.init_from, target, torch.device("cpu"), torch.float32)
    if head.form != "eagle3":
        raise ConfigError(f"--init-from {plan.init_from} is not an eagle3 head: its form is {head.form}")
    if target.num_layers in head.reduction.taps:  # the last layer's states are kept only after the final norm
        raise ConfigError(f"--init-from {plan.init_from} reads the last layer's output before the final norm")
    return head.reduction.taps


def make_student(plan: TrainingPlan, target: Target, dataset: Dataset, device: torch.device, *, name: str) -> Student:
    """Makes a new head, or opens the head of `--init-from`, whose reduction is not trained.

    `name`: the target's name. Raises: as `needed_taps`.
    """
    torch.manual_seed(SEED)
    dtype = TORCH_DTYPES[dataset.dtype]
    if plan.init_from is not None:
        return Student(Checkpoint.open(plan.init_from), target, device, dtype, trains_reduction=False)
    counts = dataset.answer_counts(target.vocab_size)
    kind = BlockStudent if plan.form == "dspark" else Student
    student = kind(new_head(plan, target, name, counts, device), target, device, dtype)
    # Held-out texts, because their hidden states stay: a run that is continued must find the same scales.
    apart = -(-int(dataset.starts[len(dataset.held_out)]) // SCALE_SAMPLE)
    student.scale_features(torch.cat([dataset.features(text)[apart // 2 :: apart] for text in dataset.held_out]))
    return student
