"""Reads the header of a GGUF file: metadata and the table of tensors.

The `gguf` package's own reader makes several numpy arrays for each token, which takes many seconds for the
vocabularies of Gemma. This one takes a fraction of a second. The format is specified in ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.model_hub.gguf.blocks import FORMATS

F32, F16, BF16 = 0, 1, 30
PLAIN_TYPES = {F32: ("F32", 4), F16: ("F16", 2), BF16: ("BF16", 2)}
"""Types of plain numbers: (name, bytes)."""
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of metadata by GGUF's number, in the notation of `struct` and numpy."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a GGUF file, by its name there."""

    name: str
    type: int  # GGUF's number
    shape: tuple[int, ...]  # in transformers' order: [out_features, in_features]
    offset: int  # bytes from the start of the file
    file: int = 0  # number of the file within a split model

    @property
    def type_name(self) -> str:
        return FORMATS[self.type].name if self.type in FORMATS else PLAIN_TYPES[self.type][0]

    @property
    def row_bytes(self) -> int:
        """Number of bytes of the values of one output feature."""
        if self.type in FORMATS:
            return self.shape[-1] // FORMATS[self.type].block_size * FORMATS[self.type].block.itemsize
        return self.shape[-1] * PLAIN_TYPES[self.type][1]

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    tensors: list[TensorEntry]


def read_header(path: Path, file: int = 0) -> GgufHeader:
    """Reads the header. `file`: number of the file within a split model.

    Raises: ModelError if the file is damaged, or has tensors of types that are not supported.
    """
    with path.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                header = _Reader(content).header(file)
            except (struct.error, ArithmeticError, ValueError, KeyError, MemoryError) as error:
                raise ModelError(f"{path} is damaged: {error}; copy or download it again") from error
            size = len(content)
    _check(path, header, size)
    return header


class _Reader:
    """A position in the file's content."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 4

    def header(self, file: int) -> GgufHeader:
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version:#x}, not 2 or 3 with the lowest byte first")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_values):
            name = self._string()
            metadata[name] = self._value(self._scalar("<I"))
        tensors = [self._tensor(file) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, [replace(entry, offset=start + entry.offset) for entry in tensors])

    def _tensor(self, file: int) -> TensorEntry:
        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))[::-1]
        return TensorEntry(name, self._scalar("<I"), shape, self._scalar("<Q"), file)

    def _scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self._content, self._at)
        self._at += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + self._scalar("<Q")
        if self._at > len(self._content):
            raise ValueError("a text reaches beyond its end")
        return self._content[start : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        values = np.frombuffer(self._content, _SCALARS[kind], length, self._at).tolist()
        self._at += struct.calcsize(_SCALARS[kind]) * length
        return values


def _check(path: Path, header: GgufHeader, size: int) -> None:
    """Raises: ModelError if a tensor's type is not supported, or the file is too short for the tensors."""
    unknown = [entry for entry in header.tensors if entry.type not in FORMATS and entry.type not in PLAIN_TYPES]
    if unknown:
        from gguf import GGMLQuantizationType  # takes a tenth of a second, and only the name is needed

        name = f"number {unknown[0].type}"
        with suppress(ValueError):
            name = GGMLQuantizationType(unknown[0].type).name
        known = ", ".join(known.name for known in FORMATS.values())
        raise ModelError(
            f"{path}: {len(unknown)} tensors such as {unknown[0].name} are of type {name}, which is not supported: "
            f"use a file of the types {known}, F16, BF16 or F32, for example a Q4_K_M or Q8_0 file of the model"
        )
    for entry in header.tensors:
        block_size = FORMATS[entry.type].block_size if entry.type in FORMATS else 1
        if not entry.shape or entry.shape[-1] % block_size:
            raise ModelError(f"{path} is damaged: {entry.name} of {entry.type_name} has the shape {entry.shape}")
    needed = max((entry.offset + entry.num_rows * entry.row_bytes for entry in header.tensors), default=0)
    if needed > size:
        raise ModelError(f"{path} is damaged: it has {size:,} of {needed:,} bytes; copy or download it again")
