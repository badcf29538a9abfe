"""READ FIRST: opens a safetensors checkpoint, plain or quantised, as a mapping that reads each tensor when it is used.

`methods` chooses how a checkpoint's `quantization_config` is read. Each other module reads one family of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.kv_cache.array_plane import Words
from outrider.errors import ModelError
from outrider.model_hub.safetensors_files import SafetensorsFiles

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


def open_safetensors(directory: Path) -> Tensors:
    """Opens the checkpoint, which stays on disk until a tensor is used.

    float16 is widened to float32, exactly. Raises: ModelError if a file is missing or damaged. Reading a tensor raises
    ModelError if its type is not supported.
    """
    files = SafetensorsFiles(directory)
    return LazyTensors({name: partial(_plain, files, name) for name in files})


def dequantised(tensors: Tensors) -> Mapping[str, Words]:
    """Returns the same tensors, of which the quantised ones are dequantised to float32 when they are used."""

    def read(name: str) -> Words:
        tensor = tensors[name]
        return tensor.dequantise() if isinstance(tensor, GroupedWeight) else tensor

    return LazyTensors({name: partial(read, name) for name in tensors})


def _plain(files: SafetensorsFiles, name: str) -> Words:
    """Returns a tensor that is not quantised. Raises: ModelError if its type is not one of plain weights."""
    values, kind = files[name], files.types[name]
    if kind not in ("F32", "F16", "BF16"):
        raise ModelError(f"{files.directory}: {name} has the type {kind}, but no scales that belong to it")
    return values.astype(np.float32) if kind == "F16" else values
