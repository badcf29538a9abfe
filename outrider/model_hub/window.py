"""How many tokens a model's positions allow, by its configuration. Torch-free.

Some rotations depend on the length of the longest sequence in a batch ("longrope", "dynamic"): beyond the original
window all angles change, also those of keys that are in the cache. Such a model is served with one choice for all
sequences, by `model.max_model_len`: as it is within the original window, or as it is beyond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PretrainedConfig

MAX_WINDOW = 1 << 20
"""Positions beyond cannot be rotated exactly (outrider.engine.rotation.MAX_ANGLE)."""
_ENDLESS = 1 << 62
"""Tokens: what a factor without measure makes of a window."""


@dataclass(frozen=True, slots=True)
class Window:
    """What is served of a model's positions."""

    max_model_len: int  # tokens of a sequence
    is_extended: bool = False  # beyond the original window of rotations that depend on the length


def resolve_window(config: PretrainedConfig | SimpleNamespace, wanted: int = 0) -> Window:
    """Of a decoder with this (text) configuration. `wanted`: model.max_model_len, 0 for the model's own.

    As vLLM: the window that a configuration states, times the factor of a "linear" rotation, or the original one times
    the factor of a "yarn" rotation. By default the original one where rotations depend on the length, and never more
    than MAX_WINDOW. Raises ConfigError for a window that the model does not have, ModelError for numbers that are none.
    """
    stated = int(_positive(getattr(config, "max_position_embeddings", None), "max_position_embeddings"))
    limits = [_limits(rotation, stated, layers) for layers, rotation in _rotations(config)]
    own = min((own for own, _ in limits if own), default=stated)
    most = min((most for _, most in limits if most), default=stated)
    if not own and not wanted:
        raise ConfigError("the model does not state its window: set model.max_model_len")
    allowed = min(most or MAX_WINDOW, MAX_WINDOW)
    if wanted > allowed:
        what = "the model's window" if most == allowed else "the longest window that is served"
        raise ConfigError(f"model.max_model_len {wanted} is beyond {what}: set at most {allowed}")
    max_model_len = wanted or min(own, MAX_WINDOW)
    return Window(max_model_len, is_extended=own < most and max_model_len > own)


def fix_rotations(config: PretrainedConfig) -> None:
    """Makes rotations that depend on the length those of the extended window, for all lengths; in place.

    Raises ModelError where the configuration does not say which those are.
    """
    for _, rotation in _rotations(config):
        if _kind(rotation) == "longrope":
            if not rotation.get("long_factor"):
                raise ModelError("the model's configuration has no long_factor for its longrope rotation")
            rotation["short_factor"] = rotation["long_factor"]
            if "long_mscale" in rotation:
                rotation["short_mscale"] = rotation["long_mscale"]
        elif _kind(rotation) == "dynamic":
            factor = _positive(rotation.get("factor"), "factor", 1.0)
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            num_dims = int(head_dim * rotation.get("partial_rotary_factor", 1.0))
            # As transformers does for a sequence of factor times the original window.
            scale = (factor * factor - (factor - 1.0)) ** (num_dims / (num_dims - 2))
            rotation["rope_theta"] *= scale
            rotation["rope_type"] = "default"
            rotation.pop("factor", None)


def _rotations(config: PretrainedConfig | SimpleNamespace) -> list[tuple[str, dict[str, Any]]]:
    """(the type of its layers, its parameters) of each rotation; ("", …) of the only one of a model."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [(layers, rotation) for layers, rotation in parameters.items() if isinstance(rotation, dict)]
    return by_layer or [("", parameters)] * bool(parameters)


def _kind(rotation: Mapping[str, Any]) -> str:
    return str(rotation.get("rope_type") or rotation.get("type") or "default")


def _limits(rotation: Mapping[str, Any], stated: int, layers: str) -> tuple[int, int]:
    """(the window by default, the largest) of one rotation; 0: it sets no bound, as where layers see a few tokens."""
    kind = _kind(rotation)
    factor = max(_positive(rotation.get("factor"), "factor", 1.0), 1.0)
    original = _positive(rotation.get("original_max_position_embeddings"), "original_max_position_embeddings", stated)
    extended = max(stated, int(min(original * factor, _ENDLESS)))
    extended_stated = int(min(stated * factor, _ENDLESS))
    if kind == "yarn":
        return extended, extended
    if kind == "longrope":
        return int(original), extended
    if kind == "dynamic":
        return stated, extended_stated
    if kind == "linear" and not layers:  # where layers differ, as in Gemma 3, the window is stated with it
        return extended_stated, extended_stated
    return (0, 0) if "sliding" in layers else (stated, stated)


def _positive(value: Any, name: str, default: float = 0.0) -> float:
    """Raises: ModelError."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"the model's configuration has {name} {value!r}, which is not a positive number")
    return value
