"""The maximum sequence length that a model's configuration allows for its position encoding. Torch-free.

Some rotations depend on the length of the longest sequence in a batch ("longrope", "dynamic"): beyond the original
window all angles change, including those of keys in the cache. Such a model is served with the same rotations
for all sequences, either those within the original window or those beyond it, depending on `model.max_model_len`.
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
"""Longest window in tokens. Later positions cannot be rotated exactly (outrider.engine.rotation.MAX_ANGLE)."""
_MAX_PRODUCT = 1 << 62
"""Maximum product of a window and a configured factor, in tokens; limits excessive factors."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window that is served."""

    max_model_len: int  # maximum number of tokens of a sequence
    is_extended: bool = False  # whether max_model_len exceeds the original window of length-dependent rotations


def resolve_window(config: PretrainedConfig | SimpleNamespace, wanted: int = 0) -> Window:
    """Returns the window of a decoder with this (text) configuration.

    `wanted`: model.max_model_len; 0 for the model's own window. The own window is the same as in vLLM. It is the window
    that the configuration states, multiplied by the factor of a "linear" rotation. With a "yarn" rotation, it is the
    original window multiplied by the factor. If rotations depend on the length, it is the original window. No window
    exceeds MAX_WINDOW.

    Raises: ConfigError if `wanted` is too long for the model, or if it is 0 and the configuration states no window;
    ModelError if the configuration's numbers are invalid.
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
    """Changes length-dependent rotations, in place, to those of the extended window, which then hold for all lengths.

    Raises: ModelError if the configuration does not define those of the extended window.
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
            # This is what transformers computes for a sequence that is `factor` times as long as the original window.
            scale = (factor * factor - (factor - 1.0)) ** (num_dims / (num_dims - 2))
            rotation["rope_theta"] *= scale
            rotation["rope_type"] = "default"
            rotation.pop("factor", None)


def _rotations(config: PretrainedConfig | SimpleNamespace) -> list[tuple[str, dict[str, Any]]]:
    """Returns (type of layers, parameters) of each rotation; the type is "" if the model has only one rotation."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [(layers, rotation) for layers, rotation in parameters.items() if isinstance(rotation, dict)]
    return by_layer or [("", parameters)] * bool(parameters)


def _kind(rotation: Mapping[str, Any]) -> str:
    return str(rotation.get("rope_type") or rotation.get("type") or "default")


def _limits(rotation: Mapping[str, Any], stated: int, layers: str) -> tuple[int, int]:
    """Returns (default window, largest window) of a rotation; 0 means no limit, e.g. if layers attend to few tokens."""
    kind = _kind(rotation)
    factor = max(_positive(rotation.get("factor"), "factor", 1.0), 1.0)
    original = _positive(rotation.get("original_max_position_embeddings"), "original_max_position_embeddings", stated)
    extended = max(stated, int(min(original * factor, _MAX_PRODUCT)))
    extended_stated = int(min(stated * factor, _MAX_PRODUCT))
    if kind == "yarn":
        return extended, extended
    if kind == "longrope":
        return int(original), extended
    if kind == "dynamic":
        return stated, extended_stated
    if kind == "linear" and not layers:  # if layers differ, as in Gemma 3, the stated window includes the factor
        return extended_stated, extended_stated
    return (0, 0) if "sliding" in layers else (stated, stated)


def _positive(value: Any, name: str, default: float = 0.0) -> float:
    """Returns the number, or `default` for None. Raises: ModelError if it is not positive."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"the model's configuration has {name} {value!r}, which is not a positive number")
    return value
