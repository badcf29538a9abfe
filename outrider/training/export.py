"""Phase 4: the head's folder, as its form's publishers write it."""

from __future__ import annotations

import json

from safetensors.torch import save_file

from outrider.training.forms.base import Student
from outrider.training.plan import TrainingPlan, write_atomically


def export(plan: TrainingPlan, student: Student) -> None:
    """Writes model.safetensors, then config.json, whose change says that the folder is whole. Raises: OSError."""
    fresh = plan.out / ".model.new"
    save_file(student.tensors(), fresh, metadata={"format": "pt"})
    fresh.replace(plan.out / "model.safetensors")
    write_atomically(plan.out / "config.json", json.dumps(dict(student.config()), indent=2) + "\n")
