"""Packed weights in the user's cache: written once, mapped read-only by every node whose kernels read them.

Each model or head has a folder, which is complete or absent. In it, `weights` has all blobs end to end; `header.json`
has the blobs' names and a hash of each file. Nodes of one machine share the pages of a mapped file. A
folder's key (`PackedKey`) covers everything that the bytes depend on, so cached weights need not be checked against the
model or head again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import outrider
from outrider.cache_directory import locked, remove_unused
from outrider.engine.cpu_kernels.decoder_weights import PACKED
from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.fingerprint import file_sha256, model_fingerprint
from outrider.model_hub.locate import cache_directory
from outrider.own_modules import kill_with_parent, module_command
from outrider.progress import Progress, no_progress

HEADER, WEIGHTS = "header.json", "weights"
PACKING_MODULES = (
    *("engine/arrays.py", "engine/cpu_kernels", "engine/feature_spec.py", "engine/features.py"),
    *("engine/model_runner.py", "engine/numerics.py", "engine/rotation.py", "engine/scaled_rotations.py"),
    *("heads", "heads/forms", "model_hub", "model_hub/gguf", "model_hub/quantised"),
)
"""Modules of the package that determine what is packed, or whether a model passes the check at load."""

PACKER = "outrider.heads.packer"
"""The module of the process that packs a model and its head. Not imported here, because nodes run without torch."""
is_packer = False
"""Whether this process is the packer, which sets this to True."""

WAIT_SECONDS = 1800.0
"""Seconds to wait for another process that packs the same weights. A killed process does not delay others."""

MAX_OLD_VERSIONS = 2
"""Maximum number of older versions of a model or head that are kept: the most recently used ones."""

_PAGE, _LINE = 4096, 64
_HASHED_AT_ONCE = 64 << 20
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedKey:
    """The location of packed weights. Covers everything that the bytes depend on: model, settings and packing code."""

    config: ModelConfig  # settings with which another process packs the same weights
    cache: Path
    model: str
    code: str

    @classmethod
    def of(cls, config: ModelConfig, directory: Path, kernels: KernelChoice) -> PackedKey:
        """Makes the key of a model. Raises: ModelError if files are missing, OSError if one cannot be read."""
        assert kernels.library is not None, "torch's weights are not packed"
        model = (
            model_fingerprint(directory, dtype=config.dtype, cache=cache_directory(config)),
            file_sha256(directory / "config.json"),  # includes what a fingerprint omits, such as the dtype
            (config.weights, config.max_model_len, kernels.path),
        )
        code = (file_sha256(kernels.library), _source_hash(), _version("torch"), _version("transformers"))
        return cls(config, cache_directory(config) / "packed", _digest(model), _digest(code))

    def derive_key(self, name: str, content: str) -> PackedKey:
        """Makes the key of other data of this model, which the same code packs from `content`.

        All versions of this data share `name`.
        """
        return replace(self, model=_digest((self.model, name)), code=_digest((self.code, content)))

    @property
    def folder(self) -> Path:
        return self.cache / f"{self.model}-{self.code}"

    @property
    def refused(self) -> Path:
        """The path of a file that exists if the kernels cannot compute the model or head."""
        return self.cache / f"{self.model}-{self.code}.refused"

    def can_be_packed(self) -> bool:
        """Returns whether a packing process may succeed, as far as can be told in advance."""
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            return os.access(self.cache, os.W_OK | os.X_OK) and not self.refused.exists()
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Packed:
    """The content of a folder of packed weights."""

    about: Mapping[str, Any]  # JSON values
    blobs: Mapping[str, np.ndarray]  # each [num_bytes] uint8, aligned to 64 bytes or more


def open_packed(
    key: PackedKey,
    pack: Callable[[], Packed | None],
    *,
    is_read_in_parts: bool = False,
    progress: Progress = no_progress,
) -> tuple[Packed | None, str]:
    """Maps weights that are packed or being packed by another process; else calls `pack` and stores its result.

    Any number of processes may call it concurrently: one packs, the others wait for it and report stage "wait". If the
    cache cannot be used, the result of `pack`, possibly None, is returned with the reason.

    `is_read_in_parts`: whether only pages that this process reads become resident. By default all pages do,
    which a model needs: its pages must count as used when its KV cache is sized (see outrider.engine.memory).
    """
    read = partial(read_packed, key.folder, is_read_in_parts=is_read_in_parts, progress=progress)
    if (packed := read()) is not None:
        return packed, ""
    if key.can_be_packed():
        _pack_apart(key.config, progress)
        if (packed := read()) is not None:
            return packed, ""
    problem, lock = "", key.cache / f"{key.model}.lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, while_waiting=lambda: progress("wait", 0, 0), seconds=WAIT_SECONDS))
        except OSError as error:  # TimeoutError is an OSError
            problem = str(error)
        else:
            if (packed := read()) is not None:
                return packed, ""
        made = pack()
        if made is None:
            with contextlib.suppress(OSError):
                if not key.refused.exists():
                    _remove_old(key)
                key.refused.touch()  # also marks it as used: unused files are removed from the cache
        elif not problem:
            try:
                write_packed(key, made)
            except OSError as error:
                problem = str(error)
            else:
                if (packed := read()) is not None:
                    return packed, ""
                problem = f"what was written to {key.folder} cannot be read back"
        return made, problem


def _pack_apart(config: ModelConfig, progress: Progress) -> None:
    """Packs `config`'s model in another process and waits for its end, which frees all of its memory, torch's included.

    Does nothing in the packer, or if this process has imported torch and so can pack by itself. If the other process
    fails, the caller must also pack, which will report the error.
    """
    if is_packer or "torch" in sys.modules:
        return
    try:
        with subprocess.Popen(  # noqa: S603 our own interpreter
            kill_with_parent(module_command(PACKER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as packer:
            assert packer.stdin is not None
            assert packer.stdout is not None
            with packer.stdin as to:
                to.write(pickle.dumps(config))
            for line in packer.stdout:
                said = re.fullmatch(rb"step (\w+) (\d+) (\d+)\n", line)
                if said is not None:  # other lines were printed at interpreter start
                    progress(said[1].decode(), int(said[2]), int(said[3]))
        problem = f"status {packer.returncode}" if packer.returncode else ""
    except OSError as error:  # the process cannot start, or ended before it read the configuration
        problem = str(error)
    if problem:
        sys.stderr.write(f"{PACKER} failed ({problem}): this process packs the weights itself\n")


def read_packed(folder: Path, *, is_read_in_parts: bool = False, progress: Progress = no_progress) -> Packed | None:
    """Maps the weights and compares the hash of all bytes with the header's; None if they are absent or damaged."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
        if header.pop("hash") != _header_hash(header):
            return None
        with (folder / WEIGHTS).open("rb") as file:
            if os.fstat(file.fileno()).st_size != header["num_bytes"]:
                return None
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    with contextlib.suppress(OSError):  # the system may have no huge pages for files
        memory.madvise(mmap.MADV_NOHUGEPAGE if is_read_in_parts else mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)  # keeps the mapping alive; read-only
    digest = xxhash.xxh3_128()
    for start in range(0, data.nbytes, _HASHED_AT_ONCE):
        digest.update(data[start : start + _HASHED_AT_ONCE].data)
        progress("weights", min(start + _HASHED_AT_ONCE, data.nbytes), data.nbytes)
    if digest.hexdigest() != header["weights_hash"]:
        return None
    if is_read_in_parts:
        memory.madvise(mmap.MADV_DONTNEED)
    with contextlib.suppress(OSError):  # this user may have no right to write to the cache
        os.utime(folder)
    blobs = {name: data[offset : offset + num_bytes] for name, (offset, num_bytes) in header["blobs"].items()}
    return Packed(header["about"], blobs)


def write_packed(key: PackedKey, packed: Packed) -> None:
    """Writes to a temporary folder and renames it, so that the folder is complete or absent; removes older versions.

    Call it with the model's lock held. Raises: OSError, with nothing left behind, if it cannot write.
    """
    needed = sum(blob.nbytes + _PAGE for blob in packed.blobs.values())
    _remove_old(key)
    if shutil.disk_usage(key.cache).free < needed + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed", str(key.cache))
    with tempfile.TemporaryDirectory(dir=key.cache, prefix=f".{key.model}-", ignore_cleanup_errors=True) as name:
        unfinished = Path(name, "packed")
        unfinished.mkdir()
        blobs: dict[str, tuple[int, int]] = {}
        digest = xxhash.xxh3_128()
        with (unfinished / WEIGHTS).open("wb") as file:
            for blob_name, blob in packed.blobs.items():
                gap = b"\0" * (-file.tell() % (_PAGE if blob_name.endswith(f".{PACKED}") else _LINE))
                blobs[blob_name] = (file.tell() + len(gap), blob.nbytes)
                for part in (gap, blob.data):
                    digest.update(part)
                    file.write(part)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        header: dict[str, Any] = {
            "about": packed.about,
            "blobs": blobs,
            "num_bytes": num_bytes,
            "weights_hash": digest.hexdigest(),
        }
        (unfinished / HEADER).write_text(json.dumps(header | {"hash": _header_hash(header)}), encoding="utf-8")
        shutil.rmtree(key.folder, ignore_errors=True)  # a damaged folder
        unfinished.rename(key.folder)


def _version(package: str) -> str:
    """Returns a package's version; empty if it is not installed, because then weights are packed without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(parts: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _header_hash(header: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode())


def _remove_old(key: PackedKey) -> None:
    """Removes a model's other versions beyond MAX_OLD_VERSIONS, and its `.refused` files.

    Also removes the remains of killed processes, and all entries that have not been used for a long time.
    """
    for path in key.cache.glob(f".{key.model}-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in key.cache.glob(f"{key.model}-*.refused"):
        with contextlib.suppress(OSError):  # another user may own it, in a shared folder
            path.unlink()
    remove_unused(path for path in key.cache.iterdir() if path.suffix != ".lock")
    same = [path for path in key.cache.glob(f"{key.model}-*") if path.is_dir() and path != key.folder]
    for path in sorted(same, key=lambda path: path.stat().st_mtime, reverse=True)[MAX_OLD_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)


def _source_hash() -> str:
    digest = hashlib.sha256()
    root = Path(outrider.__file__).parent
    for part in PACKING_MODULES:
        path = root / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.name}:".encode() + file.read_bytes())
    return digest.hexdigest()
