"""llama.cpp's programs, and the GGUF files that they make of the measured model for all peers that read GGUF."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from environment import Environment, borrowed_packages, peers_directory

SDIST = "llama-cpp-python==0.3.36"
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)
GGUF_TYPES = {"bfloat16": "bf16", "float32": "f32", "int8": "q8_0", "int4": "q4_k_m", "q4_0": "q4_0"}
GGUF_DTYPES = (*GGUF_TYPES, "gguf")
QUANTISED = ("int4", "q4_0")
"""Dtypes that llama.cpp's converter does not write. Its quantiser makes them of the file in bfloat16."""


class LlamaCpp:
    """llama.cpp from the sources in llama-cpp-python's sdist, compiled for this processor."""

    def __init__(self) -> None:
        self._environment = Environment("llama_cpp")
        self._sources = self._environment.directory / "source" / "vendor" / "llama.cpp"
        self._build = self._environment.directory / "build"

    def program(self, name: str) -> Path:
        """Returns the path of a program, which is compiled at the first call. Raises: PeerError."""
        path = self._build / "bin" / name
        if not path.exists():
            self._fetch()
            self._environment.run("cmake", "-S", str(self._sources), "-B", str(self._build), *OPTIONS)
            jobs = str(os.cpu_count() or 1)
            self._environment.run("cmake", "--build", str(self._build), "--target", name, "-j", jobs)
        return path

    def make_gguf(self, model: Path, dtype: str) -> Path:
        """Returns `gguf_file`, which is made at the first call. Raises: PeerError."""
        target = gguf_file(model, dtype)
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        if dtype in QUANTISED:
            source, quantiser = self.make_gguf(model, "bfloat16"), self.program("llama-quantize")
            self._environment.run(str(quantiser), str(source), str(unfinished), GGUF_TYPES[dtype])
        else:
            self._fetch()
            command = [str(self._environment.python), str(self._sources / "convert_hf_to_gguf.py"), str(model)]
            command += ["--outtype", GGUF_TYPES[dtype], "--outfile", str(unfinished)]
            self._environment.run(*command, **borrowed_packages())
        unfinished.rename(target)
        return target

    def _fetch(self) -> None:
        """Downloads and unpacks the sources. The environment has what the converter lacks in this project's."""
        self._environment.install(("sentencepiece",))
        if self._sources.exists():
            return
        download = self._environment.directory / "sdist"
        self._environment.run(
            *(str(self._environment.python), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"),
            *(SDIST, "-d", str(download)),
        )
        (archive,) = download.glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(download, filter="data")
        (unpacked,) = (path for path in download.iterdir() if path.is_dir())
        unpacked.rename(self._environment.directory / "source")


def gguf_file(model: Path, dtype: str) -> Path:
    """Returns the path of the model's GGUF file in `dtype`, which is `model` itself for the dtype "gguf"."""
    if dtype == "gguf":
        return model
    return peers_directory() / "gguf" / f"{model.name}-{GGUF_TYPES[dtype]}.gguf"
