"""Outrider as a peer: the whole stack of four processes, as `outrider up` starts it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer import Server, Setup, Started
from process import ServerProcess

from outrider.bench.load import RequestRecord, RouterAnswerSource
from outrider.bench.prompts import AnswerOptions, BenchPrompt
from outrider.client import AsyncClient

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("kv_cache.prefix_cache=false",)
PLAIN = ("decode_node.local_lookup=none",)
WEIGHTS = ("int8", "int4", "dequantized")
"""Values of the setting model.weights that are dtypes here."""


class Ours:
    name = "ours"
    has_lookup = True
    max_clients = 0
    all_dtypes = ("auto", "bfloat16", "float32", *WEIGHTS, "gguf")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return ("auto",)

    def install(self, model: Path, dtype: str) -> None:
        """Does nothing, since this environment already has Outrider."""

    @contextmanager
    def start(self, setup: Setup) -> Started:
        status = setup.log.with_suffix(".status.json")
        status.unlink(missing_ok=True)
        command = _command(setup, status)
        with ServerProcess(command, environment={"PYTHONPATH": str(ROOT)}, log=setup.log) as process:
            process.wait_until(status.exists, seconds=setup.start_seconds)
            process.wait_until(lambda: bool(_router(status)), seconds=setup.start_seconds)
            yield Server(process, _LazyAsker(_router(status), setup))


def _command(setup: Setup, status: Path) -> list[str]:
    settings: Sequence[str] = SETTINGS if setup.speculation else (*SETTINGS, *PLAIN)
    weights = setup.dtype if setup.dtype in WEIGHTS else "auto"
    dtype = setup.dtype if setup.dtype in ("bfloat16", "float32") else "auto"
    settings = (*settings, f"model.weights={weights}")
    command = [sys.executable, "-m", "outrider.cli.main", "up", "--port", "0", "--json-status", str(status)]
    command += ["--model", str(setup.model), "--dtype", dtype]
    command += ["--draft", "ngram" if setup.speculation else "none"]
    return command + [word for one in settings for word in ("--set", one)]


def _router(status: Path) -> str:
    """Returns the router's address, or "" while the cluster starts."""
    try:
        value: dict[str, Any] = json.loads(status.read_text(encoding="utf-8"))
    except ValueError:  # the status file is being written
        return ""
    return str(value.get("router") or "")


class _LazyAsker:
    """Makes a RouterAnswerSource on each event loop that asks, since a gRPC channel belongs to one loop."""

    def __init__(self, router: str, setup: Setup) -> None:
        self._router = router
        self._options = AnswerOptions(
            max_tokens=setup.max_tokens, ignore_eos=True, timeout_seconds=setup.answer_seconds
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asker: RouterAnswerSource | None = None

    async def ask(self, prompt: BenchPrompt, *, index: int, speculation: bool) -> RequestRecord:
        loop = asyncio.get_running_loop()
        if self._asker is None or loop is not self._loop:
            self._loop, self._asker = loop, RouterAnswerSource(AsyncClient(self._router), self._options)
        return await self._asker.ask(prompt, index=index, speculation=speculation)
