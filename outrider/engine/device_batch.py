"""An InputBatch on a GPU: everything that a forward reads of it, in one transfer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.transfer import page_locked


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """The tensors of an InputBatch under the same names, as views of one buffer on a device."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    slot_mapping: Tensor  # [num_rows] int64
    logits_rows: Tensor  # [num_logits] int64
    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    path_starts: Tensor  # [num_rows + 1] int64, or empty
    path_slots: Tensor  # [sum of depths] int64

    buffer: Tensor  # [bytes] uint8

    def load(self, packed: np.ndarray) -> None:
        """Takes over another batch of the same shape, packed as by `pack`: at the same addresses, and nobody waits."""
        self.buffer.copy_(page_locked(packed, self.buffer.device), non_blocking=True)


_ALIGNMENT = 16
"""Bytes: a kernel is compiled for each alignment of its arguments that it meets."""


def pack(arrays: Sequence[array[int]]) -> np.ndarray:
    """Their bytes, each array's from a multiple of 16 on: [bytes] uint8."""
    packed = bytearray()
    for each in arrays:
        packed += each
        packed += bytes(-len(packed) % _ALIGNMENT)
    return np.frombuffer(packed, dtype=np.uint8)


def unpack(buffer: Tensor, arrays: Sequence[array[int]]) -> list[Tensor]:
    """Views of a packed buffer: a tensor of each array, of its length and type."""
    tensors, start = [], 0
    for each in arrays:
        size = len(each) * each.itemsize
        dtype = torch.int64 if each.itemsize == 8 else torch.int32
        tensors.append(buffer.narrow(0, start, size).view(dtype))
        start += size + -size % _ALIGNMENT
    return tensors
