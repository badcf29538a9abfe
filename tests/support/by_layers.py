"""Loads models that native layers compute, instead of the native decoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.model_hub import load as load_module
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.loaded_model import LoadedModel


def load_by_layers(directory: Path, dtype: str = "auto") -> LoadedModel:
    """Loads a model whose whole the native decoder could compute. Its logits are compared with the model's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "why_not_native", lambda *_arguments: "this test wants layers")
        model = load_module.load_model(ModelConfig(id=str(directory), dtype=dtype))
    assert isinstance(model.native, NativeLayers)
    return model
