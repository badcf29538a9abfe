"""transformers in the version that this project pins: its `generate`, and its continuous batching."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

from asking import LineServer, StreamAsker
from peer import Server, Setup, Started, native_dtypes
from process import ServerProcess

SCRIPT = Path(__file__).resolve().parent / "serve_transformers.py"
ROOT = SCRIPT.parents[2]


class Transformers:
    """One of the two ways to run transformers. Only `generate`, which takes one prompt at a time, has prompt lookup."""

    def __init__(self, name: str, *, batching: bool) -> None:
        self.name = name
        self.has_lookup = not batching
        self.max_clients = 0 if batching else 1
        self._way = "batching" if batching else "generate"

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path) -> None:
        """Does nothing, since this project's environment already has transformers."""

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [sys.executable, str(SCRIPT), str(setup.model), "--way", self._way, "--dtype", setup.dtype]
        command += ["--threads", str(setup.num_threads), "--max-tokens", str(setup.max_tokens)]
        command += ["--lookup"] if setup.speculation else []
        with ServerProcess(command, environment={"PYTHONPATH": str(ROOT)}, log=setup.log, speaks_lines=True) as process:
            server = LineServer(process, seconds=setup.answer_seconds)
            process.wait_until(lambda: server.is_ready, seconds=setup.start_seconds)
            yield Server(process, StreamAsker(server.stream, max_tokens=setup.max_tokens))
