"""llama.cpp's server: compiled here for this processor, and as `xllamacpp`, a wheel for every processor with AVX2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asking import StreamAsker, http_stream, is_healthy
from environment import Environment
from gguf_files import GGUF_DTYPES, LlamaCpp, gguf_file
from peer import Server, Setup, Started, native_dtypes
from process import ServerProcess, free_port

MAX_CLIENTS = 16  # slots
TOKENS_PER_CLIENT = 1024
LOOKUP_N, LOOKUP_M = 3, 6  # lengths of the n-gram that is looked up, and of the draft
WHEEL = "xllamacpp==2026.10.11549"
WHEEL_SCRIPT = Path(__file__).resolve().parent / "serve_xllamacpp.py"


class LlamaCppServer(ABC):
    """The server by its HTTP API. Subclasses say how it is started."""

    name: str
    has_lookup = True
    max_clients = MAX_CLIENTS
    all_dtypes = GGUF_DTYPES

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        LlamaCpp().make_gguf(model, dtype)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        port = free_port()
        command = self.command(setup, port=port, context=MAX_CLIENTS * context_tokens(setup))
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

    @abstractmethod
    def command(self, setup: Setup, *, port: int, context: int) -> Sequence[str]:
        """Returns the command that serves on `port`. `context`: number of tokens of all slots together."""


class CompiledServer(LlamaCppServer):
    name = "llama_cpp"

    def install(self, model: Path, dtype: str) -> None:
        LlamaCpp().program("llama-server")
        super().install(model, dtype)

    def command(self, setup: Setup, *, port: int, context: int) -> Sequence[str]:
        command = [str(LlamaCpp().program("llama-server")), "-m", str(gguf_file(setup.model, setup.dtype))]
        command += ["--host", "127.0.0.1", "--port", str(port), "-t", str(setup.num_threads)]
        command += ["-np", str(MAX_CLIENTS), "-c", str(context), "--cache-ram", "0"]
        if setup.speculation:
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP_N)]
            command += ["--spec-ngram-simple-size-m", str(LOOKUP_M)]
        return command


class WheelServer(LlamaCppServer):
    name = "xllamacpp"

    def __init__(self) -> None:
        self._environment = Environment("xllamacpp")

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install((WHEEL,))
        super().install(model, dtype)

    def command(self, setup: Setup, *, port: int, context: int) -> Sequence[str]:
        command = [str(self._environment.python), str(WHEEL_SCRIPT), str(gguf_file(setup.model, setup.dtype))]
        command += ["--port", str(port), "--threads", str(setup.num_threads)]
        command += ["--slots", str(MAX_CLIENTS), "--context", str(context)]
        return command + (["--lookup", str(LOOKUP_N), str(LOOKUP_M)] if setup.speculation else [])


def context_tokens(setup: Setup) -> int:
    """Returns the number of tokens of a slot: at least the longest prompt and its answer."""
    return max(TOKENS_PER_CLIENT, setup.max_prompt_tokens + setup.max_tokens)


def _token_ids(event: Any) -> list[int]:
    """Returns the new token ids in an event of a stream. The last event, which has `stop`, contains none."""
    return [] if event.get("stop") else list(event.get("tokens") or ())
