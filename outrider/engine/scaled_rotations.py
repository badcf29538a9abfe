"""Frequencies of rotary position embeddings, by the parameters in a config.json. Torch-free.

The scaled kinds are "linear", "llama3" (Llama 3.1), "yarn" (Peng et al. 2023, arXiv 2309.00071) and "longrope" (Ding et
al. 2024, arXiv 2402.13753). They change the frequencies of `rotation.inverse_frequencies` as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.engine.rotation import Floats, inverse_frequencies
from outrider.errors import ModelError

_WITH_ORIGINAL_WINDOW = ("llama3", "yarn", "longrope")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of some layers."""

    frequencies: Floats  # [rotated dimensions / 2], radians per position
    scale: float = 1.0  # multiplies cosines and sines
    layer_type: str = ""  # the layers that it is for, as config.json names them; "" for all


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `rope_parameters` of config.json as transformers 5 writes them, also for files of older versions.

    Layers of different types may have different parameters, which are then by layer type.
    """
    stated = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    by_type = {layers: dict(each) for layers, each in stated.items() if isinstance(each, Mapping)}
    if not by_type and "rope_local_base_freq" in config:  # layers with a window are not scaled
        by_type = {"full_attention": stated, "sliding_attention": {}}
    for layers, each in (by_type or {"": stated}).items():
        kind = each.get("rope_type") or each.pop("type", None) or "default"
        each["rope_type"] = kind
        local = config.get("rope_local_base_freq") if layers == "sliding_attention" else None
        each.setdefault("rope_theta", local or config.get("rope_theta") or _DEFAULT_THETA)
        if (factor := config.get("partial_rotary_factor")) is not None:
            each.setdefault("partial_rotary_factor", factor)
        if kind in _WITH_ORIGINAL_WINDOW:
            own = config.get("original_max_position_embeddings")
            if own is not None and not by_type:
                each["original_max_position_embeddings"] = own
            each.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return by_type or stated


def make_rotation(parameters: Mapping[str, Any], head_dim: int, window: int, layer_type: str = "") -> Rotation:
    """Returns the rotation with these parameters, which are one of those that `rope_parameters` returns.

    `window`: max_position_embeddings. Rotations that depend on a text's length are those within the original window.

    Raises: ModelError if the kind is not supported, or if the parameters are incomplete.
    """
    kind = parameters["rope_type"]
    num_dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    make = _KINDS.get(kind)
    if make is None or num_dims % 2:
        raise ModelError(f"rotations of {num_dims} dimensions of the kind {kind!r} are not supported")
    try:
        frequencies, scale = make(inverse_frequencies(parameters["rope_theta"], num_dims), parameters, window)
    except KeyError as error:
        raise ModelError(f"the model's configuration has no {error} for its {kind} rotation") from error
    return Rotation(frequencies.astype(np.float32), scale, layer_type)


def _plain(plain: Floats, _parameters: Mapping[str, Any], _window: int) -> tuple[Floats, float]:
    return plain, 1.0


def _linear(plain: Floats, parameters: Mapping[str, Any], _window: int) -> tuple[Floats, float]:
    return plain / np.float32(parameters["factor"]), 1.0


def _llama3(plain: Floats, parameters: Mapping[str, Any], _window: int) -> tuple[Floats, float]:
    """Divides low frequencies by the factor, and blends in between."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = parameters["original_max_position_embeddings"] / (np.float32(2 * math.pi) / plain)
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    return np.where(turns < low, plain / factor, np.where(turns > high, plain, blended)), 1.0


def _yarn(plain: Floats, parameters: Mapping[str, Any], window: int) -> tuple[Floats, float]:
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or window / original
    num_dims, theta = 2 * len(plain), parameters["rope_theta"]

    def dim_of(turns: float) -> float:
        """Returns the dimension that makes so many turns within the original window."""
        return num_dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, num_dims - 1)
    ramp: Floats = np.clip((np.arange(len(plain), dtype=np.float32) - first) / ((last - first) or 0.001), 0, 1)
    scale = parameters.get("attention_factor")
    if scale is None:
        of_heads, of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        is_ratio = of_heads and of_all
        scale = _yarn_scale(factor, of_heads) / _yarn_scale(factor, of_all) if is_ratio else _yarn_scale(factor, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _yarn_scale(factor: float, slope: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def _longrope(plain: Floats, parameters: Mapping[str, Any], window: int) -> tuple[Floats, float]:
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or window / original
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors: Floats = np.asarray(parameters["short_factor"], dtype=np.float32)
    return plain / factors, float(scale)


_KINDS = {
    "default": _plain,
    "dynamic": _plain,  # within the original window
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
