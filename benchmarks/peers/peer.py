"""The interface of a peer: a server that can be installed, started with the same model, and asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asking import LineServer, StreamAsker
from process import ServerProcess

from outrider.bench.load import AnswerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings with which a peer is started. `speculation`: whether it uses prompt lookup."""

    model: Path  # directory with config.json, model.safetensors and tokenizer.json, or a GGUF file
    dtype: str  # one of the peer's `all_dtypes`
    speculation: bool
    max_tokens: int  # per answer
    max_prompt_tokens: int  # per prompt
    num_threads: int
    log: Path
    start_seconds: float  # timeout of a start
    answer_seconds: float  # timeout of an answer


@dataclass(frozen=True, slots=True)
class Server:
    """A running peer."""

    process: ServerProcess
    asker: AnswerSource


class Peer(Protocol):
    """A kind of server. It must leave nothing behind that affects the next peer. Every method may raise PeerError."""

    name: str
    has_lookup: bool  # whether it supports prompt lookup
    max_clients: int  # maximum number of concurrent clients; 0: any number
    all_dtypes: Sequence[str]  # "gguf": the types that a GGUF file has

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        """Returns the dtypes to measure by default: those that may be the peer's fastest on this processor."""

    def install(self, model: Path, dtype: str) -> None:
        """Downloads, builds and converts what the peer needs into the peers' cache, unless it is already there."""

    def start(self, setup: Setup) -> AbstractContextManager[Server]:
        """Returns a context manager that runs the server, and ends all of its processes on exit."""


Started = Iterator[Server]


@contextmanager
def line_server(command: Sequence[str], setup: Setup, *, dtype: str = "", **variables: str) -> Started:
    """Starts a script that speaks by `serve_lines`. `command`: without the arguments that every such script takes.

    `dtype`: what the script calls it. `variables`: environment variables.
    """
    command = [*command, "--threads", str(setup.num_threads), "--max-tokens", str(setup.max_tokens)]
    command += ["--dtype", dtype] if dtype else []
    command += ["--lookup"] if setup.speculation else []
    with ServerProcess(command, environment=variables, log=setup.log, speaks_lines=True) as process:
        server = LineServer(process, seconds=setup.answer_seconds)
        process.wait_until(lambda: server.is_ready, seconds=setup.start_seconds)
        yield Server(process, StreamAsker(server.stream, max_tokens=setup.max_tokens))


def native_dtypes(cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Returns bfloat16. Adds float32, which may be faster, if the processor does not multiply bfloat16 natively."""
    return ("bfloat16",) if "avx512_bf16" in cpu_flags else ("bfloat16", "float32")
