"""One forward's input, and how it is laid out from the rows of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """What one sequence contributes to a forward: consecutive tokens, known ones first, drafts after them."""

    token_ids: Sequence[int]  # at least one
    start_position: int  # absolute position of token_ids[0]; KV of everything before is in the cache
    block_ids: Sequence[int] | npt.NDArray[np.int32]  # covers [0, start_position + len(token_ids))
    num_logits: int  # the last num_logits rows need logits; 0 to len(token_ids)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One forward's input: the rows of every planned sequence, laid end to end.

    Sequence i owns rows query_start_loc[i] : query_start_loc[i + 1]. All tensors are on
    the CPU; the model runner moves them. Rows, sequences and logits keep the order in
    which the sequences were given.
    """

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64, absolute
    slot_mapping: Tensor  # [num_rows] int64, block_id * block_size + offset
    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32, with this step's rows
    block_tables: Tensor  # [num_seqs, max_blocks] int32; unused entries repeat a block of the sequence
    logits_rows: Tensor  # [num_logits] int64, rising
    block_size: int

    @property
    def num_rows(self) -> int:
        return self.token_ids.numel()

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.numel()


def build_input_batch(rows: Sequence[SequenceRows], block_size: int) -> InputBatch:
    """Lays `rows` end to end.

    Raises ValueError when a sequence has no rows or too few blocks for them; both are
    bugs of the caller.
    """
    if not rows:
        raise ValueError("a forward needs at least one sequence")
    num_rows = np.array([len(seq.token_ids) for seq in rows], dtype=np.int32)
    starts = np.array([seq.start_position for seq in rows], dtype=np.int64)
    seq_lens = starts + num_rows
    num_blocks = -(-seq_lens // block_size)
    for index, seq in enumerate(rows):
        if num_rows[index] == 0 or len(seq.block_ids) < num_blocks[index]:
            raise ValueError(
                f"sequence {index}: {num_rows[index]} rows from position {seq.start_position} "
                f"do not fit {len(seq.block_ids)} blocks of {block_size}"
            )
        if not 0 <= seq.num_logits <= num_rows[index]:
            raise ValueError(f"sequence {index}: {seq.num_logits} logits of {num_rows[index]} rows")
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(num_rows, out=query_start_loc[1:])

    block_tables = np.empty((len(rows), int(num_blocks.max())), dtype=np.int32)
    for index, seq in enumerate(rows):
        used = int(num_blocks[index])
        block_tables[index, :used] = seq.block_ids[:used]
        block_tables[index, used:] = block_tables[index, 0]

    token_ids = np.concatenate([np.asarray(seq.token_ids, dtype=np.int64) for seq in rows])
    row_seq = np.repeat(np.arange(len(rows)), num_rows)  # [num_rows]
    positions = starts[row_seq] + np.arange(len(token_ids)) - query_start_loc[row_seq]
    slot_mapping = block_tables[row_seq, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_logits = np.array([seq.num_logits for seq in rows])
    needs_logits = np.arange(len(token_ids)) >= (query_start_loc[1:] - num_logits)[row_seq]
    return InputBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_mapping),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_tables=torch.from_numpy(block_tables),
        logits_rows=torch.from_numpy(np.flatnonzero(needs_logits)),
        block_size=block_size,
    )
