"""The operations of a decoder layer between its products and attention, in one launch each.

A program computes one row or a part of one, so a row has the same bits in any batch. Values are float32 internally.
They are rounded to the rows' dtype where transformers rounds them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 8
ACTIVATION_BLOCK = 1024
"""Number of values of a row that one program computes: 16 bytes per thread with a 16-bit dtype."""
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


class Norm(NamedTuple):
    """An RMS norm."""

    weight: Tensor  # [width], any floating dtype
    epsilon: float  # added to the mean square
    rounds_first: bool = True  # whether to round also before multiplying by the weight, as in Llama but not Gemma


@triton.jit
def _scaled(values, mean_square, weight, epsilon, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """Divides float32 values by their root mean square, multiplies by the weight and rounds to DTYPE."""
    values *= 1.0 / tl.sqrt_rn(mean_square + epsilon)
    if ROUNDS:
        values = values.to(DTYPE).to(tl.float32)
    return (values * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def normalise(
    residual,  # [num_rows, WIDTH]
    added,  # [num_rows, WIDTH]; used if HAS_ADDED
    total,  # [num_rows, WIDTH]; used if HAS_ADDED
    output,  # [num_rows, WIDTH]
    weight,  # [WIDTH]
    added_weight,  # [WIDTH]; used if HAS_ADDED_NORM
    epsilon,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # WIDTH rounded up to a power of two
    HAS_ADDED: tl.constexpr,
    HAS_ADDED_NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Adds to the residual stream, if there is an addend, and normalises the sum. Grid: rows."""
    places = tl.arange(0, PADDED)
    is_place = places < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + places
    dtype: tl.constexpr = output.dtype.element_ty
    values = tl.load(residual + at, mask=is_place, other=0.0).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + at, mask=is_place, other=0.0).to(tl.float32)
        if HAS_ADDED_NORM:
            own_weight = tl.load(added_weight + places, mask=is_place, other=0.0)
            more = _scaled(more, tl.sum(more * more, axis=0) / WIDTH, own_weight, epsilon, dtype, ROUNDS).to(tl.float32)
        rounded = (values + more).to(dtype)
        tl.store(total + at, rounded, mask=is_place)
        values = rounded.to(tl.float32)
    own_weight = tl.load(weight + places, mask=is_place, other=0.0)
    normed = _scaled(values, tl.sum(values * values, axis=0) / WIDTH, own_weight, epsilon, dtype, ROUNDS)
    tl.store(output + at, normed, mask=is_place)


def rms_norm(rows: Tensor, norm: Norm) -> Tensor:
    """Normalises rows [num_rows, width], contiguous."""
    return add_rms_norm(rows, None, norm)[1]


def add_rms_norm(
    residual: Tensor, added: Tensor | None, norm: Norm, added_norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Adds to the residual stream. Returns (the sum, the normalised sum). All are [num_rows, width], contiguous.

    `added`: the addend; None: nothing is added. `added_norm`: a norm that is first applied to the addend. Its weight is
    used with the constants of `norm`. None: no norm.
    """
    num_rows, width = residual.shape
    padded = triton.next_power_of_2(width)
    total = residual if added is None else torch.empty_like(residual)
    output = torch.empty_like(residual)
    if num_rows:
        with torch.cuda.device_of(residual):  # triton launches on the current device
            normalise[(num_rows,)](
                residual, residual if added is None else added, total, output,
                norm.weight, norm.weight if added_norm is None else added_norm.weight, norm.epsilon,
                WIDTH=width, PADDED=padded, HAS_ADDED=added is not None, HAS_ADDED_NORM=added_norm is not None,
                ROUNDS=norm.rounds_first, num_warps=norm_warps(padded), enable_fp_fusion=False,
            )  # fmt: skip
    return total, output


def norm_warps(padded_width: int) -> int:
    """Returns the number of warps with which a thread has 16 values: two loads of 16 bytes with a 16-bit dtype."""
    return min(max(padded_width // 512, 1), 16)


@triton.jit
def rotate(
    projected,  # [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]: queries, keys, values
    query,  # [num_rows, NUM_HEADS, 2 * HALF]
    key_cache,  # [num_slots, NUM_KV_HEADS, 2 * HALF]
    value_cache,  # same
    query_weight,  # [2 * HALF]; used if HAS_NORMS
    key_weight,  # same
    cosines,  # [num_positions, HALF]
    sines,  # same
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of head_dim
    PADDED: tl.constexpr,  # HALF rounded up to a power of two
    HEADS: tl.constexpr,  # number of heads per program: of queries, keys or values
    HAS_NORMS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Normalises, rotates and stores heads. Grid: rows, groups of heads."""
    HEAD: tl.constexpr = 2 * HALF
    NUM_TURNED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED)
    is_dim = (dims < HALF)[None, :]
    at = heads[:, None] * HEAD + dims[None, :]
    source = projected + row * ((NUM_TURNED + NUM_KV_HEADS) * HEAD) + at
    is_there = (heads < NUM_TURNED + NUM_KV_HEADS)[:, None] & is_dim
    first = tl.load(source, mask=is_there, other=0.0)
    second = tl.load(source + HALF, mask=is_there, other=0.0)
    dtype: tl.constexpr = first.dtype

    is_query = (heads < NUM_HEADS)[:, None]
    is_turned = (heads < NUM_TURNED)[:, None]
    first_half = first.to(tl.float32)
    second_half = second.to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first_half * first_half, axis=1) + tl.sum(second_half * second_half, axis=1)
        mean = (squares / HEAD)[:, None]
        weight = tl.where(is_query, query_weight, key_weight) + dims[None, :]
        first_weight = tl.load(weight, mask=is_dim & is_turned, other=0.0)
        second_weight = tl.load(weight + HALF, mask=is_dim & is_turned, other=0.0)
        first_half = _scaled(first_half, mean, first_weight, epsilon, dtype, ROUNDS).to(tl.float32)
        second_half = _scaled(second_half, mean, second_weight, epsilon, dtype, ROUNDS).to(tl.float32)
    angle = tl.load(positions + row) * HALF + dims
    cosine = tl.load(cosines + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    turned_first = (first_half * cosine).to(dtype).to(tl.float32) - (second_half * sine).to(dtype).to(tl.float32)
    turned_second = (second_half * cosine).to(dtype).to(tl.float32) + (first_half * sine).to(dtype).to(tl.float32)
    first = tl.where(is_turned, turned_first.to(dtype), first)
    second = tl.where(is_turned, turned_second.to(dtype), second)

    slot = tl.load(slots + row) * (NUM_KV_HEADS * HEAD)
    to_query = query + row * (NUM_HEADS * HEAD) + at
    to_key = key_cache + slot + (at - NUM_HEADS * HEAD)
    to_value = value_cache + slot + (at - NUM_TURNED * HEAD)
    target = tl.where(is_query, to_query, tl.where(is_turned, to_key, to_value))
    tl.store(target, first, mask=is_there)
    tl.store(target + HALF, second, mask=is_there)


def rotate_and_store(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Normalises queries and keys by head, if they have norms, and rotates them; stores keys and values in their slots.

    Each value in the first half of a head is rotated with its counterpart in the second half (Su et al. 2021, arXiv
    2104.09864, as in GPT-NeoX).

    Args:
        projected: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: queries, keys and values.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, of the same dtype; one layer's.
        value_cache: same.
        cosines: [num_positions, head_dim / 2], contiguous, any floating dtype.
        sines: same.
        positions: [num_rows] int64, below num_positions.
        slots: [num_rows] int64. If rows share a slot, any of them may remain.
        norms: for the heads of queries and of keys, equal except for their weights; None: no norms.

    Returns rotated queries [num_rows, num_heads, head_dim].
    """
    num_rows, num_kv_heads, head_dim = len(projected), *key_cache.shape[2:]
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    query = projected.new_empty((num_rows, num_heads, head_dim))
    of_queries, of_keys = norms or 2 * (Norm(cosines, 0.0),)
    padded = triton.next_power_of_2(head_dim // 2)
    groups = -(-(num_heads + 2 * num_kv_heads) // HEADS_PER_PROGRAM)
    if num_rows:
        with torch.cuda.device_of(projected):
            rotate[num_rows, groups](
                projected, query, key_cache, value_cache, of_queries.weight, of_keys.weight, cosines, sines,
                positions, slots, of_queries.epsilon,
                NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, PADDED=padded,
                HEADS=HEADS_PER_PROGRAM, HAS_NORMS=norms is not None, ROUNDS=of_queries.rounds_first,
                num_warps=rotation_warps(padded), enable_fp_fusion=False,
            )  # fmt: skip
    return query


def rotation_warps(padded_half: int) -> int:
    """Returns the number of warps with which a thread has four values of each half: 8 bytes with a 16-bit dtype."""
    return min(max(HEADS_PER_PROGRAM * padded_half // 128, 1), 8)


@triton.jit
def multiply_gates(
    gate_up,  # [num_rows, 2 * WIDTH]
    output,  # [num_rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Applies the activation to gates and multiplies the results by the other half. Grid: rows, blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + places, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + places, mask=is_place, other=0.0).to(tl.float32)
    exponent = gate
    if IS_GELU:
        # (1 + tanh(x)) / 2 is the logistic function of 2x.
        exponent = _SQRT_8_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    dtype: tl.constexpr = output.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    tl.store(output + row * WIDTH + places, (activated * up).to(dtype), mask=is_place)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Applies the activation to gates and multiplies the results by the other half of each row.

    [num_rows, 2 * width], contiguous, gates first → [num_rows, width].

    `activation`: as returned by `activation_of`.
    """
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty((num_rows, width))
    if num_rows:
        with torch.cuda.device_of(gate_up):
            multiply_gates[num_rows, -(-width // ACTIVATION_BLOCK)](
                gate_up, output, WIDTH=width, BLOCK=ACTIVATION_BLOCK,
                IS_GELU=activation != "silu", enable_fp_fusion=False,
            )  # fmt: skip
    return output
