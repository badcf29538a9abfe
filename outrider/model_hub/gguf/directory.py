"""The directory in transformers' layout that stands for a GGUF model: small text files that are written once.

The weights stay in the GGUF file, which `gguf.json` names, together with the table of tensors. Whoever opens the
directory reads neither the file's header nor its vocabulary. The directory of an architecture that is not in FAMILIES
has dequantised weights, written by transformers, instead of `gguf.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from outrider.cache_directory import locked, remove_unused
from outrider.engine.cpu_kernels.matrices import to_float32
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import TOKENIZER_FILE, read_json
from outrider.model_hub.fingerprint import GGUF_TABLE, cached_sha256, gguf_files
from outrider.model_hub.gguf.config import make_config, matrices_dtype
from outrider.model_hub.gguf.families import FAMILIES, ROTATION_FACTORS
from outrider.model_hub.gguf.header import GgufHeader, TensorEntry, read_header
from outrider.model_hub.gguf.tensors import open_tensors, read_tensor
from outrider.model_hub.gguf.tokenizer import GgufVocabulary
from outrider.model_hub.lazy_tensors import Tensors
from outrider.progress import Progress, no_progress

_VERSION = 1
"""Increases when the text files' content changes for the same GGUF file."""
_PART = re.compile(r"(?P<start>.+-)(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Matches the name of a part of a split model."""


def find_files(path: Path) -> list[Path]:
    """Returns the files of a GGUF model in order. `path`: a file, the first of several parts, or a directory.

    Raises: ModelError if a file is missing or cannot be read, or if the directory does not have exactly one model.
    """
    if path.is_dir():
        # Projectors turn images into tokens; they belong to another file's model.
        names = sorted(each.name for each in path.glob("*.gguf") if not each.name.startswith("mmproj"))
        firsts = [name for name in names if (part := _PART.fullmatch(name)) is None or int(part["number"]) == 1]
        if len(firsts) != 1:
            found = f"{len(firsts)} GGUF models: give one of {', '.join(firsts)}" if firsts else "no GGUF model"
            raise ModelError(f"{path} has {found}")
        path = path / firsts[0]
    path = path.absolute()  # a link may have another name than its target, as in the cache of the hub
    part = _PART.fullmatch(path.name)
    count = int(part["count"]) if part else 1
    files = [path.with_name(f"{part['start']}{at + 1:05}-of-{count:05}.gguf") if part else path for at in range(count)]
    if path != files[0]:
        raise ModelError(f"{path} is a later part of a split model: give the first part, {files[0].name}")
    if missing := [file.name for file in files if not os.access(file, os.R_OK)]:
        raise ModelError(f"{path.parent} lacks {', '.join(missing)}, or user {os.getuid()} may not read them")
    return files


def gguf_directory(path: Path, cache: Path, *, progress: Progress = no_progress) -> Path:
    """Returns the directory of a GGUF model's text files, which is complete. Writes it at the first call.

    Any number of processes may call it concurrently; one works and the others wait for it and report stage "wait".
    `path`: see `find_files`.

    Raises: ModelError if the files are damaged, or their architecture, types or tokenizer are not supported, or the
    cache cannot be written.
    """
    files = find_files(path)
    digest = hashlib.sha256(repr((_VERSION, [(str(file), cached_sha256(file, cache)) for file in files])).encode())
    directories = cache / "gguf"
    directory = directories / f"{files[0].stem}-{digest.hexdigest()[:16]}"
    try:
        if not directory.is_dir():
            with locked(cache / "gguf.lock", while_waiting=lambda: progress("wait", 0, 0)):
                if not directory.is_dir():
                    directories.mkdir(exist_ok=True)
                    remove_unused(directories.iterdir())
                    _write(files, directory, progress)
    except OSError as error:
        raise ModelError(
            f"the model cache {cache} cannot be written by user {os.getuid()} ({error.strerror or error}): let that "
            "user write there, make room, or choose another directory with OUTRIDER_CACHE_DIR"
        ) from error
    with suppress(OSError):
        os.utime(directory)  # marks it as used
    return directory


def open_directory(directory: Path) -> tuple[Tensors, list[TensorEntry]]:
    """Opens a directory that `gguf_directory` returned. Returns the tensors, and their entries in the GGUF files.

    Raises: ModelError if the GGUF files are missing or changed.
    """
    table = read_json(directory / GGUF_TABLE)
    files = gguf_files(table)
    entries = [TensorEntry(name, kind, tuple(shape), offset, at) for name, kind, shape, offset, at in table["tensors"]]
    head_dim = read_json(directory / "config.json")["head_dim"]
    return open_tensors(files, entries, table["architecture"], head_dim), entries


def _write(files: Sequence[Path], directory: Path, progress: Progress) -> None:
    """Leaves `directory` complete or absent: the files are written to another directory, which is then renamed."""
    work = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f"{directory.name}.tmp-"))
    try:
        _convert(files, work, progress)
        work.chmod(0o755)
        work.rename(directory)
    except (OSError, ModelError):
        raise
    except Exception as error:  # metadata of other types, or what `tokenizers` does not accept
        raise ModelError(f"{files[0]} cannot be converted: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(files: Sequence[Path], work: Path, progress: Progress) -> None:
    """Writes all files into `work`. Of an architecture that only transformers reads, this includes the weights."""
    progress("convert", 0, 2)
    headers = [read_header(path, at) for at, path in enumerate(files)]
    header = GgufHeader(headers[0].metadata, [entry for each in headers for entry in each.tensors])
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{files[0]} is a GGUF file of type {kind}, not a model")
    if (count := header.metadata.get("split.count") or 1) != len(files):
        raise ModelError(f"{files[0]} is one of {count} parts: name the first …-00001-of-{count:05}.gguf, and so on")
    architecture = str(header.metadata.get("general.architecture"))
    contents: dict[str, Any] = {}
    if architecture in FAMILIES:
        small = [entry for entry in header.tensors if entry.name in ROTATION_FACTORS]
        factors = {entry.name: to_float32(read_tensor(files, entry)) for entry in small}
        contents["config.json"] = config = make_config(header, factors)
        open_tensors(files, header.tensors, architecture, config["head_dim"])  # refuses unknown tensors
        contents[GGUF_TABLE] = {
            "architecture": architecture,
            "files": [{"path": str(path), "size": path.stat().st_size} for path in files],
            "tensors": [astuple(entry) for entry in header.tensors],
        }
    progress("convert", 1, 2)
    vocabulary = GgufVocabulary.of(header.metadata)
    contents |= {TOKENIZER_FILE: vocabulary.make_tokenizer().to_str(), **vocabulary.text_files()}
    if architecture not in FAMILIES:
        from outrider.model_hub.gguf.others import write_dequantised  # imports torch

        write_dequantised(files[0], architecture, matrices_dtype(header), work)
    for name, content in contents.items():
        (work / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (work / name).write_text(text, encoding="utf-8")
    progress("convert", 2, 2)
