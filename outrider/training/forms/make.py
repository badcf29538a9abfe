"""A head to train: new, or one that is taken up."""

from __future__ import annotations

import torch

from outrider.errors import ConfigError
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.training.dataset import Dataset
from outrider.training.forms.base import DraftVocabulary, Student
from outrider.training.forms.eagle3 import Eagle3Shape, Eagle3Student, eagle3_taps
from outrider.training.forms.medusa import MedusaStudent
from outrider.training.forms.mlp import MLPStudent
from outrider.training.plan import TrainingPlan

SCALE_SAMPLE = 10_000  # tokens


def needed_taps(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """Of the target's residual stream, besides its final hidden state. Raises: ConfigError, ModelError."""
    if plan.form != "eagle3":
        return ()
    if plan.init_from is None:
        return eagle3_taps(target.num_layers)
    config = Checkpoint.open(plan.init_from).config
    if config.get("speculators_model_type") != "eagle3" or not config.get("eagle_aux_hidden_state_layer_ids"):
        raise ConfigError(f"--init-from {plan.init_from} is no eagle3 head in the speculators layout")
    return tuple(config["eagle_aux_hidden_state_layer_ids"])


def make_student(plan: TrainingPlan, target: Target, dataset: Dataset, *, name: str) -> Student:
    """`name`: of the target. Raises: ConfigError, ModelError."""
    torch.manual_seed(plan.seed)
    dtype = dataset.hidden.dtype
    counts = dataset.answer_counts(target.vocab_size)
    tensors = {}
    if plan.init_from is not None:
        checkpoint = Checkpoint.open(plan.init_from)
        tensors = {name: checkpoint.mapped(name) for name in checkpoint.tensor_names}
        counts = checkpoint.mapped("t2d", (target.vocab_size,)).long()
    size = min(plan.draft_vocab_size, target.vocab_size) if not tensors else int(counts.sum())
    vocabulary = DraftVocabulary.most_frequent(counts, size, target, dtype)
    if plan.form == "medusa":
        return MedusaStudent(vocabulary, plan.num_steps)
    if plan.form == "mlp":
        return MLPStudent(vocabulary, plan.num_steps)
    verifier = {"name_or_path": name, "architectures": list(target.config.get("architectures") or [])}
    student = Eagle3Student(Eagle3Shape.of(target), vocabulary, needed_taps(plan, target), verifier)
    if tensors:
        try:
            student.load(tensors)
        except (RuntimeError, IndexError) as error:
            raise ConfigError(f"--init-from {plan.init_from} was not trained for this target: {error}") from error
        return student
    hidden = dataset.hidden[:, : -target.hidden_size]
    student.scale_features(hidden[:: -(-len(hidden) // SCALE_SAMPLE)])
    return student
