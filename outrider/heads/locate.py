"""From the setting `model.head` to a head's folder, and to what nodes compute for it. Torch-free without a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.locate import locate_model
from outrider.model_hub.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.features import FeatureReduction

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


def reduction_of(config: ModelConfig, *, progress: Progress = no_progress) -> FeatureReduction | None:
    """Of the head that `model.head` names; None without one. Raises: as `open.open_head` and `locate_model`."""
    folder = head_folder(config)
    if folder is None:
        return None
    from outrider.heads.checkpoint import Target
    from outrider.heads.open import read_reduction

    return read_reduction(folder, Target.open(locate_model(config, progress=progress).directory))
