"""transformers in the version that this project pins: its `generate`, and its continuous batching."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

from peer import Setup, Started, line_server, native_dtypes

SCRIPT = Path(__file__).resolve().parent / "serve_transformers.py"
ROOT = SCRIPT.parents[2]


class Transformers:
    """One of the two ways to run transformers. Only `generate`, which takes one prompt at a time, has prompt lookup."""

    all_dtypes = ("bfloat16", "float32", "auto")

    def __init__(self, name: str, *, batching: bool) -> None:
        self.name = name
        self.has_lookup = not batching
        self.max_clients = 0 if batching else 1
        self._way = "batching" if batching else "generate"

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        """Does nothing, since this project's environment already has transformers."""

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [sys.executable, str(SCRIPT), str(setup.model), "--way", self._way]
        with line_server(command, setup, dtype=setup.dtype, PYTHONPATH=str(ROOT)) as server:
            yield server
