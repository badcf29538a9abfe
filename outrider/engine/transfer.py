"""Small arrays on their way to the logits' device and back.

Results come back together: what is asked of a device is queued first, as `Pending`, and `read` waits for
all of it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.pending import Pending

Arrays = list[npt.NDArray[Any]]


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's dtype and shape on `device`; on the CPU it may share the array's memory.

    A GPU copies it from page-locked memory, in its turn behind the work that is queued: nobody waits.
    """
    return page_locked(values, device).to(device, non_blocking=True)


def page_locked(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A tensor on the CPU from which `device` can copy without waiting; on the CPU it may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def empty_page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, to which and from which a GPU copies without anybody waiting."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def upload_ids(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)] int64."""
    return upload(np.asarray(values, dtype=np.int64), device)


def read(*pending: Pending[Any]) -> list[Any]:
    """The results, in order. From a GPU their numbers come in one transfer."""
    arrays = iter(_numbers_of([tensor for each in pending for tensor in each.tensors]))
    return [each.finish([next(arrays) for _ in each.tensors]) for each in pending]


def _numbers_of(tensors: Sequence[Tensor]) -> Arrays:
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    numbers = download(torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors]))
    arrays, start = [], 0
    for tensor in tensors:
        own = numbers[start : start + tensor.numel()]
        arrays.append(own.view(np.float64 if tensor.dtype is torch.float64 else np.int64).reshape(tensor.shape))
        start += tensor.numel()
    return arrays


def download(numbers: Tensor) -> npt.NDArray[np.int64]:
    """The numbers of a tensor [n] int64. The one place where the host waits for a GPU: for all work queued there."""
    array: npt.NDArray[np.int64] = numbers.cpu().numpy()
    return array
