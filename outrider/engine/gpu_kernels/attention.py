"""Paged attention of ragged rows: each row against the keys of its own path, read where they lie.

A tile is LINES lines of one sequence and one KV head; a line is a row with one of the query heads that share the KV
head. Where more share it than a tile has lines, they are in several tiles. Keys are taken in blocks of KEYS and splits
of SPLIT_KEYS positions, both counted from position 0, so a row meets the same blocks in the same order whatever else is
in its tile or its batch. What a row does not see adds 0 to it. Splits are merged in order, by one program (`IS_SPLIT`
false) or by `merge_splits`, with the same operations. So `Tile` says how a row is rounded, and nothing else does.

Source of the online softmax: Dao et al. 2022 (arXiv 2205.14135); of splits over keys: flash-decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes that the bits of a row depend on."""

    lines: int = 32  # rows × query heads of a KV head; a multiple of 16
    keys: int = 64  # positions in a block
    split_keys: int = 512  # positions in a split; a multiple of `keys`
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def _merge(largest, total, values, split_largest, split_total, split_values):
    """Adds a split to those before it. A split without keys (-inf, 0, 0) changes nothing."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    before = tl.exp2(largest - base)
    after = tl.exp2(split_largest - base)
    total = total * before + split_total * after
    values = values * before[:, None] + split_values * after[:, None]
    return new, total, values


@triton.jit
def _scores(query, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """[lines, keys] float32, in units of log 2."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh by one exponential, which does not overflow: x is bounded by the exponent's sign.
        x = tl.abs(scores / softcap)
        e = tl.exp2(x * (-2.0 * LOG2_E))
        tanh = (1.0 - e) / (1.0 + e)
        scores = softcap * tl.where(scores < 0.0, -tanh, tanh)
    return scores * LOG2_E


@triton.jit
def _add_block(largest, total, values, scores, is_seen, value_block):
    """One block of keys, online. Rows that see none of it keep their bits."""
    scores = tl.where(is_seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)
    before = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * before + tl.sum(weights, axis=1)
    values = values * before[:, None]
    values += tl.dot(weights.to(value_block.dtype), value_block, input_precision="ieee")
    return new, total, values


@triton.jit
def _seen(key_positions, row_positions, window, HAS_WINDOW: tl.constexpr):
    """[lines, keys] bool."""
    is_seen = key_positions[None, :] <= row_positions[:, None]
    if HAS_WINDOW:
        is_seen &= key_positions[None, :] > row_positions[:, None] - window
    return is_seen


@triton.jit
def _slots(block_table, key_positions, is_wanted, BLOCK_SIZE: tl.constexpr):
    """[keys] int64 of the cache."""
    blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=is_wanted, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + key_positions % BLOCK_SIZE


@triton.jit
def _load(key_cache, value_cache, slots, is_key, dims, is_dim, kv_head, NUM_KV_HEADS: tl.constexpr, HEAD: tl.constexpr):
    """[HEAD_DIM, keys] and [keys, HEAD_DIM] of one KV head; 0 for what is not wanted."""
    where = slots * (NUM_KV_HEADS * HEAD) + kv_head * HEAD
    keys = tl.load(key_cache + where[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0)
    values = tl.load(value_cache + where[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
    return keys, values


# Not specialised: these change from step to step, and each class of values would be a recompilation.
@triton.jit(do_not_specialize=["num_seqs", "max_splits"])
def attend(
    query,  # [num_rows, num_heads, head_dim]
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    value_cache,  # same
    output,  # [num_rows, num_heads, head_dim]
    split_values,  # [num_rows, num_heads, max_splits, HEAD_DIM] float32; with IS_SPLIT
    split_largest,  # [num_rows, num_heads, max_splits] float32
    split_totals,  # same
    query_start_loc,  # [num_seqs + 1] int32
    positions,  # [num_rows] int64
    block_tables,  # int32, of all sequences end to end
    table_starts,  # [num_seqs + 1] int32
    path_starts,  # [num_rows + 1] int64, into path_slots; with HAS_PATHS
    path_slots,  # [sum of depths] int64: slots of the last keys of rows in trees
    num_seqs,
    max_splits,
    scale,
    softcap,
    window,  # 0: none
    HEADS_PER_KV: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,  # as many of them as a tile has lines, at most
    NUM_KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,  # head_dim
    HEAD_DIM: tl.constexpr,  # the power of two from head_dim on, at least 16
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Grid: tiles (at most num_rows // rows_per_tile + num_seqs), KV heads times their groups of heads, splits or 1."""
    ROWS: tl.constexpr = LINES // HEADS_PER_TILE
    GROUPS: tl.constexpr = (HEADS_PER_KV + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // GROUPS
    first_head = tl.program_id(1) % GROUPS * HEADS_PER_TILE  # among those that share the KV head

    # The sequence: the last whose first tile is not after this one. Tiles are padded by one for each sequence.
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc + middle) // ROWS + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    first_row = tl.load(query_start_loc + seq)
    end_row = tl.load(query_start_loc + seq + 1)
    block_table = block_tables + tl.load(table_starts + seq)
    first_row += (tile - (first_row // ROWS + seq)) * ROWS
    if first_row >= end_row:
        return

    lines = tl.arange(0, LINES)
    rows = first_row + lines // HEADS_PER_TILE
    own_heads = first_head + lines % HEADS_PER_TILE
    heads = kv_head * HEADS_PER_KV + own_heads
    is_line = (lines < ROWS * HEADS_PER_TILE) & (rows < end_row) & (own_heads < HEADS_PER_KV)
    dims = tl.arange(0, HEAD_DIM)
    is_dim = dims < HEAD
    row_positions = tl.load(positions + rows, mask=is_line, other=-1).to(tl.int32)
    places = rows[:, None].to(tl.int64) * (NUM_KV_HEADS * HEADS_PER_KV * HEAD) + heads[:, None] * HEAD + dims[None, :]
    is_place = is_line[:, None] & is_dim[None, :]
    queries = tl.load(query + places, mask=is_place, other=0.0)

    num_keys = tl.max(row_positions, axis=0) + 1
    first_key = 0
    if HAS_WINDOW:
        lowest = tl.min(tl.where(is_line, row_positions, 0x7FFFFFFF), axis=0)
        first_key = tl.maximum(lowest - window + 1, 0)
    num_common = num_keys  # keys that all rows read by the block table
    if HAS_PATHS:
        depths = tl.load(path_starts + rows + 1, mask=is_line, other=0) - tl.load(
            path_starts + rows, mask=is_line, other=0
        )
        num_common = tl.min(tl.where(is_line & (depths > 0), row_positions + 1 - depths.to(tl.int32), num_keys), axis=0)

    largest = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    values = tl.zeros([LINES, HEAD_DIM], tl.float32)
    first_split = first_key // SPLIT_KEYS
    end_split = (num_keys + SPLIT_KEYS - 1) // SPLIT_KEYS
    if IS_SPLIT:
        split_id = tl.program_id(2)
        if (split_id < first_split) | (split_id >= end_split):
            return
        first_split = split_id
        end_split = split_id + 1

    for split in range(first_split, end_split):
        part_largest = tl.full([LINES], float("-inf"), tl.float32)
        part_total = tl.zeros([LINES], tl.float32)
        part_values = tl.zeros([LINES, HEAD_DIM], tl.float32)
        first_block = tl.maximum(split * SPLIT_KEYS, first_key // KEYS * KEYS)
        end_block = tl.minimum((split + 1) * SPLIT_KEYS, num_keys)
        end_common = end_block
        if HAS_PATHS:
            end_common = tl.minimum(end_block, num_common // KEYS * KEYS)
        for start in range(first_block, end_common, KEYS):
            key_positions = start + tl.arange(0, KEYS)
            is_key = key_positions < num_keys
            is_seen = _seen(key_positions, row_positions, window, HAS_WINDOW) & is_line[:, None]
            slots = _slots(block_table, key_positions, is_key, BLOCK_SIZE)
            keys, value_block = _load(
                key_cache, value_cache, slots, is_key, dims, is_dim, kv_head, NUM_KV_HEADS, HEAD
            )  # fmt: skip
            scores = _scores(queries, keys, scale, softcap, HAS_SOFTCAP)
            part_largest, part_total, part_values = _add_block(
                part_largest, part_total, part_values, scores, is_seen, value_block
            )
        if HAS_PATHS:
            # Here rows have keys of their own: one row's lines at a time, in the same shapes, so with the same bits.
            for start in range(tl.maximum(first_block, end_common), end_block, KEYS):
                key_positions = start + tl.arange(0, KEYS)
                is_seen = _seen(key_positions, row_positions, window, HAS_WINDOW) & is_line[:, None]
                for row in range(first_row, tl.minimum(first_row + ROWS, end_row)):
                    position = tl.load(positions + row).to(tl.int32)
                    first_slot = tl.load(path_starts + row)
                    first_own = position + 1 - (tl.load(path_starts + row + 1) - first_slot).to(tl.int32)
                    is_key = key_positions <= position
                    is_own = is_key & (key_positions >= first_own)
                    own = tl.load(path_slots + first_slot + (key_positions - first_own), mask=is_own, other=0)
                    shared = _slots(block_table, key_positions, is_key & ~is_own, BLOCK_SIZE)
                    keys, value_block = _load(
                        key_cache, value_cache, tl.where(is_own, own, shared), is_key, dims, is_dim, kv_head,
                        NUM_KV_HEADS, HEAD,
                    )  # fmt: skip
                    scores = _scores(queries, keys, scale, softcap, HAS_SOFTCAP)
                    part_largest, part_total, part_values = _add_block(
                        part_largest, part_total, part_values, scores, is_seen & (rows == row)[:, None], value_block
                    )
        if IS_SPLIT:
            at = (rows.to(tl.int64) * (NUM_KV_HEADS * HEADS_PER_KV) + heads) * max_splits + split
            tl.store(split_largest + at, part_largest, mask=is_line)
            tl.store(split_totals + at, part_total, mask=is_line)
            tl.store(split_values + at[:, None] * HEAD_DIM + dims[None, :], part_values, mask=is_line[:, None])
        else:
            largest, total, values = _merge(largest, total, values, part_largest, part_total, part_values)
    if not IS_SPLIT:
        result = values / tl.where(is_line, total, 1.0)[:, None]
        tl.store(output + places, result.to(output.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["max_splits"])
def merge_splits(
    split_values,  # [num_rows, num_heads, max_splits, HEAD_DIM] float32
    split_largest,  # [num_rows, num_heads, max_splits] float32
    split_totals,  # same
    output,  # [num_rows, num_heads, head_dim]
    positions,  # [num_rows] int64
    max_splits,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Grid: rows, heads."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    position = tl.load(positions + row).to(tl.int32)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT_KEYS
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, HEAD_DIM], tl.float32)
    first = (row.to(tl.int64) * NUM_HEADS + head) * max_splits
    for split in range(first_split, position // SPLIT_KEYS + 1):
        at = first + split
        largest, total, values = _merge(
            largest,
            total,
            values,
            tl.load(split_largest + at + tl.zeros([1], tl.int32)),
            tl.load(split_totals + at + tl.zeros([1], tl.int32)),
            tl.load(split_values + at * HEAD_DIM + dims)[None, :],
        )
    result = values / total[:, None]
    at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD + dims
    tl.store(output + at[None, :], result.to(output.dtype.element_ty), mask=(dims < HEAD)[None, :])
