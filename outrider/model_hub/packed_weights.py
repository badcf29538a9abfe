"""Packed weights in the user's cache: written once, mapped read-only by every node whose kernels read them.

A folder for each, complete or absent: `weights`, all blobs one after the other, and
`header.json`, which names them and has a hash of each file. Nodes of one machine share the
pages of a mapped file. What a folder is known by (`PackedKey`) covers everything that the
bytes depend on, so that weights which are found need not be checked against the model or
head again.
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
from outrider.own_modules import module_command, tied
from outrider.progress import Progress, no_progress

HEADER, WEIGHTS = "header.json", "weights"
MADE_BY = (
    *("engine/cpu_kernels", "engine/feature_spec.py", "engine/features.py", "engine/model_runner.py"),
    *("engine/numerics.py", "engine/rotation.py", "heads", "heads/forms", "model_hub"),
)
"""Of the package: code that decides what is in a file, or whether it passed the check at load."""

PACKER = "outrider.heads.packer"
"""The process that packs a model and its head, whose code this package does not import: nodes run without torch."""
packs_here = False
"""Set by that process itself."""

WAIT_SECONDS = 1800.0
"""How long to wait for another process that packs the same, in seconds. Nobody waits for a killed one."""

KEPT_FOR_A_MODEL = 2
"""Number of older versions of a model or head that are kept beside the new one: the most recently used."""

_PAGE, _LINE = 4096, 64
_HASHED_AT_ONCE = 64 << 20
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedKey:
    """Where the weights are, and what their bytes depend on: a model and its settings, and what packs and checks it."""

    config: ModelConfig  # by which another process packs the same
    cache: Path
    model: str
    code: str

    @classmethod
    def of(cls, config: ModelConfig, directory: Path, kernels: KernelChoice) -> PackedKey:
        """Raises ModelError when files of the model are missing, OSError when one cannot be read."""
        assert kernels.library is not None, "torch's weights are not packed"
        model = (
            model_fingerprint(directory, dtype=config.dtype, cache=cache_directory(config)),
            file_sha256(directory / "config.json"),  # with what a fingerprint leaves out, such as its dtype
            (config.weights, config.max_model_len, kernels.path),
        )
        code = (file_sha256(kernels.library), _source_hash(), _version("torch"), _version("transformers"))
        return cls(config, cache_directory(config) / "packed", _digest(model), _digest(code))

    def of_addition(self, name: str, content: str) -> PackedKey:
        """Makes the key of what the same code makes for this model from `content`. Older ones have the same `name`."""
        return replace(self, model=_digest((self.model, name)), code=_digest((self.code, content)))

    @property
    def folder(self) -> Path:
        return self.cache / f"{self.model}-{self.code}"

    @property
    def refused(self) -> Path:
        """The file that is there if the kernels cannot compute the model or head."""
        return self.cache / f"{self.model}-{self.code}.refused"

    def can_be_packed(self) -> bool:
        """Returns whether another process is worth its time, as far as can be told without packing."""
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            return os.access(self.cache, os.W_OK | os.X_OK) and not self.refused.exists()
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Packed:
    """What a folder has, or will have."""

    about: Mapping[str, Any]  # as JSON has it
    blobs: Mapping[str, np.ndarray]  # each [num_bytes] uint8, aligned to 64 bytes or more


def open_packed(
    key: PackedKey,
    pack: Callable[[], Packed | None],
    *,
    is_read_in_parts: bool = False,
    progress: Progress = no_progress,
) -> tuple[Packed | None, str]:
    """What was packed before, or another process packs now, mapped; else what `pack` gives, which is left for others.

    Any number of processes may call it at once: one packs, the others wait for it and report stage "wait". A cache that
    cannot be used costs time and memory, nothing else: what `pack` gave, be it None, is returned with the reason.

    `is_read_in_parts`: only pages that this process goes on to read are resident. By default all are, as a model's must
    be: they count as used when its KV cache is sized (see outrider.engine.memory).
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
        except OSError as error:  # TimeoutError is one
            problem = str(error)
        else:
            if (packed := read()) is not None:
                return packed, ""
        made = pack()
        if made is None:
            with contextlib.suppress(OSError):
                if not key.refused.exists():
                    _remove_old(key)
                key.refused.touch()  # files that nobody touches leave the cache
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
    """Lets another process pack what `config` names; returns when it has ended, and its memory, torch's too, with it.

    A process that has torch anyway packs by itself. So it does what the other one could not, and says why it cannot.
    """
    if packs_here or "torch" in sys.modules:
        return
    try:
        with subprocess.Popen(  # noqa: S603 our own interpreter
            tied(module_command(PACKER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as packer:
            assert packer.stdin is not None
            assert packer.stdout is not None
            with packer.stdin as to:
                to.write(pickle.dumps(config))
            for line in packer.stdout:
                said = re.fullmatch(rb"step (\w+) (\d+) (\d+)\n", line)
                if said is not None:  # else printed by what the interpreter starts with
                    progress(said[1].decode(), int(said[2]), int(said[3]))
        problem = f"status {packer.returncode}" if packer.returncode else ""
    except OSError as error:  # no process can be started, or it has ended before it read what to pack
        problem = str(error)
    if problem:
        sys.stderr.write(f"{PACKER} failed ({problem}): this process packs by itself\n")


def read_packed(folder: Path, *, is_read_in_parts: bool = False, progress: Progress = no_progress) -> Packed | None:
    """Maps the weights, every byte of which is compared with the header; None where there are none, or damaged ones."""
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
    with contextlib.suppress(OSError):  # a file system or a kernel without huge pages for files
        memory.madvise(mmap.MADV_NOHUGEPAGE if is_read_in_parts else mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)  # keeps the mapping; cannot be written
    digest = xxhash.xxh3_128()
    for start in range(0, data.nbytes, _HASHED_AT_ONCE):
        digest.update(data[start : start + _HASHED_AT_ONCE].data)
        progress("weights", min(start + _HASHED_AT_ONCE, data.nbytes), data.nbytes)
    if digest.hexdigest() != header["weights_hash"]:
        return None
    if is_read_in_parts:
        memory.madvise(mmap.MADV_DONTNEED)
    with contextlib.suppress(OSError):  # a cache that this user may only read
        os.utime(folder)
    blobs = {name: data[offset : offset + num_bytes] for name, (offset, num_bytes) in header["blobs"].items()}
    return Packed(header["about"], blobs)


def write_packed(key: PackedKey, packed: Packed) -> None:
    """Writes beside and renames, so that the folder is complete or absent; removes older ones of the same model.

    Call it with the model's lock held. Raises OSError, nothing left behind, when it cannot.
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
        shutil.rmtree(key.folder, ignore_errors=True)  # a damaged one
        unfinished.rename(key.folder)


def _version(package: str) -> str:
    """Returns a package's version; empty where it is missing, since what was packed then was packed without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(parts: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _header_hash(header: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode())


def _remove_old(key: PackedKey) -> None:
    """Removes what other versions made of this model, what nobody used for long, and what killed processes left."""
    for path in key.cache.glob(f".{key.model}-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in key.cache.glob(f"{key.model}-*.refused"):
        with contextlib.suppress(OSError):  # as in a folder that several users share
            path.unlink()
    remove_unused(path for path in key.cache.iterdir() if path.suffix != ".lock")
    same = [path for path in key.cache.glob(f"{key.model}-*") if path.is_dir() and path != key.folder]
    for path in sorted(same, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_FOR_A_MODEL:]:
        shutil.rmtree(path, ignore_errors=True)


def _source_hash() -> str:
    digest = hashlib.sha256()
    root = Path(outrider.__file__).parent
    for part in MADE_BY:
        path = root / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.name}:".encode() + file.read_bytes())
    return digest.hexdigest()
