"""ik_llama.cpp, a fork of llama.cpp, from the wheel of ik-llama-cpp-python, which has the library but no server."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from environment import Environment
from gguf_files import GGUF_DTYPES, LlamaCpp, gguf_file
from peer import Setup, Started, line_server, native_dtypes
from peer_llama_cpp import MAX_CLIENTS, context_tokens

WHEEL = "ik-llama-cpp-python==0.1.5"
SCRIPT = Path(__file__).resolve().parent / "serve_ik_llama_cpp.py"


class IkLlamaCpp:
    name = "ik_llama_cpp"
    has_lookup = False
    max_clients = MAX_CLIENTS
    all_dtypes = GGUF_DTYPES

    def __init__(self) -> None:
        self._environment = Environment("ik_llama_cpp")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install((WHEEL,))
        LlamaCpp().make_gguf(model, dtype)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [str(self._environment.python), str(SCRIPT), str(gguf_file(setup.model, setup.dtype))]
        command += ["--slots", str(MAX_CLIENTS), "--context", str(MAX_CLIENTS * context_tokens(setup))]
        with line_server(command, setup) as server:
            yield server
