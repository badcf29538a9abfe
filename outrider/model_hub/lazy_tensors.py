"""Tensors of a checkpoint by name. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.kv_cache.array_plane import Words

_T = TypeVar("_T")
Tensors: TypeAlias = Mapping[str, Words | GroupedWeight]
"""A checkpoint's tensors by transformers' parameter names, such as "model.layers.3.self_attn.q_proj.weight"."""


class LazyTensors(Mapping[str, _T]):
    """Tensors by name. Each is read again whenever it is used, so that none stays in memory."""

    def __init__(self, readers: Mapping[str, Callable[[], _T]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> _T:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers  # the inherited method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def dequantised(tensors: Tensors) -> Mapping[str, Words]:
    """Returns the same tensors, of which the quantised ones are dequantised to float32 when they are used."""

    def read(name: str) -> Words:
        tensor = tensors[name]
        return tensor.dequantise() if isinstance(tensor, GroupedWeight) else tensor

    return LazyTensors({name: partial(read, name) for name in tensors})
