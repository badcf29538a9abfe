"""Identifies a model's weight files by one hash, and checks that they are complete. Torch-free.

Nodes that serve the same requests must have equal hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.cache_directory import remove_unused
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import TOKENIZER_FILE, read_json

LENGTH_BYTES = 8
FORMATS = ("model.safetensors", "pytorch_model.bin")
"""Weight files in transformers' order of preference: either one file of this name, or several that the index
NAME.index.json lists."""
MIN_CACHED_AGE_SECONDS = 2.0
"""Minimum seconds from a file's last change to caching its hash. Sooner, another change may keep the time stamp."""
GGUF_TABLE = "gguf.json"
"""A file in the directory of a GGUF model; see outrider.model_hub.gguf.directory."""
VOLATILE_KEYS = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of config.json that tell how the file was saved, not what the model is."""


def model_fingerprint(directory: Path, *, dtype: str, cache: Path) -> str:
    """Returns the SHA-256 in hexadecimal over configuration, tokenizer, dtype, quantization and all weights.

    The weights' own hashes are stored in `cache`, so that a large model is read once (`cached_sha256`). Quantization is
    part of the configuration (`quantization_config`). Raises: ModelError if a file is missing.
    """
    config = read_json(directory / "config.json")
    if not config:
        raise ModelError(f"{directory} has no config.json")
    tokenizer = directory / TOKENIZER_FILE
    files = weight_files(directory)
    is_gguf = (directory / GGUF_TABLE).is_file()  # such a file's name is the user's choice, so it does not count
    names = [f"gguf {at}" if is_gguf else path.name for at, path in enumerate(files)]
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(lambda path: cached_sha256(path, cache), files))
    digest = hashlib.sha256()
    parts: Iterable[tuple[str, bytes]] = (
        ("config", canonical_json(config)),
        ("tokenizer", hashlib.sha256(tokenizer.read_bytes() if tokenizer.is_file() else b"").digest()),
        ("dtype", dtype.encode()),
        *((name, file_hash.encode()) for name, file_hash in zip(names, hashes, strict=True)),
    )
    for name, content in parts:
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def canonical_json(value: dict[str, Any]) -> bytes:
    """Returns the same text for equal configurations: keys are sorted and VOLATILE_KEYS removed, at any depth."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip(child) for key, child in node.items() if key not in VOLATILE_KEYS}
        return [strip(child) for child in node] if isinstance(node, list) else node

    return json.dumps(strip(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def weight_names(directory: Path) -> tuple[str, ...]:
    """Returns the file names to try: FORMATS, unless config.json names another weight file. Raises: ModelError."""
    name = read_json(directory / "config.json").get("transformers_weights")
    return (name.removesuffix(".index.json"),) if isinstance(name, str) else FORMATS


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of the model in `directory`. Raises: ModelError if any are missing."""
    if table := read_json(directory / GGUF_TABLE):
        return gguf_files(table)
    for name in (names := weight_names(directory)):
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            files = [directory / part for part in indexed_files(index)]
            for path in files:
                if not path.is_file():
                    raise ModelError(f"{index} names {path.name}, which is missing: copy or download it again")
            return files
    raise ModelError(f"{directory} has no weights: expected {' or '.join(names)}, or an index of several files")


def gguf_files(table: dict[str, Any]) -> list[Path]:
    """Returns the files that a GGUF model's table names. Raises: ModelError if one is missing or has another size."""
    files = []
    for file in table["files"]:
        path = Path(file["path"])
        if not path.is_file() or path.stat().st_size != file["size"]:
            raise ModelError(f"{path} is missing or has changed since it was opened first: start again")
        files.append(path)
    return files


def indexed_files(index: Path) -> list[str]:
    """Returns the file names in a checkpoint's index, ascending. Raises: ModelError if the index is invalid."""
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files; copy or download it again")
    return sorted(set(weights.values()))


def check_weight_files(directory: Path) -> list[str]:
    """Checks the weight files. Returns their state, which differs once any of them has changed.

    Raises: ModelError that names the missing, truncated or invalid file, and the fix. A loader's own error would not
    say which of the files is damaged.
    """
    files = weight_files(directory)
    for path in files:
        if path.suffix == ".safetensors":
            read_header(path)
    return [_state(path) for path in files]


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns (offset of the data, description of each tensor) of a safetensors file. Raises: ModelError if damaged."""
    size, why = path.stat().st_size, ""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        header = file.read(length) if start <= size else b"{}"
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        ends = [int(end) for _, end in (entry["data_offsets"] for entry in tensors.values())]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        why = f"its header is not a safetensors header ({type(error).__name__})"
    else:
        if start > size:
            why = f"its header should have {length:,} bytes, but the file has {size:,}"
        elif size != (whole := start + max(ends, default=0)):
            why = f"it has {size:,} of {whole:,} bytes"
    if why:
        raise ModelError(f"{path} is damaged: {why}; copy or download it again")
    return start, tensors


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path, cache: Path) -> str:
    """Returns a file's SHA-256, cached in `cache` while its size, device, inode, mtime and ctime stay the same.

    An edit in place changes the ctime even if it restores the modification time. If the cache cannot be written, the
    file is read each time.
    """
    state = _state(path)
    entry = cache / "hashes" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    with suppress(OSError, ValueError):
        known, digest = entry.read_text().splitlines()
        if known == state:
            return digest
    digest = file_sha256(path)
    changed = path.stat()
    if max(changed.st_mtime, changed.st_ctime) < time.time() - MIN_CACHED_AGE_SECONDS and _state(path) == state:
        with suppress(OSError):
            _remember(entry, f"{state}\n{digest}\n")
    return digest


def _state(path: Path) -> str:
    found = path.stat()
    return repr((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino))


def _remember(entry: Path, content: str) -> None:
    """Writes the entry atomically and removes entries that have not been used for a long time. Raises: OSError."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    remove_unused(entry.parent.iterdir())
    unfinished = entry.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}")
    unfinished.write_text(content)
    unfinished.replace(entry)
