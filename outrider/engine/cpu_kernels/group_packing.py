"""Quantised weights in the kernels' layout, which source/panels_quantised.h describes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.kv_cache.array_plane import Words
from outrider.errors import ModelError

PANEL = 16
"""Number of output features in a panel."""

_BLOCK = 64
_HEADER_BYTES = 64
_PANELS_AT_ONCE = 64
_MIDDLE = 8  # the zero point of codes in -8 to 7 if they are stored as 0 to 15

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the weights of one packed matrix are stored."""

    type: ElementType
    unit_size: int = 0  # number of inputs that share a unit (see GroupFactors) or a zero point; 0: there are none

    @property
    def bits(self) -> int:
        """Bits of one quantised weight, without its group's factors."""
        return 4 if "INT4" in self.type.name else 8

    @property
    def group_size(self) -> int:
        """Number of inputs with the same factors; 0: all inputs."""
        if self.type is ElementType.INT4_ZEROS:
            return self.unit_size
        return next((int(part) for part in self.type.name.split("_") if part.isdigit()), 0)

    @property
    def has_minima(self) -> bool:
        return self.type.name.endswith("_MINIMA")

    def panel_bytes(self, in_features: int) -> int:
        """Returns the size of a panel of a quantised matrix."""
        units = -(-in_features // self.unit_size) if self.unit_size else 0
        return -(-in_features // _BLOCK) * self._block_bytes + units * _HEADER_BYTES

    @property
    def _code_bytes(self) -> int:
        return _BLOCK * PANEL * self.bits // 8

    @property
    def _factor_bytes(self) -> int:
        """Size of a block's factors of one kind, scales or minima."""
        if self.type in (ElementType.INT8, ElementType.INT4_ZEROS):
            return 0
        return _BLOCK // self.group_size * PANEL * (1 if self.unit_size else 2)

    @property
    def _block_bytes(self) -> int:
        return self._code_bytes + -(-self._factor_bytes * (1 + self.has_minima) // 64) * 64

    def pack(self, weight: GroupedWeight, code_offset: int, to: Bytes) -> None:
        """Writes a weight, in the form that `in_one_format` returns, to `to`: [panels * panel_bytes], which is zeros.

        `code_offset`: what the instruction path adds to 8-bit codes.
        """
        panels = to.reshape(-1, self.panel_bytes(weight.shape[1]))
        for first in range(0, len(panels), _PANELS_AT_ONCE):
            some = panels[first : first + _PANELS_AT_ONCE]
            self._pack_some(weight, slice(first * PANEL, (first + len(some)) * PANEL), code_offset, some)

    def _pack_some(self, weight: GroupedWeight, rows: slice, code_offset: int, panels: Bytes) -> None:
        num_units = weight.shape[1] // self.unit_size if self.unit_size else 1
        units = panels.reshape(len(panels), num_units, -1)
        blocks = units[:, :, _HEADER_BYTES * bool(self.unit_size) :].reshape(
            len(panels), num_units, -1, self._block_bytes
        )

        def by_panel(values: Array, per_block: int, num_blocks: int = blocks.shape[2]) -> Array:
            """Pads rows and columns, and returns [panels, units, blocks, per_block * PANEL]."""
            padded = np.zeros((len(panels) * PANEL, num_units * num_blocks * per_block), values.dtype)
            padded[: len(values[rows]), : values.shape[1]] = values[rows]
            split = padded.reshape(len(panels), PANEL, num_units, num_blocks, per_block)
            return np.ascontiguousarray(split.transpose(0, 2, 3, 4, 1)).reshape(*split.shape[:1], *split.shape[2:4], -1)

        def write(place: int, values: Array, to: Bytes = blocks) -> None:
            to[..., place : place + values.shape[-1] * values.itemsize] = values.view(np.uint8)

        codes = weight.codes
        if codes.shape[1] % 4:
            codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
        quads = by_panel(np.ascontiguousarray(codes).view(np.uint32), _BLOCK // 4)
        if self.bits == 8:
            write(0, quads ^ np.uint32(code_offset * 0x01010101))
        else:
            if self.type is ElementType.INT4_GROUPS_32:
                quads = (quads ^ np.uint32(_MIDDLE * 0x01010101)) & np.uint32(0x0F0F0F0F)
            pairs = quads.reshape(*quads.shape[:3], -1, 2, PANEL)
            write(0, (pairs[..., 0, :] | pairs[..., 1, :] << np.uint32(4)).reshape(*quads.shape[:3], -1))
        if self.type is ElementType.INT8:
            return
        places = {0: weight.scales}
        if weight.minima is not None:
            places[1] = weight.minima
        for index, factors in places.items():
            if self.unit_size:
                steps = index and self.type is ElementType.INT4_ZEROS
                values = factors.steps if steps else factors.units
                assert values is not None
                write(32 * index, by_panel(values, 1, 1), units[:, :, None, :_HEADER_BYTES])
            if self._factor_bytes:
                values = factors.steps if self.unit_size else factors.units
                assert values is not None
                write(self._code_bytes + index * self._factor_bytes, by_panel(values, _BLOCK // self.group_size))


def in_one_format(weights: Sequence[GroupedWeight]) -> tuple[PackedFormat, list[GroupedWeight]]:
    """Rewrites weights without loss, so that one matrix can have all of them. Returns the format and the weights.

    Raises: ModelError if no format of the kernels has room for all of them.
    """
    if all(map(_may_have_zeros, weights)):
        size = min(weight.group_size for weight in weights)
        return PackedFormat(ElementType.INT4_ZEROS, size), [_regrouped(_with_zeros(each), size) for each in weights]
    weights = [_without_zeros(weight) for weight in weights]
    size = min(32, *(weight.group_size for weight in weights))
    weights = [_regrouped(weight, size) for weight in weights]
    unit_size = 0
    if any(factors.steps is not None for factors in _factors(weights)):
        unit_size = min(weights[0].shape[1] // factors.units.shape[1] for factors in _factors(weights))
        if unit_size % _BLOCK:
            raise _unsupported(weights, f"units of {unit_size} inputs")
        weights = [_with_units(weight, unit_size) for weight in weights]
    has_minima = any(weight.minima is not None for weight in weights)
    if has_minima:
        weights = [_with_minima(weight) for weight in weights]
    bits = 4 if size == 32 and all(_fit_in_4_bits(weight) for weight in weights) else 8
    name = f"INT{bits}_GROUPS_{size}" + "_MINIMA" * has_minima
    if name not in ElementType.__members__:
        raise _unsupported(weights, "minima")
    return PackedFormat(ElementType[name], unit_size), weights


def have_one_format(weights: Sequence[Words | GroupedWeight]) -> bool:
    """Returns whether the weights have the same format, so that one matrix can have all of them unchanged."""
    formats = {in_one_format([each])[0] if isinstance(each, GroupedWeight) else each.dtype for each in weights}
    return len(formats) == 1


def _unsupported(weights: Sequence[GroupedWeight], what: str) -> ModelError:
    sizes = sorted({weight.group_size for weight in weights})
    return ModelError(
        f"the native kernels have no format for quantised weights in groups of {', '.join(map(str, sizes))} with {what}"
        ": set model.weights to dequantized"
    )


def _factors(weights: Sequence[GroupedWeight]) -> list[GroupFactors]:
    return [factors for weight in weights for factors in (weight.scales, weight.minima) if factors is not None]


def _fit_in_4_bits(weight: GroupedWeight) -> bool:
    lowest = 0 if weight.minima is not None else -_MIDDLE
    return bool(weight.codes.min() >= lowest and weight.codes.max() < lowest + 16)


def _zeros(weight: GroupedWeight) -> npt.NDArray[np.int8] | None:
    """Returns the zero points [out_features, groups] if minima are the scales times small integers."""
    scales, minima = weight.scales, weight.minima
    if minima is None or scales.steps is not None or not np.array_equal(minima.units, scales.units):
        return None
    return minima.steps


def _may_have_zeros(weight: GroupedWeight) -> bool:
    """Returns whether INT4_ZEROS can store the weight."""
    is_plain = weight.minima is None and weight.scales.steps is None
    return weight.group_size % _BLOCK == 0 and _fit_in_4_bits(weight) and (is_plain or _zeros(weight) is not None)


def _with_zeros(weight: GroupedWeight) -> GroupedWeight:
    if weight.minima is not None:
        return weight
    zeros = np.full((weight.shape[0], weight.num_groups), _MIDDLE, np.int8)
    return replace(weight, codes=weight.codes + np.int8(_MIDDLE), minima=GroupFactors(weight.scales.units, zeros))


def _without_zeros(weight: GroupedWeight) -> GroupedWeight:
    """Subtracts zero points from the codes, if the weight has any and the results fit into 8 bits."""
    if (zeros := _zeros(weight)) is None:
        return weight
    codes = weight.codes - np.repeat(zeros, weight.group_size, axis=1).astype(np.int16)
    fits = codes.min() >= -128 and codes.max() <= 127
    return replace(weight, codes=codes.astype(np.int8), minima=None) if fits else weight


def _regrouped(weight: GroupedWeight, size: int) -> GroupedWeight:
    """Repeats the groups' factors so that groups have `size` inputs."""
    num_groups = weight.shape[1] // size

    def repeated(factors: GroupFactors) -> GroupFactors:
        if factors.steps is None:
            return GroupFactors(_repeated(factors.units, num_groups))
        return GroupFactors(factors.units, _repeated(factors.steps, num_groups))

    minima = None if weight.minima is None else repeated(weight.minima)
    return GroupedWeight(weight.codes, size, repeated(weight.scales), minima)


def _with_units(weight: GroupedWeight, size: int) -> GroupedWeight:
    """Makes all factors steps of units that have `size` inputs."""

    def with_steps(factors: GroupFactors) -> GroupFactors:
        steps = np.ones((weight.shape[0], weight.num_groups), np.int8) if factors.steps is None else factors.steps
        return GroupFactors(_repeated(factors.units, weight.shape[1] // size), steps)

    minima = None if weight.minima is None else with_steps(weight.minima)
    return replace(weight, scales=with_steps(weight.scales), minima=minima)


def _with_minima(weight: GroupedWeight) -> GroupedWeight:
    if weight.minima is not None:
        return weight
    steps = weight.scales.steps
    return replace(weight, minima=GroupFactors(np.zeros_like(weight.scales.units), steps))


def _repeated(values: npt.NDArray[Any], num: int) -> npt.NDArray[Any]:
    """Repeats columns, so that there are `num`."""
    return np.repeat(values, num // values.shape[1], axis=1)
