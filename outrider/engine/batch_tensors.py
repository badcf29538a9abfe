"""The fields of an input batch as tensors."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from outrider.engine.input_batch import ALIGNMENT, FIELD_NAMES, BatchFields, InputBatch
from outrider.engine.transfer import upload


def views_of(batch: InputBatch) -> BatchFields[Tensor]:
    """On the CPU, over the memory of the batch's arrays, which they keep alive."""
    return _shaped(batch, {name: _view(getattr(batch.arrays, name)) for name in FIELD_NAMES})


def copies_of(batch: InputBatch, device: torch.device | str) -> tuple[Tensor, BatchFields[Tensor]]:
    """All fields in one transfer: a buffer on `device`, [bytes] uint8 as of `InputBatch.packed`, and views of it."""
    buffer = upload(batch.packed(), torch.device(device))
    tensors, start = {}, 0
    for name in FIELD_NAMES:
        values = getattr(batch.arrays, name)
        size = len(values) * values.itemsize
        tensors[name] = buffer.narrow(0, start, size).view(_dtype(values))
        start += size + -size % ALIGNMENT
    return buffer, _shaped(batch, tensors)


def _shaped(batch: InputBatch, tensors: dict[str, Tensor]) -> BatchFields[Tensor]:
    tensors["block_tables"] = tensors["block_tables"].view(batch.num_seqs, batch.max_blocks)
    return BatchFields(**tensors)


def _dtype(values: array[int]) -> torch.dtype:
    return torch.int64 if values.itemsize == 8 else torch.int32


def _view(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=_dtype(values)) if values else torch.empty(0, dtype=_dtype(values))
