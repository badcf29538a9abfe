"""What a form of heads says of itself: how to know it, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.engine.features import FeatureReduction
from outrider.heads.base import HeadModel
from outrider.heads.head_files import HeadFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """One entry of `FORMS`. Its functions raise ConfigError for what is not supported, ModelError for damaged files."""

    name: str  # as `speculators_model_type` in the layout of speculators
    is_form_of: Callable[[Mapping[str, Any]], bool]  # by config.json in any other layout
    reduction: Callable[[HeadFiles], FeatureReduction]
    open: Callable[[HeadFiles, FeatureReduction], HeadModel]  # reads the rest; with `HeadFiles.spec` at the end
    suits_kernels: Callable[[HeadFiles], bool] = lambda _files: False  # whether it will have a `native_step`
