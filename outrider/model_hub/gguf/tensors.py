"""A GGUF checkpoint's tensors by transformers' parameter names, read one at a time. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import from_bfloat16
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.model_hub.gguf.blocks import FORMATS, decode_rows
from outrider.model_hub.gguf.families import FAMILIES, ROTATION_FACTORS, name_in_transformers
from outrider.model_hub.gguf.header import BF16, F16, TensorEntry

Words: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.uint16]"
"""Plain weights: float32, or bfloat16 as bits."""


class GgufTensors(Mapping[str, "Words | GroupedWeight"]):
    """The parameters. An access reads and converts the tensor; nothing is kept.

    Quantised weights become `GroupedWeight`, F16 and F32 become float32, and BF16 becomes uint16. llama.cpp's changes
    of row order and of norms are undone. Where embeddings and head are one matrix, only the embeddings are here.
    """

    def __init__(self, files: Sequence[Path], entries: Sequence[TensorEntry], architecture: str, head_dim: int) -> None:
        """`architecture`: a key of FAMILIES. Raises: ModelError if the family has no parameter for a tensor."""
        self._files = files
        self._family = FAMILIES[architecture]
        self._head_dim = head_dim
        self._entries = {
            name_in_transformers(entry.name, self._family): entry
            for entry in entries
            if entry.name not in ROTATION_FACTORS
        }

    def __getitem__(self, name: str) -> Words | GroupedWeight:
        entry = self._entries[name]
        rows = read_rows(self._maps[entry.file], entry)
        if self._family.pairs_neighbours and (".attn_q." in entry.name or ".attn_k." in entry.name):
            rows = _halves(rows.reshape(entry.shape[0], -1), self._head_dim)
        if entry.type in FORMATS:
            return decode_rows(rows, FORMATS[entry.type])
        values = plain_values(rows, entry)
        if self._family.norm_offset and name.endswith("norm.weight"):
            return float_values(values) - np.float32(self._family.norm_offset)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without reading the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter without reading it."""
        return self._entries[name].shape

    @property
    def formats(self) -> list[str]:
        """The matrices' types, the most frequent one first, such as ["Q5_0", "Q4_K"]."""
        return [name for name, _ in self._types().most_common()]

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is a GroupedWeight."""
        return any(entry.type in FORMATS for entry in self._entries.values())

    def describe(self) -> str:
        """Tells what the matrices are, for example "18 layers; Q5_0 81, Q4_K 27, Q8_0 10, Q6_K 9 tensors"."""
        types = self._types()
        num_layers = len({name.split(".")[2] for name in self._entries if name.startswith("model.layers.")})
        return f"{num_layers} layers; {', '.join(f'{name} {count}' for name, count in types.most_common())} tensors"

    def _types(self) -> Counter[str]:
        return Counter(entry.type_name for entry in self._entries.values() if len(entry.shape) > 1)

    @cached_property
    def _maps(self) -> list[npt.NDArray[np.uint8]]:
        return [np.asarray(np.memmap(path, np.uint8, "r")) for path in self._files]


def float_values(tensor: Words | GroupedWeight) -> npt.NDArray[np.float32]:
    """Returns the tensor's values, which are rounded only if they are quantised."""
    if isinstance(tensor, GroupedWeight):
        return tensor.dequantise()
    words: Any = tensor  # mypy does not narrow arrays by their dtype
    return from_bfloat16(words) if words.dtype == np.uint16 else words


def read_tensor(files: Sequence[Path], entry: TensorEntry) -> Words:
    """Reads a plain tensor."""
    return plain_values(read_rows(np.asarray(np.memmap(files[entry.file], np.uint8, "r")), entry), entry)


def read_rows(content: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Returns the tensor's bytes in the mapped file: [rows, bytes of one row]."""
    size = entry.num_rows * entry.row_bytes
    return content[entry.offset : entry.offset + size].reshape(entry.num_rows, entry.row_bytes)


def plain_values(rows: npt.NDArray[np.uint8], entry: TensorEntry) -> Words:
    """Returns the values of a tensor of type F32, F16 or BF16, in its shape."""
    if entry.type == BF16:
        return rows.view("<u2").reshape(entry.shape)
    return rows.view("<f2" if entry.type == F16 else "<f4").astype(np.float32, copy=False).reshape(entry.shape)


def _halves(rows: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.uint8]:
    """Reorders rows [num_heads * head_dim, bytes], so that each dimension is paired with one of the other half."""
    width = rows.shape[1]
    return rows.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(-1, width)
