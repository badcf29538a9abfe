"""A head to train: new, or one that is taken up."""

from __future__ import annotations

import torch

from outrider.errors import ConfigError
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.open import open_head
from outrider.training.dataset import Dataset
from outrider.training.forms.base import DraftVocabulary, Student
from outrider.training.forms.eagle3 import Eagle3Student, eagle3_taps, layer_config_of
from outrider.training.forms.medusa import MedusaStudent
from outrider.training.forms.mlp import MLPStudent
from outrider.training.plan import TrainingPlan

SCALE_SAMPLE = 10_000  # tokens
NOT_TRAINED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 that heads are read in, and not trained in."""


def needed_taps(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """Of the target's residual stream, besides its final hidden state.

    Raises: ConfigError, ModelError for a head that cannot be taken up.
    """
    if plan.form != "eagle3":
        return ()
    if plan.init_from is None:
        return eagle3_taps(target.num_layers)
    return _take_up(plan, target, "", torch.float32).taps


def make_student(plan: TrainingPlan, target: Target, dataset: Dataset, device: torch.device, *, name: str) -> Student:
    """On the device. `name`: of the target. Raises: as `needed_taps`."""
    torch.manual_seed(plan.seed)
    dtype = dataset.hidden.dtype
    if plan.init_from is not None:
        return _take_up(plan, target, name, dtype).to(device)
    counts = dataset.answer_counts(target.vocab_size)
    vocabulary = DraftVocabulary(counts, plan.draft_vocab_size, target, dtype)
    if plan.form == "medusa":
        return MedusaStudent(vocabulary, plan.num_steps).to(device)
    if plan.form == "mlp":
        return MLPStudent(vocabulary, plan.num_steps).to(device)
    taps = eagle3_taps(target.num_layers)
    student = Eagle3Student(layer_config_of(target), vocabulary, taps, _verifier(target, name))
    student.scale_features(dataset.features[:: -(-len(dataset.features) // SCALE_SAMPLE)])
    return student.to(device)


def _take_up(plan: TrainingPlan, target: Target, name: str, dtype: torch.dtype) -> Eagle3Student:
    """The head of `--init-from`, with its draft vocabulary. Its feature layers are not trained."""
    assert plan.init_from is not None
    head = open_head(plan.init_from, target, torch.device("cpu"), torch.float32)
    checkpoint = Checkpoint.open(plan.init_from)
    config = checkpoint.config
    layer_config = config.get("transformer_layer_config") or {}
    rope = layer_config.get("rope_parameters") or layer_config.get("rope_scaling") or {}
    others = [name for name in NOT_TRAINED if config.get(name)]
    if rope.get("rope_type", "default") != "default":
        others.append("rope_type")
    if head.spec.form != "eagle3" or not layer_config or others:
        raise ConfigError(
            f"--init-from {plan.init_from} is no eagle3 head in the speculators layout"
            + (f" without {', '.join(others)}" if others else "")
        )
    counts = checkpoint.mapped("t2d", (target.vocab_size,)).long()
    vocabulary = DraftVocabulary(counts, int(counts.sum()), target, dtype)
    student = Eagle3Student(layer_config, vocabulary, head.reduction.taps, _verifier(target, name))
    different = student.tensors().keys() ^ (checkpoint.tensor_names - {"embed_tokens.weight"})
    if different:
        raise ConfigError(f"--init-from {plan.init_from} is of another shape: {', '.join(sorted(different))}")
    for key, parameter in student.named_parameters():
        parameter.data.copy_(checkpoint.mapped(key))
    student.fc.requires_grad_(requires_grad=False)
    return student


def _verifier(target: Target, name: str) -> dict[str, object]:
    """As the speculators layout names the target."""
    return {"name_or_path": name, "architectures": list(target.config.get("architectures") or [])}
