"""Libraries from wheels that read GGUF files and have no server, each with a script here that speaks by lines."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from environment import Environment
from gguf_files import GGUF_DTYPES, LlamaCpp, gguf_file
from peer import Setup, Started, line_server, native_dtypes
from peer_llama_cpp import MAX_CLIENTS, context_tokens


class GgufLibrary:
    """A library that `serve_NAME.py` serves."""

    has_lookup = False
    max_clients = MAX_CLIENTS
    all_dtypes = GGUF_DTYPES

    def __init__(self, name: str, wheel: str) -> None:
        self.name = name
        self._wheel = wheel
        self._environment = Environment(name)

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install((self._wheel,))
        LlamaCpp().make_gguf(model, dtype)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        script = Path(__file__).resolve().parent / f"serve_{self.name}.py"
        command = [str(self._environment.python), str(script), str(gguf_file(setup.model, setup.dtype))]
        command += ["--slots", str(MAX_CLIENTS), "--context", str(MAX_CLIENTS * context_tokens(setup))]
        threads = {"RAYON_NUM_THREADS": str(setup.num_threads)}  # for libraries in Rust
        with line_server(command, setup, HF_HUB_OFFLINE="1", **threads) as server:
            yield server
