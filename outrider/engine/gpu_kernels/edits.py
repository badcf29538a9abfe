"""Applies bans, biases and penalties to the rows that have any, in place and in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 256
"""Number of tokens that a program processes at a time."""


@triton.jit(do_not_specialize=["num_changed", "num_entries"])
def edit_rows(
    logits,  # float32, all logits of a step as one row
    packed,  # int64, see below
    num_changed,
    num_entries,
    ENTRIES: tl.constexpr,
):
    """Edits rows. Grid: changed rows. `packed` has the words of an `Edits`: starts, factors, places, numbers.

    The same token may be banned, biased and penalised, so the program's threads synchronise between these edits.
    """
    row = tl.program_id(0)
    factors = packed + 3 * num_changed + 1 + 3 * row
    places = packed + 6 * num_changed + 1
    numbers = places + num_entries
    first_ban = tl.load(packed + 3 * row)
    first_bias = tl.load(packed + 3 * row + 1)
    first_penalty = tl.load(packed + 3 * row + 2)
    end = tl.load(packed + 3 * row + 3)
    for start in range(first_ban, first_bias, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        is_there = entries < first_bias
        tl.store(logits + tl.load(places + entries, mask=is_there, other=0), float("-inf"), mask=is_there)
    tl.debug_barrier()
    for start in range(first_bias, first_penalty, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        is_there = entries < first_penalty
        where = logits + tl.load(places + entries, mask=is_there, other=0)
        bias = tl.load(numbers + entries, mask=is_there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(where, tl.load(where, mask=is_there, other=0.0) + bias, mask=is_there)
    tl.debug_barrier()
    repetition = tl.load(factors).to(tl.int32).to(tl.float32, bitcast=True)
    frequency = tl.load(factors + 1).to(tl.int32).to(tl.float32, bitcast=True)
    presence = tl.load(factors + 2).to(tl.int32).to(tl.float32, bitcast=True)
    for start in range(first_penalty, end, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        is_there = entries < end
        where = logits + tl.load(places + entries, mask=is_there, other=0)
        counts = tl.load(numbers + entries, mask=is_there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        values = tl.load(where, mask=is_there, other=0.0)
        values = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0.0).to(tl.float32)
        tl.store(where, values, mask=is_there)


def edit_in_place(flat: Tensor, packed: Tensor, *, num_changed: int, num_entries: int) -> None:
    """Edits the logits. `flat`: all logits of a step as one row. `packed`: `Edits.packed()` on the same device."""
    with torch.cuda.device_of(flat):  # triton launches on the current device
        edit_rows[(num_changed,)](flat, packed, num_changed, num_entries, ENTRIES=ENTRIES, enable_fp_fusion=False)
