"""Maps a checkpoint's safetensors files into memory. Torch-free; the package safetensors reads bfloat16 with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import from_bfloat16
from outrider.errors import ModelError
from outrider.model_hub.fingerprint import read_header, weight_files

_FLOATS = {"F32": "f4", "F16": "f2", "BF16": "u2", "F8_E4M3": "u1"}
_TYPES = _FLOATS | {"I64": "i8", "I32": "i4", "I8": "i1", "U8": "u1", "BOOL": "?"}
"""numpy's types for the types in a safetensors header. Types that numpy lacks are read as their bits."""


class SafetensorsFiles(Mapping[str, npt.NDArray[Any]]):
    """All tensors of a checkpoint, of one file or several, by name. They are read when they are used, and not copied.

    bfloat16 is read as uint16, and FP8 as uint8; `types` tells them from integers.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the headers. Raises: ModelError if a file is missing or damaged, or none has the safetensors format."""
        self.directory = directory
        self.types: dict[str, str] = {}  # as the header names them, such as "BF16"
        self._places: dict[str, tuple[npt.NDArray[np.uint8], dict[str, Any]]] = {}
        for path in weight_files(directory):
            if path.suffix != ".safetensors":
                raise ModelError(f"{path} is not a safetensors file: convert it with transformers' save_pretrained")
            start, header = read_header(path)
            is_empty = path.stat().st_size == start
            data = np.empty(0, np.uint8) if is_empty else np.memmap(path, np.uint8, "r", offset=start).view(np.ndarray)
            for name, entry in header.items():
                if not isinstance(entry.get("dtype"), str) or not isinstance(entry.get("shape"), list):
                    raise ModelError(f"{path} is damaged: {name} has no type or no shape; copy or download it again")
                self.types[name] = entry["dtype"]
                self._places[name] = (data, entry)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Returns the tensor as a read-only view of its file. Raises: KeyError, ModelError if it is damaged or its
        type is unknown.
        """
        data, entry = self._places[name]
        if (word := _TYPES.get(entry["dtype"])) is None:
            raise ModelError(f"{self.directory}: {name} has the type {entry['dtype']}, which is not supported")
        try:
            return data[slice(*entry["data_offsets"])].view(word).reshape(entry["shape"])
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self.directory}: {name} is damaged: {error}; copy or download it again") from error

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Returns the tensor in float32, exactly. Raises: KeyError, ModelError if its type is not a plain float."""
        values, kind = self[name], self.types[name]
        if kind not in ("F32", "F16", "BF16"):
            raise ModelError(f"{self.directory}: {name} has the type {kind}, not float32, float16 or bfloat16")
        return from_bfloat16(values) if kind == "BF16" else values.astype(np.float32, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
