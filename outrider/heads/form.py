"""What a form of heads says of itself: how to know it, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.features import FeatureReduction
from outrider.heads.base import HeadModel
from outrider.heads.checkpoint import Checkpoint, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """One entry of `FORMS`. Its functions raise ConfigError for what is not supported, ModelError for damaged files."""

    name: str
    is_form_of: Callable[[Mapping[str, Any]], bool]  # by config.json
    reduction: Callable[[Checkpoint, Target], FeatureReduction]
    open: Callable[[Checkpoint, Target, torch.device, torch.dtype], HeadModel]
