"""What the quantised formats have in common: modules with several parts, packed integers, factors of groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors
from outrider.engine.kv_cache.array_plane import Words
from outrider.errors import ModelError
from outrider.model_hub.safetensors_files import SafetensorsFiles

ADVICE = "serve the checkpoint that it was made from, with model.weights=int8 for half the memory"
_MIN_GROUP, _MAX_GROUP = 16, 128
"""Numbers of inputs of a group in GroupedWeight. A larger group is divided; its parts have equal factors."""

Codes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a format stores the weight of a quantised module, such as "model.layers.3.mlp.up_proj", in several tensors.

    A module with none of the markers is plain, whatever the configuration says.
    """

    markers: frozenset[str]  # last parts of tensors' names that only quantised modules have
    parts: frozenset[str]  # the parts that together are the weight; others, such as "bias", are plain tensors
    read: Callable[[SafetensorsFiles, str], Words | GroupedWeight]  # reads the weight of the module with this name
    bits: int = 0  # of an integer weight, 4 or 8; 0: weights are floating-point numbers


def unpack(words: npt.NDArray[Any], bits: int) -> Codes:
    """Unpacks unsigned integers of 4 or 8 bits, the lowest bits first, and subtracts the middle of their range.

    int32 [n, k] -> [n, k · 32 / bits].
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return (octets ^ 128).view(np.int8)
    codes = np.empty((len(octets), 2 * octets.shape[1]), np.int8)
    codes[:, 0::2] = octets & 15
    codes[:, 1::2] = octets >> 4
    return np.subtract(codes, 8, out=codes)


def exact_float16(files: SafetensorsFiles, name: str) -> npt.NDArray[np.float16]:
    """Returns scales in float16, the type of factors in the kernels. Raises: ModelError if any would be rounded."""
    values = files.floats(name)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if (differs := halves.astype(np.float32) != values).any():
        raise ModelError(
            f"{files.directory}: {name} has scales that float16 cannot represent, such as {values[differs][0]:.9g}: "
            + ADVICE
        )
    return halves


def grouped_weight(codes: Codes, scales: npt.NDArray[np.float16], zeros: Codes | None, *, bits: int) -> GroupedWeight:
    """Returns W = scale · (code - zero), exactly.

    Args:
        codes: [out_features, in_features], from -2^(bits - 1).
        scales: [out_features, num_groups].
        zeros: [out_features, num_groups], or None if all are 0.
        bits: 4 or 8.

    Raises: ValueError if the shapes do not fit, or groups have a size that the kernels do not support.
    """
    num_inputs, rest = divmod(codes.shape[1], scales.shape[1])  # of a group
    group_size = math.gcd(num_inputs, _MAX_GROUP)
    if rest or group_size < _MIN_GROUP:
        raise ValueError(
            f"{codes.shape[1]} inputs in {scales.shape[1]} groups; groups of {_MIN_GROUP} inputs or a "
            "multiple are supported"
        )
    if len(scales) != len(codes) or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(f"{codes.shape} codes, {scales.shape} scales, {None if zeros is None else zeros.shape} zeros")
    units, minima = np.ascontiguousarray(scales), None
    if zeros is not None and zeros.any():
        middle = np.int8(8 if bits == 4 else 0)  # 4-bit codes with minima are 0 to 15
        codes, zeros = codes + middle, zeros + middle
        minima = GroupFactors(units, np.repeat(zeros, num_inputs // group_size, axis=1))
    return GroupedWeight(np.ascontiguousarray(codes), group_size, GroupFactors(units), minima)


def check_order(files: SafetensorsFiles, name: str, num_groups: int) -> None:
    """Raises ModelError if the groups that the tensor gives for the inputs are not groups of consecutive inputs."""
    if name in files:
        groups = files[name]
        if not np.array_equal(groups, np.arange(len(groups)) * num_groups // len(groups)):
            raise ModelError(
                f"{files.directory}: {name} orders inputs by activation (desc_act, actorder), which is not "
                f"supported: {ADVICE}, or a version of it with desc_act false"
            )
