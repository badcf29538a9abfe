"""What decided tokens make of a batch of one row a sequence, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "scratch_slot"])
def advance(
    winners,  # [num_rows] int64: the tokens to feed
    words,  # [11, num_rows] int64, see `Rollouts.queue`; positions and depths become those of the next decision
    token_ids,  # [num_rows] int64: of the batch, as all that follow
    positions,  # same
    slot_mapping,  # same
    seq_lens,  # [num_rows] int32
    table_starts,  # [num_rows + 1] int32
    block_tables,  # int32, end to end
    num_rows,
    scratch_slot,  # of rows past their end
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # the power of two from num_rows on
):
    """Grid: 1."""
    rows = tl.arange(0, ROWS)
    at_decision, at_next, at_depth = words + rows, words + 8 * num_rows + rows, words + 10 * num_rows + rows
    end = tl.load(at_next + num_rows, mask=rows < num_rows, other=0)
    is_row = end > 0  # of a sequence, not one that pads
    next_position = tl.load(at_next, mask=is_row, other=0)
    position = tl.minimum(next_position, end - 1)
    table = block_tables + tl.load(table_starts + rows, mask=is_row, other=0)
    block = tl.load(table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    slot = tl.where(next_position < end, block * BLOCK_SIZE + position % BLOCK_SIZE, scratch_slot)
    tl.store(token_ids + rows, tl.load(winners + rows, mask=is_row, other=0), mask=is_row)
    tl.store(positions + rows, position, mask=is_row)
    tl.store(slot_mapping + rows, slot, mask=is_row)
    tl.store(seq_lens + rows, (position + 1).to(tl.int32), mask=is_row)
    tl.store(at_next, next_position + 1, mask=is_row)
    tl.store(at_depth, tl.load(at_depth, mask=is_row, other=0) + 1, mask=is_row)
    tl.store(at_decision, tl.load(at_decision, mask=is_row, other=0) + 1, mask=is_row)
