"""Small arrays on their way to the logits' device and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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


def download(rows: Tensor) -> list[list[Any]]:
    """The numbers of a tensor [n, m]. The host waits for all work that is queued on the tensor's device."""
    numbers: list[list[Any]] = rows.tolist()
    return numbers
