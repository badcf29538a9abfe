"""Packed weights of native decoders in the user's cache: written once, mapped read-only by every node that runs them.

A folder for each, complete or absent: `weights`, all blobs one after the other, and
`header.json`, which names them and has a hash of each file. Nodes of one machine share the
pages of a mapped file. What a folder is known by (`PackedKey`) covers everything that the
bytes depend on, so that weights which are found need not be checked against the model
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import outrider
from outrider.engine.cpu_kernels.decoder_weights import PACKED, DecoderShape, DecoderWeights
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.engine.model_spec import ModelSpec
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.fingerprint import file_sha256, model_fingerprint
from outrider.model_hub.progress import Progress, no_progress

HEADER, WEIGHTS = "header.json", "weights"
MADE_BY = ("engine/cpu_kernels", "engine/model_runner.py", "engine/numerics.py", "engine/rotation.py", "model_hub")
"""Of the package: code that decides what is in a file, or whether it passed the check at load."""

KEPT_FOR_A_MODEL = 2
"""Of one model, made by different versions: the most recently used, beside the new one."""
KEPT_SECONDS = 30 * 24 * 3600
"""How long weights that no node asks for stay."""

_PAGE, _LINE = 4096, 64
_HASHED_AT_ONCE = 64 << 20
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedKey:
    """What the bytes depend on: the model and its settings, and the code that packs and checks it."""

    model: str
    code: str

    @classmethod
    def of(cls, config: ModelConfig, directory: Path, kernels: KernelChoice) -> PackedKey:
        """Raises ModelError when files of the model are missing, OSError when one cannot be read."""
        assert kernels.library is not None, "torch's weights are not packed"
        model = (
            model_fingerprint(directory, dtype=config.dtype),
            file_sha256(directory / "config.json"),  # with what a fingerprint leaves out, such as its dtype
            (config.weights, config.max_model_len, kernels.path),
        )
        code = (file_sha256(kernels.library), _source_hash(), version("torch"), version("transformers"))
        return cls(*(hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (model, code)))

    @property
    def folder_name(self) -> str:
        return f"{self.model}-{self.code}"


@dataclass(frozen=True, slots=True)
class PackedModel:
    spec: ModelSpec
    weights: DecoderWeights


def read_packed(folder: Path, *, progress: Progress = no_progress) -> PackedModel | None:
    """Maps the weights, every byte of which is compared with the header; None where there are none, or damaged ones."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
        if header.pop("hash") != _header_hash(header):
            return None
        with (folder / WEIGHTS).open("rb") as file:
            if os.fstat(file.fileno()).st_size != header["num_bytes"]:
                return None
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    with contextlib.suppress(OSError):  # a file system or a kernel without huge pages for files
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)  # keeps the mapping; cannot be written
    digest = xxhash.xxh3_128()
    for start in range(0, data.nbytes, _HASHED_AT_ONCE):
        digest.update(data[start : start + _HASHED_AT_ONCE].data)
        progress("weights", min(start + _HASHED_AT_ONCE, data.nbytes), data.nbytes)
    if digest.hexdigest() != header["weights_hash"]:
        return None
    with contextlib.suppress(OSError):  # a cache that this user may only read
        os.utime(folder)
    shape = header["shape"]
    shape |= {"element_type": ElementType(shape["element_type"]), "sliding_windows": tuple(shape["sliding_windows"])}
    shape["matrix_sizes"] = {name: tuple(sizes) for name, sizes in shape["matrix_sizes"].items()}
    blobs = {name: data[offset : offset + num_bytes] for name, (offset, num_bytes) in header["blobs"].items()}
    return PackedModel(ModelSpec(**header["spec"]), DecoderWeights(DecoderShape(**shape), blobs))


def write_packed(cache: Path, key: PackedKey, packed: PackedModel) -> None:
    """Writes beside and renames, so that the folder is complete or absent; removes older ones of the same model.

    Call it with the model's lock held. Raises OSError, nothing left behind, when it cannot.
    """
    folder = cache / key.folder_name
    needed = sum(blob.nbytes + _PAGE for blob in packed.weights.blobs.values())
    _remove_old(cache, key)
    if shutil.disk_usage(cache).free < needed + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed", str(cache))
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{key.model}-", ignore_cleanup_errors=True) as name:
        unfinished = Path(name, "packed")
        unfinished.mkdir()
        blobs: dict[str, tuple[int, int]] = {}
        digest = xxhash.xxh3_128()
        with (unfinished / WEIGHTS).open("wb") as file:
            for blob_name, blob in packed.weights.blobs.items():
                gap = b"\0" * (-file.tell() % (_PAGE if blob_name.endswith(f".{PACKED}") else _LINE))
                blobs[blob_name] = (file.tell() + len(gap), blob.nbytes)
                for part in (gap, blob.data):
                    digest.update(part)
                    file.write(part)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        shape = {field.name: getattr(packed.weights.shape, field.name) for field in dataclasses.fields(DecoderShape)}
        header: dict[str, Any] = {
            "spec": asdict(packed.spec),
            "shape": shape,
            "blobs": blobs,
            "num_bytes": num_bytes,
            "weights_hash": digest.hexdigest(),
        }
        (unfinished / HEADER).write_text(json.dumps(header | {"hash": _header_hash(header)}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        unfinished.rename(folder)


def _header_hash(header: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode())


def _remove_old(cache: Path, key: PackedKey) -> None:
    """What other versions made of this model, what nobody used for long, and what killed processes left behind."""
    for path in cache.glob(f".{key.model}-*"):
        shutil.rmtree(path, ignore_errors=True)
    found = sorted(_folders(cache), reverse=True)
    same = [path for _, path in found if path.name.startswith(key.model) and path.name != key.folder_name]
    old = [path for used, path in found if used < time.time() - KEPT_SECONDS]
    for path in {*same[KEPT_FOR_A_MODEL:], *old}:
        shutil.rmtree(path, ignore_errors=True)


def _folders(cache: Path) -> Iterator[tuple[float, Path]]:
    """(last use, folder) of all packed weights."""
    for path in cache.iterdir():
        with contextlib.suppress(OSError):  # another process removes it at this moment
            if path.is_dir():
                yield path.stat().st_mtime, path


def _source_hash() -> str:
    digest = hashlib.sha256()
    root = Path(outrider.__file__).parent
    for part in MADE_BY:
        path = root / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.name}:".encode() + file.read_bytes())
    return digest.hexdigest()
