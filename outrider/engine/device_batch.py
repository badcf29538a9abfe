"""An InputBatch on a GPU: everything that a forward reads of it, in one transfer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.engine.transfer import upload


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


def upload_arrays(arrays: Sequence[array[int]], device: torch.device) -> list[Tensor]:
    """A tensor of each array, of its length and type, in one transfer that nobody waits for.

    Arrays of int64 come before those of int32, so that all of them are aligned.
    """
    sizes = [len(each) * each.itemsize for each in arrays]
    packed = np.frombuffer(bytearray().join(arrays), dtype=np.uint8)
    buffer = upload(packed, device)  # [bytes] uint8
    starts = accumulate(sizes, initial=0)
    return [
        buffer.narrow(0, start, end - start).view(torch.int64 if each.itemsize == 8 else torch.int32)
        for each, (start, end) in zip(arrays, pairwise(starts), strict=True)
    ]
