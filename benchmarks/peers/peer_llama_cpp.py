"""llama.cpp's server, built from the sources in llama-cpp-python's sdist."""

from __future__ import annotations

import os
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asking import StreamAsker, http_stream, is_healthy
from environment import INSTALL_SECONDS, Environment
from peer import Server, Setup, Started, native_dtypes
from process import PeerError, ServerProcess, free_port, run_logged

SDIST = "llama-cpp-python==0.3.36"
CONVERTER = ("torch==2.13.0", "transformers>=5.16,<5.20", "sentencepiece", "numpy")
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)
MAX_CLIENTS = 16  # slots
TOKENS_PER_CLIENT = 1024
LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "6")
GGUF_TYPES = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int8": "q8_0"}


class LlamaCpp:
    name = "llama_cpp"
    has_lookup = True
    max_clients = MAX_CLIENTS

    def __init__(self) -> None:
        self._environment = Environment("llama_cpp")
        self._directory = self._environment.directory
        self._sources = self._directory / "source"
        self._server = self._directory / "build" / "bin" / "llama-server"

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path) -> None:
        self._environment.install(CONVERTER)
        if not self._sources.exists():
            self._unpack()
        if not self._server.exists():
            build = str(self._directory / "build")
            sources = str(self._sources / "vendor" / "llama.cpp")
            self._run("cmake", "-S", sources, "-B", build, *OPTIONS)
            self._run("cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count() or 1))
        for kind in GGUF_TYPES.values():
            self._convert(model, kind)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        if setup.dtype not in GGUF_TYPES:
            raise PeerError(f"dtype {setup.dtype} is none of {', '.join(GGUF_TYPES)}")
        port = free_port()
        command = [str(self._server), "-m", str(self._gguf(setup.model, GGUF_TYPES[setup.dtype]))]
        command += ["--host", "127.0.0.1", "--port", str(port), "-t", str(setup.num_threads)]
        tokens = max(TOKENS_PER_CLIENT, setup.max_prompt_tokens + setup.max_tokens)
        command += ["-np", str(MAX_CLIENTS), "-c", str(MAX_CLIENTS * tokens), "--cache-ram", "0"]
        if setup.speculation:
            command += LOOKUP
        with ServerProcess(command, environment={}, log=setup.log) as process:
            process.wait_until(lambda: is_healthy(port), seconds=setup.start_seconds)
            body = {
                "n_predict": setup.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_tokens": True,
                "cache_prompt": False,
            }
            stream = http_stream(port, "/completion", body, read=_token_ids, seconds=setup.answer_seconds)
            yield Server(process, StreamAsker(stream, max_tokens=setup.max_tokens))

    def _unpack(self) -> None:
        download = self._directory / "sdist"
        self._run(
            *(str(self._environment.python), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"),
            *(SDIST, "-d", str(download)),
        )
        (archive,) = download.glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(download, filter="data")
        (unpacked,) = (path for path in download.iterdir() if path.is_dir())
        unpacked.rename(self._sources)

    def _convert(self, model: Path, kind: str) -> None:
        target = self._gguf(model, kind)
        if target.exists():
            return
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_suffix(".part")
        script = self._sources / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
        self._run(
            str(self._environment.python), str(script), str(model), "--outtype", kind, "--outfile", str(unfinished)
        )
        unfinished.rename(target)

    def _gguf(self, model: Path, kind: str) -> Path:
        return self._directory / "models" / f"{model.name}-{kind}.gguf"

    def _run(self, *command: str) -> None:
        run_logged(command, log=self._environment.log, seconds=INSTALL_SECONDS)


def _token_ids(event: Any) -> list[int]:
    """Returns the new token ids in an event of a stream. The last event, which has `stop`, contains none."""
    return [] if event.get("stop") else list(event.get("tokens") or ())
