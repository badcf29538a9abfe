"""A model's weight files: which model they are, as one number, and whether they are whole. Torch-free.

Nodes that answer for each other must agree on the number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import TOKENIZER_FILE
from outrider.model_hub.vocabulary import read_json

LENGTH_BYTES = 8
SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 256
SMALL_TENSOR_BYTES = 1 << 20
"""Smaller tensors count whole: a norm or a bias may lie between two samples of a large file."""
VOLATILE_KEYS = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Of config.json: how and by what it was saved, not what it says."""


def model_fingerprint(directory: Path, *, dtype: str) -> str:
    """SHA-256 in hexadecimal over configuration, tokenizer, dtype, quantization and weights.

    Weights count with their header, their tensors under 1 MiB, and 64 KiB samples at fixed
    strides of each file, so that a large model costs milliseconds. Quantization is part of the configuration
    (`quantization_config`). Raises ModelError when a file is missing.
    """
    config = read_json(directory / "config.json")
    if not config:
        raise ModelError(f"{directory} has no config.json")
    tokenizer = directory / TOKENIZER_FILE
    digest = hashlib.sha256()
    parts: Iterable[tuple[str, bytes]] = (
        ("config", canonical_json(config)),
        ("tokenizer", hashlib.sha256(tokenizer.read_bytes() if tokenizer.is_file() else b"").digest()),
        ("dtype", dtype.encode()),
        *((path.name, sample_file(path)) for path in weight_files(directory)),
    )
    for name, content in parts:
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def canonical_json(value: dict[str, Any]) -> bytes:
    """One spelling for equal configurations, at any depth: sorted keys, no volatile ones."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip(child) for key, child in node.items() if key not in VOLATILE_KEYS}
        return [strip(child) for child in node] if isinstance(node, list) else node

    return json.dumps(strip(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sample_file(path: Path) -> bytes:
    """SHA-256 over a file's size, its safetensors header and small tensors, and samples at fixed strides to its end."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    stride = max(SAMPLE_BYTES, -(-size // SAMPLES_PER_FILE))
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > size:
                raise ModelError(f"{path} is not a safetensors file: its header claims {length:,} of {size:,} bytes")
            header = file.read(length)
            digest.update(header)
            for start, end in _small_tensors(header):
                file.seek(LENGTH_BYTES + length + start)
                digest.update(file.read(end - start))
        for offset in (*range(0, size, stride), max(0, size - SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _small_tensors(header: bytes) -> list[tuple[int, int]]:
    """[start, end) behind the header, in the order of the file. None of a damaged file: see `check_weight_files`."""
    try:
        return sorted((start, end) for start, end in _offsets(header) if 0 <= end - start < SMALL_TENSOR_BYTES)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _offsets(header: bytes) -> list[tuple[int, int]]:
    """[start, end) of all tensors of a safetensors file. Raises what a header that is none makes of it."""
    tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    return [(int(start), int(end)) for start, end in tensors]


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
        num_bytes = max((end for _, end in _offsets(header)), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"its header is no safetensors header ({type(error).__name__})"
    whole = LENGTH_BYTES + length + num_bytes
    return "" if size == whole else f"it has {size:,} of {whole:,} bytes"


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
