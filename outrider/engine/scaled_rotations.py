"""Rotary position embeddings, by the parameters in a config.json. Torch-free.

The scaled kinds are "dynamic", "linear", "llama3" (Llama 3.1), "yarn" (Peng et al. 2023, arXiv 2309.00071) and
"longrope" (Ding et al. 2024, arXiv 2402.13753). Their frequencies are computed by transformers when a model is loaded
(`layerwise_reference.own_rotations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.engine.rotation import Floats, inverse_frequencies
from outrider.errors import ModelError

_KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of some layers."""

    frequencies: Floats  # [rotated dimensions / 2], radians per position; not scaled yet if `is_scaled`
    scale: float = 1.0  # multiplies cosines and sines
    layer_type: str = ""  # the layers that it is for, as config.json names them; "" for all
    is_scaled: bool = False  # whether transformers must still scale the frequencies


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `rope_parameters` of config.json as transformers 5 writes them, also for files of older versions.

    Layers of different types may have different parameters, which are then by layer type. Defaults of scaled kinds may
    be absent.
    """
    stated = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    by_type = {layers: dict(each) for layers, each in stated.items() if isinstance(each, Mapping)}
    if not by_type and "rope_local_base_freq" in config:  # layers with a window are not scaled
        by_type = {"full_attention": stated, "sliding_attention": {}}
    for layers, each in (by_type or {"": stated}).items():
        each["rope_type"] = each.get("rope_type") or each.pop("type", None) or "default"
        local = config.get("rope_local_base_freq") if layers == "sliding_attention" else None
        each.setdefault("rope_theta", local or config.get("rope_theta") or _DEFAULT_THETA)
        if (factor := config.get("partial_rotary_factor")) is not None:
            each.setdefault("partial_rotary_factor", factor)
    return by_type or stated


def make_rotation(parameters: Mapping[str, Any], head_dim: int, layer_type: str = "") -> Rotation:
    """Returns the rotation with these parameters, which are one of those that `rope_parameters` returns.

    Raises: ModelError if the kind is not supported.
    """
    kind = parameters["rope_type"]
    num_dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if kind not in _KINDS or num_dims % 2:
        raise ModelError(f"rotations of {num_dims} dimensions of the kind {kind!r} are not supported")
    plain = inverse_frequencies(parameters["rope_theta"], num_dims)
    return Rotation(plain, layer_type=layer_type, is_scaled=kind != "default")
