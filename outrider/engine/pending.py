"""A result of a step that a device is still to compute (see `transfer.read`). Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pending(Generic[Result]):
    """A result that is queued on a device. `finish` makes it from the tensors' numbers, once they are on the host."""

    tensors: tuple[Tensor, ...]  # int64 or float64, all on one device; may be none
    finish: Callable[[list[npt.NDArray[Any]]], Result]  # of the tensors' numbers, in their shapes
