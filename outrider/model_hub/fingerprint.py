"""Which model this is, as one number: nodes that answer for each other must agree on it. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.model_hub.vocabulary import TOKENIZER_FILE, read_json
from outrider.model_hub.weight_files import weight_files

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
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ModelError(f"{path} is not a safetensors file: its header claims {length:,} of {size:,} bytes")
            header = file.read(length)
            digest.update(header)
            for start, end in _small_tensors(header):
                file.seek(8 + length + start)
                digest.update(file.read(end - start))
        for offset in (*range(0, size, stride), max(0, size - SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _small_tensors(header: bytes) -> list[tuple[int, int]]:
    """[start, end) behind the header, in the order of the file. None of a damaged file: see `check_weight_files`."""
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in tensors if 0 <= end - start < SMALL_TENSOR_BYTES)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
