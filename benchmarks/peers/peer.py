"""What a peer is: something that can be installed, started with the same model, and asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from process import ServerProcess

from outrider.bench.load import Asker


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a peer is started. `speculation`: with prompt lookup, else plain."""

    model: Path  # directory with config.json, model.safetensors and tokenizer.json
    dtype: str  # "auto", "float32", "bfloat16", "int8"
    speculation: bool
    max_tokens: int  # of every answer
    most_prompt_tokens: int  # of a prompt
    num_threads: int
    log: Path
    start_seconds: float  # how long a start may take
    answer_seconds: float  # how long an answer may take


@dataclass(frozen=True, slots=True)
class Server:
    """A peer that runs."""

    process: ServerProcess
    asker: Asker


class Peer(Protocol):
    """One server. Every method may raise PeerError; nothing of one peer may disturb the next."""

    name: str
    has_lookup: bool  # prompt lookup
    most_clients: int  # at a time; 0: any number

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        """What is measured where nobody asks for one dtype: all that could be its best on this processor."""

    def install(self, model: Path) -> None:
        """Downloads, builds and converts into the peers' cache; quick when it is there already."""

    def start(self, setup: Setup) -> AbstractContextManager[Server]:
        """Serving until left, then gone with every process of it."""


Started = Iterator[Server]


def native_dtypes(cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """bfloat16 where the processor multiplies it; elsewhere float32 may be faster, so that both count."""
    return ("bfloat16",) if "avx512_bf16" in cpu_flags else ("bfloat16", "float32")
