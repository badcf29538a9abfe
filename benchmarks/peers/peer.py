"""The interface of a peer: a server that can be installed, started with the same model, and asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from process import ServerProcess

from outrider.bench.load import AnswerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings with which a peer is started. `speculation`: whether it uses prompt lookup."""

    model: Path  # directory with config.json, model.safetensors and tokenizer.json
    dtype: str  # "auto", "float32", "bfloat16", "int8"
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

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        """Returns the dtypes to measure by default: those that may be the peer's fastest on this processor."""

    def install(self, model: Path) -> None:
        """Downloads, builds and converts what the peer needs into the peers' cache, unless it is already there."""

    def start(self, setup: Setup) -> AbstractContextManager[Server]:
        """Returns a context manager that runs the server, and ends all of its processes on exit."""


Started = Iterator[Server]


def native_dtypes(cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Returns bfloat16. Adds float32, which may be faster, if the processor does not multiply bfloat16 natively."""
    return ("bfloat16",) if "avx512_bf16" in cpu_flags else ("bfloat16", "float32")
