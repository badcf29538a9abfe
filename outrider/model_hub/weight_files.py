"""The weight files of a model's directory, and whether they are whole. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ModelError

LENGTH_BYTES = 8


def weight_files(directory: Path) -> list[Path]:
    """The weight files that transformers loads from `directory`, by name. Raises ModelError when there are none."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(path for path in directory.glob(pattern) if path.is_file())
        if files:
            return files
    raise ModelError(f"{directory} has no weights: expected *.safetensors or pytorch_model*.bin")


def check_weight_files(directory: Path) -> None:
    """Raises ModelError naming the file that is missing, cut short or no safetensors, and the fix.

    A loader tells of a damaged file without saying which of a model's many it is.
    """
    for path in weight_files(directory):
        if path.suffix == ".safetensors":
            why = _what_is_wrong(path)
            if why:
                raise ModelError(f"{path} is damaged: {why}; copy or download it again")


def _what_is_wrong(path: Path) -> str:
    """Empty for a file whose header fits its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            return f"its header claims {length:,} of {size:,} bytes"
        header = file.read(length)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        num_bytes = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"its header is no safetensors header ({type(error).__name__})"
    whole = LENGTH_BYTES + length + num_bytes
    return "" if size == whole else f"it has {size:,} of {whole:,} bytes"
