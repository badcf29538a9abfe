"""Transfers of small arrays to and from a device.

Work is queued first, and its results are `Pending`. `pending.read` then waits once and fetches all of them in one
transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a tensor of the array's dtype and shape on `device`; on the CPU it may share the array's memory.

    A GPU copies the array from page-locked memory, after the work already queued; the host does not wait.
    """
    return page_locked(values, device).to(device, non_blocking=True)


def page_locked(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a CPU tensor that `device` can copy while the host continues; it may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def empty_page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU tensor that a GPU can copy to and from while the host continues."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def download_all(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Returns the values of tensors on one device, in one transfer. On a GPU the tensors must be int64 or float64."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    numbers = download(torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors]))
    arrays, start = [], 0
    for tensor in tensors:
        own = numbers[start : start + tensor.numel()]
        arrays.append(own.view(np.float64 if tensor.dtype is torch.float64 else np.int64).reshape(tensor.shape))
        start += tensor.numel()
    return arrays


def download(numbers: Tensor) -> npt.NDArray[np.int64]:
    """Returns the values of a tensor [n] int64. Nothing else makes the host wait for all work queued on a GPU."""
    array: npt.NDArray[np.int64] = numbers.cpu().numpy()
    return array
