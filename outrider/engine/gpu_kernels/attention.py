"""Paged attention of ragged rows: each row attends to the keys of its own path, read in place.

A tile is LINES lines of one sequence and one KV head; a line is one row and one of the query heads that share the KV
head. If more heads share it than a tile has lines, they are divided among several tiles. Keys are read in blocks of
KEYS and in splits, both at fixed positions, so a row reads the same blocks in the same order whatever other rows are
in its tile or batch. Keys that a row does not see add 0 to its sums. Splits are merged in order, either by the program
of a whole tile or by `merge_splits`, with the same operations. A head's sink comes last, as a split with one key of
value 0. So the rounding of a row depends on `Tile` only.

The first SPLITS_PER_SIZE splits have SPLIT_KEYS positions each, the next SPLITS_PER_SIZE twice as many, and so on.

Source of the online softmax: Dao et al. 2022 (arXiv 2205.14135); of splits over keys: flash-decoding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.gpu_kernels import work_list

LOG2_E = tl.constexpr(1.4426950408889634)
HEADER_INTS = tl.constexpr(work_list.HEADER_INTS)
ITEM_INTS = tl.constexpr(work_list.ITEM_INTS)
MERGED_AT_ONCE = tl.constexpr(8)


@triton.jit
def _split_of(position, SPLIT_KEYS: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr):
    """Returns the index of a position's split, as in `WorkLists.split_of`."""
    FIRST_SIZE: tl.constexpr = SPLIT_KEYS * SPLITS_PER_SIZE
    scaled = (position // FIRST_SIZE + 1).to(tl.float32)
    size = (scaled.to(tl.int32, bitcast=True) >> 23) - 127  # the float's exponent
    return size * SPLITS_PER_SIZE + (position - FIRST_SIZE * ((1 << size) - 1)) // (SPLIT_KEYS << size)


@triton.jit
def _split_start(split, SPLIT_KEYS: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr):
    """Returns a split's first position, which is where the previous split ends."""
    size = split // SPLITS_PER_SIZE
    return SPLIT_KEYS * (SPLITS_PER_SIZE * ((1 << size) - 1) + ((split % SPLITS_PER_SIZE) << size))


@triton.jit
def _merge(largest, total, values, split_largest, split_total, split_values):
    """Adds a split to the previous ones. A split without keys (-inf, 0, 0) changes nothing."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    before = tl.exp2(largest - base)
    after = tl.exp2(split_largest - base)
    total = total * before + split_total * after
    values = values * before[:, None] + split_values * after[:, None]
    return new, total, values


@triton.jit
def _scores(query, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Returns scores [lines, keys] float32, divided by log 2 for use with exp2."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh with one exponential, which does not overflow because its argument is never positive.
        x = tl.abs(scores / softcap)
        e = tl.exp2(x * (-2.0 * LOG2_E))
        tanh = (1.0 - e) / (1.0 + e)
        scores = softcap * tl.where(scores < 0.0, -tanh, tanh)
    return scores * LOG2_E


@triton.jit
def _add_block(largest, total, values, scores, is_seen, value_block):
    """Adds one block of keys with the online softmax. Rows that see none of these keys stay bitwise unchanged."""
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
    """Returns which keys each line sees: [lines, keys] bool."""
    is_seen = key_positions[None, :] <= row_positions[:, None]
    if HAS_WINDOW:
        is_seen &= key_positions[None, :] > row_positions[:, None] - window
    return is_seen


@triton.jit
def _slots(block_table, key_positions, is_wanted, BLOCK_SIZE: tl.constexpr):
    """Returns the keys' slots in the cache: [keys] int64."""
    blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=is_wanted, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + key_positions % BLOCK_SIZE


@triton.jit
def _load(key_cache, value_cache, slots, is_key, dims, is_dim, kv_head, NUM_KV_HEADS: tl.constexpr, HEAD: tl.constexpr):
    """Loads keys [HEAD_DIM, keys] and values [keys, HEAD_DIM] of one KV head; 0 where masked."""
    where = slots * (NUM_KV_HEADS * HEAD) + kv_head * HEAD
    keys = tl.load(key_cache + where[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0)
    values = tl.load(value_cache + where[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
    return keys, values


@triton.jit
def attend(
    query,  # [num_rows, num_heads, head_dim]
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    value_cache,  # same
    output,  # [num_rows, num_heads, head_dim]
    split_values,  # [partials, num_heads, HEAD_DIM] float32
    split_largest,  # [partials, num_heads] float32
    split_totals,  # same
    positions,  # [num_rows] int64
    block_tables,  # int32, the tables of all sequences, concatenated, group by group
    path_starts,  # [num_rows + 1] int64, into path_slots; used if HAS_PATHS
    path_slots,  # [sum of depths] int64: slots of the drafts on each row's path
    plan,  # [ints] int32, see work_list.py
    scale,
    softcap,
    window,  # 0: none
    sinks,  # [num_heads] float32; used if HAS_SINKS
    HEADS_PER_KV: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,  # query heads in a tile, at most LINES
    NUM_KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,  # head_dim
    HEAD_DIM: tl.constexpr,  # head_dim rounded up to a power of two, at least 16
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS_PER_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    GROUP: tl.constexpr,  # the group of layers whose block tables are used
):
    """Computes attention. Grid: any number of programs, which divide all (item, KV head, head group) among them."""
    ROWS: tl.constexpr = LINES // HEADS_PER_TILE
    GROUPS: tl.constexpr = (HEADS_PER_KV + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    lines = tl.arange(0, LINES)
    dims = tl.arange(0, HEAD_DIM)
    is_dim = dims < HEAD
    if GROUP > 0:
        block_tables += GROUP * tl.load(plan + 4)

    for unit in range(tl.program_id(0), tl.load(plan) * (NUM_KV_HEADS * GROUPS), tl.num_programs(0)):
        kv_head = unit % (NUM_KV_HEADS * GROUPS) // GROUPS
        first_head = unit % GROUPS * HEADS_PER_TILE  # index among the heads that share the KV head
        item = plan + HEADER_INTS + unit // (NUM_KV_HEADS * GROUPS) * ITEM_INTS
        first_row = tl.load(item)
        end_row = first_row + tl.load(item + 1)
        block_table = block_tables + tl.load(item + 2)
        first_split = tl.load(item + 3)
        end_split = tl.load(item + 4)
        first_partial = tl.load(item + 5)
        num_partials = tl.load(item + 6)  # per row
        is_whole = first_partial < 0

        rows = first_row + lines // HEADS_PER_TILE
        own_heads = first_head + lines % HEADS_PER_TILE
        heads = kv_head * HEADS_PER_KV + own_heads
        is_line = (lines < ROWS * HEADS_PER_TILE) & (rows < end_row) & (own_heads < HEADS_PER_KV)
        row_positions = tl.load(positions + rows, mask=is_line, other=-1).to(tl.int32)
        # These offsets are int32, so that they stay in registers while all keys are read.
        places = (rows * (NUM_HEADS * HEAD) + heads * HEAD)[:, None] + dims[None, :]
        is_place = is_line[:, None] & is_dim[None, :]
        queries = tl.load(query + places, mask=is_place, other=0.0)

        num_keys = tl.max(row_positions, axis=0) + 1
        first_key = 0
        if HAS_WINDOW:
            lowest = tl.min(tl.where(is_line, row_positions, 0x7FFFFFFF), axis=0)
            first_key = tl.maximum(lowest - window + 1, 0)
            first_split = tl.maximum(first_split, _split_of(first_key, SPLIT_KEYS, SPLITS_PER_SIZE))
        num_common = num_keys  # number of leading keys that all rows read through the block table
        if HAS_PATHS:
            depths = tl.load(path_starts + rows + 1, mask=is_line, other=0) - tl.load(
                path_starts + rows, mask=is_line, other=0
            )
            num_common = tl.min(
                tl.where(is_line & (depths > 0), row_positions + 1 - depths.to(tl.int32), num_keys), axis=0
            )
        all_splits = _split_of(num_keys - 1, SPLIT_KEYS, SPLITS_PER_SIZE) + 1
        end_split = tl.where(is_whole, all_splits, tl.minimum(end_split, all_splits))

        largest = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        values = tl.zeros([LINES, HEAD_DIM], tl.float32)
        for split in range(first_split, end_split):
            part_largest = tl.full([LINES], float("-inf"), tl.float32)
            part_total = tl.zeros([LINES], tl.float32)
            part_values = tl.zeros([LINES, HEAD_DIM], tl.float32)
            first_block = tl.maximum(_split_start(split, SPLIT_KEYS, SPLITS_PER_SIZE), first_key // KEYS * KEYS)
            end_block = tl.minimum(_split_start(split + 1, SPLIT_KEYS, SPLITS_PER_SIZE), num_keys)
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
                # From here on, rows have keys of their own. So one row's lines are processed at a time, in the same
                # shapes as above, which gives the same bits.
                for start in range(tl.maximum(first_block, end_common), end_block, KEYS):
                    key_positions = start + tl.arange(0, KEYS)
                    is_seen = _seen(key_positions, row_positions, window, HAS_WINDOW) & is_line[:, None]
                    for row in tl.range(first_row, end_row, num_stages=1):
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
            if not is_whole:
                at = (first_partial + (rows - first_row) * num_partials + split).to(tl.int64) * NUM_HEADS + heads
                tl.store(split_largest + at, part_largest, mask=is_line)
                tl.store(split_totals + at, part_total, mask=is_line)
                tl.store(split_values + at[:, None] * HEAD_DIM + dims[None, :], part_values, mask=is_line[:, None])
            largest, total, values = _merge(largest, total, values, part_largest, part_total, part_values)
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_line, other=float("-inf"))
            largest, total, values = _merge(largest, total, values, sink * LOG2_E, 1.0, 0.0)
        result = values / tl.where(is_line & is_whole, total, 1.0)[:, None]
        tl.store(output + places, result.to(output.dtype.element_ty), mask=is_place & is_whole)


@triton.jit
def merge_splits(
    split_values,  # [partials, num_heads, HEAD_DIM] float32
    split_largest,  # [partials, num_heads] float32
    split_totals,  # same
    output,  # [num_rows, num_heads, head_dim]
    positions,  # [num_rows] int64
    plan,  # [ints] int32, see work_list.py
    window,
    sinks,  # [num_heads] float32; used if HAS_SINKS
    NUM_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS_PER_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges the splits of cut tiles. Grid: any number of programs, which divide the rows among them; heads."""
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    first_partials = plan + tl.load(plan + 1)
    for row in range(tl.program_id(0), tl.load(plan + 2), tl.num_programs(0)):
        first_partial = tl.load(first_partials + row)
        if first_partial >= 0:
            position = tl.load(positions + row).to(tl.int32)
            first_split = 0
            if HAS_WINDOW:
                first_split = _split_of(tl.maximum(position - window + 1, 0), SPLIT_KEYS, SPLITS_PER_SIZE)
            end_split = _split_of(position, SPLIT_KEYS, SPLITS_PER_SIZE) + 1
            largest = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            values = tl.zeros([1, HEAD_DIM], tl.float32)
            for start in range(first_split, end_split, MERGED_AT_ONCE):
                # This loop is unrolled, so that the loads of several splits overlap.
                for offset in tl.static_range(MERGED_AT_ONCE):
                    split = start + offset + tl.zeros([1], tl.int32)
                    is_split = split < end_split
                    at = (first_partial + split).to(tl.int64) * NUM_HEADS + head
                    value_places = at[:, None] * HEAD_DIM + dims[None, :]
                    largest, total, values = _merge(
                        largest,
                        total,
                        values,
                        tl.load(split_largest + at, mask=is_split, other=float("-inf")),
                        tl.load(split_totals + at, mask=is_split, other=0.0),
                        tl.load(split_values + value_places, mask=is_split[:, None], other=0.0),
                    )
            if HAS_SINKS:
                sink = tl.load(sinks + head + tl.zeros([1], tl.int32))
                largest, total, values = _merge(largest, total, values, sink * LOG2_E, 1.0, 0.0)
            result = values / total[:, None]
            at = (row * NUM_HEADS + head) * HEAD + dims
            tl.store(output + at[None, :], result.to(output.dtype.element_ty), mask=(dims < HEAD)[None, :])
