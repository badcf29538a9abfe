"""A GGUF checkpoint's tensors by transformers' parameter names, read one at a time. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.matrices import to_float32
from outrider.engine.kv_cache.array_plane import Words
from outrider.model_hub.gguf.blocks import FORMATS, decode_rows
from outrider.model_hub.gguf.families import FAMILIES, ROTATION_FACTORS, name_in_transformers
from outrider.model_hub.gguf.header import BF16, F16, TensorEntry
from outrider.model_hub.lazy_tensors import LazyTensors


def open_tensors(
    files: Sequence[Path], entries: Sequence[TensorEntry], architecture: str, head_dim: int
) -> LazyTensors[Words | GroupedWeight]:
    """Returns the parameters of an architecture in FAMILIES.

    Quantised weights become `GroupedWeight`, F16 and F32 become float32, and BF16 becomes uint16. llama.cpp's changes
    of row order and of norms are undone. Where embeddings and head are one matrix, only the embeddings are here.

    Raises: ModelError if the family has no parameter for a tensor.
    """
    family = FAMILIES[architecture]
    map_file = cache(lambda file: np.asarray(np.memmap(files[file], np.uint8, "r")))

    def read(entry: TensorEntry) -> Words | GroupedWeight:
        rows = read_rows(map_file(entry.file), entry)
        if family.pairs_neighbours and (".attn_q." in entry.name or ".attn_k." in entry.name):
            rows = _halves(rows.reshape(entry.shape[0], -1), head_dim)
        if entry.type in FORMATS:
            return decode_rows(rows, FORMATS[entry.type])
        values = _plain_values(rows, entry)
        if family.norm_offset and entry.name.endswith("norm.weight"):
            return to_float32(values) - np.float32(family.norm_offset)
        return values

    own = [entry for entry in entries if entry.name not in ROTATION_FACTORS]
    return LazyTensors({name_in_transformers(entry.name, family): partial(read, entry) for entry in own})


def read_tensor(files: Sequence[Path], entry: TensorEntry) -> Words:
    """Reads a plain tensor."""
    return _plain_values(read_rows(np.asarray(np.memmap(files[entry.file], np.uint8, "r")), entry), entry)


def read_rows(content: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Returns the tensor's bytes in the mapped file: [rows, bytes of one row]."""
    size = entry.num_rows * entry.row_bytes
    return content[entry.offset : entry.offset + size].reshape(entry.num_rows, entry.row_bytes)


def _plain_values(rows: npt.NDArray[np.uint8], entry: TensorEntry) -> Words:
    """Returns the values of a tensor of type F32, F16 or BF16, in its shape."""
    if entry.type == BF16:
        return rows.view("<u2").reshape(entry.shape)
    return rows.view("<f2" if entry.type == F16 else "<f4").astype(np.float32, copy=False).reshape(entry.shape)


def _halves(rows: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.uint8]:
    """Reorders rows [num_heads * head_dim, bytes], so that each dimension is paired with one of the other half."""
    width = rows.shape[1]
    return rows.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(-1, width)
