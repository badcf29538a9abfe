"""Askers, which send a prompt as token ids and record the arrival time of every token of the answer."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from process import PeerError, ServerProcess

from outrider.bench.load import RequestRecord
from outrider.bench.prompts import BenchPrompt

MAX_CLIENTS = 64

Stream = Callable[[Sequence[int]], Iterator[list[int]]]
"""Takes a prompt's token ids and yields new token ids as they arrive. Blocking; raises PeerError or OSError."""


class StreamAsker:
    """An asker that reads a blocking stream in one thread per answer."""

    def __init__(self, stream: Stream, *, max_tokens: int) -> None:
        self._stream = stream
        self._max_tokens = max_tokens
        self._threads = ThreadPoolExecutor(MAX_CLIENTS)

    async def ask(self, prompt: BenchPrompt, *, index: int, speculation: bool) -> RequestRecord:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, prompt)

    def _ask(self, prompt: BenchPrompt) -> RequestRecord:
        token_ids: list[int] = []
        token_times: list[tuple[float, int]] = []
        error = message = ""
        sent_at = time.monotonic()
        try:
            for new in self._stream(prompt.content):
                if new:
                    token_times.append((time.monotonic(), len(new)))
                    token_ids += new
            if len(token_ids) != self._max_tokens:
                raise PeerError(f"{len(token_ids)} tokens came, of {self._max_tokens}")
        except (PeerError, OSError, http.client.HTTPException, ValueError, KeyError) as failure:
            error, message = type(failure).__name__, str(failure)
        return RequestRecord(
            prompt_id=prompt.id,
            kind=prompt.kind,
            sent_at=sent_at,
            finished_at=time.monotonic(),
            token_times=tuple(token_times),
            token_ids=tuple(token_ids),
            error=error,
            error_message=message,
        )


def http_stream(
    port: int, path: str, body: Mapping[str, Any], *, read: Callable[[Any], list[int]], seconds: float
) -> Stream:
    """Returns a stream of server-sent events over HTTP.

    `body`: the request, to which the prompt's ids are added. `read`: returns the new ids in an event.
    """

    def stream(prompt: Sequence[int]) -> Iterator[list[int]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({**body, "prompt": list(prompt)}), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise PeerError(f"HTTP {response.status}: {response.read(300)!r}")
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield read(json.loads(line.removeprefix(b"data: ")))
        finally:
            connection.close()

    return stream


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class LineServer:
    """A process that reads {"id", "prompt"} and writes {"id", "tokens"} or {"id", "done"}, one JSON object per line."""

    def __init__(self, process: ServerProcess, *, seconds: float) -> None:
        """`seconds`: timeout between two lines of one answer."""
        self._process = process
        self._seconds = seconds
        self._ids = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._writing = threading.Lock()
        self._end = ""  # why the process's output is no longer read; empty while it is still read
        self.is_ready = False
        threading.Thread(target=self._read, daemon=True).start()

    def stream(self, prompt: Sequence[int]) -> Iterator[list[int]]:
        """Yields the new token ids of one answer; see `Stream`."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._writing:
            if self._end:
                raise PeerError(self._end)
            number = next(self._ids)
            self._answers[number] = answer
            assert self._process.popen.stdin is not None
            self._process.popen.stdin.write(json.dumps({"id": number, "prompt": list(prompt)}) + "\n")
            self._process.popen.stdin.flush()
        while True:
            try:
                said = answer.get(timeout=self._seconds)
            except queue.Empty as error:
                raise PeerError(f"nothing for {self._seconds:g} s") from error
            if "error" in said:
                raise PeerError(said["error"])
            if "done" in said:
                return
            yield said["tokens"]

    def _read(self) -> None:
        assert self._process.popen.stdout is not None
        why = "the server has ended"
        try:
            for line in self._process.popen.stdout:
                if line.startswith("{"):  # libraries print, too
                    said = json.loads(line)
                    self.is_ready = self.is_ready or "ready" in said
                    if "id" in said:
                        self._answers[said["id"]].put(said)
        except ValueError as error:
            why = f"the server does not speak JSON: {error}"
        with self._writing:
            self._end = why
            for answer in self._answers.values():
                answer.put({"error": why})
