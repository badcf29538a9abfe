"""From the setting `model.head` to a head's folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig

AUTO_HEAD = "auto"
DEFAULT_HEAD = Path(__file__).with_name("smollm2-135m-eagle3")
"""Of the default model, made by `outrider train-head`: how is in the folder's report.md."""


def head_folder(config: ModelConfig) -> Path | None:
    """The folder of the head that features are computed for; None: of none. Raises: ConfigError for a missing one."""
    if config.head == AUTO_HEAD:
        return DEFAULT_HEAD if config.id == DEFAULT_MODEL_ID else None
    if not config.head:
        return None
    folder = Path(config.head).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.head is {config.head!r}: there is no such folder")
    return folder
