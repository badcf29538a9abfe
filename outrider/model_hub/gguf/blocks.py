"""The quantised blocks of GGUF files, decoded to grouped weights without loss. Torch-free.

Each row of a matrix is a sequence of blocks, which ggml's `ggml-common.h` defines. A block of the K formats and of
IQ4_XS has 256 weights in groups with small integer factors of their own; other blocks are one group of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight, GroupFactors

Blocks: TypeAlias = "npt.NDArray[Any]"
"""A matrix's blocks as a structured array: [out_features, blocks of one row]."""

_IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""ggml's `kvalues_iq4nl`: the values of IQ4's 4-bit codes."""
_HALF = "<f2"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One quantised type."""

    name: str  # ggml's
    block_size: int  # weights of one block
    block: np.dtype[Any]  # the block's fields; its item size is the block's bytes
    decode: Callable[[Blocks], GroupedWeight]


def decode_rows(rows: npt.NDArray[np.uint8], quantisation: BlockFormat) -> GroupedWeight:
    """Decodes a matrix: [out_features, bytes of one row] uint8, contiguous."""
    return quantisation.decode(rows.view(quantisation.block))


def _unpack(packed: npt.NDArray[np.uint8], bits: int, width: int) -> npt.NDArray[np.int8]:
    """Unpacks integers of few bits: [..., n bytes] -> [..., n * 8 / bits].

    Each `width` bytes hold 8 / bits runs of `width` integers, of which the first is in the lowest bits.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(*packed.shape[:-1], -1, 1, width) >> shifts
    return (runs & ((1 << bits) - 1)).astype(np.int8).reshape(*packed.shape[:-1], -1)


def _weight(
    codes: npt.NDArray[np.int8], group_size: int, scales: GroupFactors, minima: GroupFactors | None = None
) -> GroupedWeight:
    """Makes the weight from codes [out_features, blocks of one row, weights of one block]."""
    return GroupedWeight(codes.reshape(len(codes), -1), group_size, scales, minima)


def _factors(units: npt.NDArray[np.float16], steps: npt.NDArray[np.int8] | None = None) -> GroupFactors:
    """`steps`: [out_features, blocks of one row, groups of one block]."""
    return GroupFactors(np.ascontiguousarray(units), None if steps is None else steps.reshape(len(steps), -1))


def _fifth_bits(blocks: Blocks) -> npt.NDArray[np.int8]:
    return np.unpackbits(blocks["high"], axis=-1, bitorder="little").astype(np.int8) << 4


def _q4_0(blocks: Blocks) -> GroupedWeight:
    return _weight(_unpack(blocks["low"], 4, 16) - 8, 32, _factors(blocks["d"]))


def _q4_1(blocks: Blocks) -> GroupedWeight:
    return _weight(_unpack(blocks["low"], 4, 16), 32, _factors(blocks["d"]), _factors(-blocks["m"]))


def _q5_0(blocks: Blocks) -> GroupedWeight:
    return _weight((_unpack(blocks["low"], 4, 16) | _fifth_bits(blocks)) - 16, 32, _factors(blocks["d"]))


def _q5_1(blocks: Blocks) -> GroupedWeight:
    codes = _unpack(blocks["low"], 4, 16) | _fifth_bits(blocks)
    return _weight(codes, 32, _factors(blocks["d"]), _factors(-blocks["m"]))


def _q8_0(blocks: Blocks) -> GroupedWeight:
    return _weight(blocks["codes"], 32, _factors(blocks["d"]))


def _q2_k(blocks: Blocks) -> GroupedWeight:
    steps = blocks["steps"]
    scales, minima = (steps & 15).astype(np.int8), (steps >> 4).astype(np.int8)
    codes = _unpack(blocks["low"], 2, 32)
    return _weight(codes, 16, _factors(blocks["d"], scales), _factors(blocks["m"], minima))


def _q3_k(blocks: Blocks) -> GroupedWeight:
    codes = (_unpack(blocks["low"], 2, 32) | _unpack(blocks["high"], 1, 32) << 2) - 4
    steps = (_unpack(blocks["steps"][..., :8], 4, 8) | _unpack(blocks["steps"][..., 8:], 2, 4) << 4) - 32
    return _weight(codes, 16, _factors(blocks["d"], steps))


def _q4_k(blocks: Blocks) -> GroupedWeight:
    return _weight(_unpack(blocks["low"], 4, 32), 32, *_two_factors(blocks))


def _q5_k(blocks: Blocks) -> GroupedWeight:
    return _weight(_unpack(blocks["low"], 4, 32) | _unpack(blocks["high"], 1, 32) << 4, 32, *_two_factors(blocks))


def _two_factors(blocks: Blocks) -> tuple[GroupFactors, GroupFactors]:
    """Returns (scales, minima) of Q4_K and Q5_K.

    Of 12 bytes, four have the scales and four the minima of groups 0 to 3 in their lower 6 bits. Their upper 2 bits
    belong to groups 4 to 7, whose lower 4 bits are in the last four bytes.
    """
    packed = blocks["steps"].reshape(*blocks.shape, 3, 4)
    first, last = packed[..., :2, :] & 63, packed[..., 2, :]
    upper = packed[..., :2, :] >> 6 << 4
    scales = np.concatenate((first[..., 0, :], last & 15 | upper[..., 0, :]), axis=-1).astype(np.int8)
    minima = np.concatenate((first[..., 1, :], last >> 4 | upper[..., 1, :]), axis=-1).astype(np.int8)
    return _factors(blocks["d"], scales), _factors(blocks["m"], minima)


def _q6_k(blocks: Blocks) -> GroupedWeight:
    codes = (_unpack(blocks["low"], 4, 64) | _unpack(blocks["high"], 2, 32) << 4) - 32
    return _weight(codes, 16, _factors(blocks["d"], blocks["steps"]))


def _iq4_nl(blocks: Blocks) -> GroupedWeight:
    return _weight(_IQ4_VALUES[_unpack(blocks["low"], 4, 16)], 32, _factors(blocks["d"]))


def _iq4_xs(blocks: Blocks) -> GroupedWeight:
    steps = (_unpack(blocks["low_steps"], 4, 1) | _unpack(blocks["high_steps"], 2, 1) << 4) - 32
    return _weight(_IQ4_VALUES[_unpack(blocks["low"], 4, 16)], 32, _factors(blocks["d"], steps))


def _format(
    name: str, size: int, decode: Callable[[Blocks], GroupedWeight], *fields: tuple[str, str] | tuple[str, str, int]
) -> BlockFormat:
    """`fields`: (name, type, number of values) in the order of the block."""
    return BlockFormat(name, size, np.dtype(list(fields)), decode)


_D, _M = ("d", _HALF), ("m", _HALF)
FORMATS = {
    2: _format("Q4_0", 32, _q4_0, _D, ("low", "u1", 16)),
    3: _format("Q4_1", 32, _q4_1, _D, _M, ("low", "u1", 16)),
    6: _format("Q5_0", 32, _q5_0, _D, ("high", "u1", 4), ("low", "u1", 16)),
    7: _format("Q5_1", 32, _q5_1, _D, _M, ("high", "u1", 4), ("low", "u1", 16)),
    8: _format("Q8_0", 32, _q8_0, _D, ("codes", "i1", 32)),
    10: _format("Q2_K", 256, _q2_k, ("steps", "u1", 16), ("low", "u1", 64), _D, _M),
    11: _format("Q3_K", 256, _q3_k, ("high", "u1", 32), ("low", "u1", 64), ("steps", "u1", 12), _D),
    12: _format("Q4_K", 256, _q4_k, _D, _M, ("steps", "u1", 12), ("low", "u1", 128)),
    13: _format("Q5_K", 256, _q5_k, _D, _M, ("steps", "u1", 12), ("high", "u1", 32), ("low", "u1", 128)),
    14: _format("Q6_K", 256, _q6_k, ("low", "u1", 128), ("high", "u1", 64), ("steps", "i1", 16), _D),
    20: _format("IQ4_NL", 32, _iq4_nl, _D, ("low", "u1", 16)),
    23: _format("IQ4_XS", 256, _iq4_xs, _D, ("high_steps", "u1", 2), ("low_steps", "u1", 4), ("low", "u1", 128)),
}
"""Quantised types by GGUF's number."""
