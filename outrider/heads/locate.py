"""Finds the folder of the head that the setting `model.head` names. Torch-free."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig

AUTO_HEAD = "auto"
DEFAULT_HEAD = Path(__file__).with_name("smollm2-135m-eagle3")
"""The folder of the default model's head, which `outrider train-head` made. The folder's report.md tells how."""


def head_folder(config: ModelConfig) -> Path | None:
    """Returns the head's folder, or None if the model has no head. Raises: ConfigError if the folder does not exist."""
    if config.head == AUTO_HEAD:
        return DEFAULT_HEAD if config.id == DEFAULT_MODEL_ID else None
    if not config.head:
        return None
    folder = Path(config.head).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.head is {config.head!r}: there is no such folder")
    return folder
