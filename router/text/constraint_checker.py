"""Compiles constraints before a request is admitted, in a separate process with limits on time and memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from outrider.constraints.compile_process import MAX_CPU_SECONDS
from outrider.errors import CapacityError, InternalError, InvalidRequestError, NotSupportedError, OutriderError
from outrider.node import ModelInfo
from outrider.own_modules import module_command
from outrider.request import Constraint
from outrider.service.telemetry.logging import get_logger
from router.text.tokenizer import MAX_WAITING_BYTES, EncodingQueue

ANSWER_SECONDS = 20.0
"""Seconds to wait for the compiler's answer. The process itself stops far earlier, unless the machine is busy."""
MAX_VERDICTS = 1024
BYTES_PER_SECOND = 2 << 20
"""Number of bytes for which a second of compiling counts in the queue.

Some patterns take half a second and end the process. If only their size counted, a few kilobytes of them would block
all new constraints for hours.
"""
NEWEST_WEIGHT = 0.25
"""Weight of the latest compilation in the moving average of durations."""

_LIMIT_SIGNALS = (signal.SIGVTALRM, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
"""Signals that end a process that uses too much CPU time or memory. Other signals do not depend on the constraint."""

_log = get_logger("constraints")


class ConstraintChecker:
    """Checks whether constraints compile. Owned by the event loop.

    The compiler process starts with the first constraint, and again after a constraint that ended the process.
    """

    def __init__(self, tokenizer_json: bytes, info: ModelInfo) -> None:
        self._tokenizer = {
            "tokenizer_json": tokenizer_json.decode(),
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
        }
        self._queue = EncodingQueue(1, max_client_bytes=MAX_WAITING_BYTES // 2, busy_reason="CONSTRAINTS_BUSY")
        # By client and hash. Of one client's requests with the same constraint, only the first is queued.
        self._compiling: dict[tuple[str, bytes], asyncio.Future[None]] = {}
        self._seconds = 0.0  # moving average of a compilation's duration
        self._process: subprocess.Popen[str] | None = None  # owned by the queue's thread
        # Error messages by the constraint's hash, most recently used last. None: the constraint compiles. The queue's
        # thread adds entries, too.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._is_closed = False

    async def check(self, constraint: Constraint, *, client: str = "") -> None:
        """Checks that the constraint compiles within the limits.

        Raises: InvalidRequestError if it does not; CapacityError if the queue is full; NotSupportedError if the kind of
        tokenizer is unknown.
        """
        asked = json.dumps(asdict(constraint))
        key = hashlib.sha256(asked.encode()).digest()
        while key not in self._verdicts:
            await self._compile_shared(key, constraint, asked, client)
        message = self._verdicts[key]
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if message is not None:
            raise InvalidRequestError(message, field=f"sampling.{constraint.kind}", reason="INVALID_CONSTRAINT")

    async def _compile_shared(self, key: bytes, constraint: Constraint, asked: str, client: str) -> None:
        """Compiles a constraint for the first of a client's requests that need it. The others get its error, if any.

        If the first request is cancelled, the others get no error, and one of them compiles the constraint.
        """
        if (asking := self._compiling.get((client, key))) is not None:
            await asyncio.shield(asking)
            return
        asking = self._compiling[client, key] = asyncio.get_running_loop().create_future()
        size = max(len(asked), round(self._seconds * BYTES_PER_SECOND))
        try:
            compile_once = partial(self._compile_once, key, constraint, asked)
            self._verdicts[key] = await self._queue.run(compile_once, client=client, num_bytes=size)
        except OutriderError as error:
            asking.set_exception(error)
            asking.exception()  # marks the error as retrieved, because perhaps no other request waits for it
            raise
        finally:
            del self._compiling[client, key]
            if not asking.done():
                asking.set_result(None)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._is_closed = True
        self._queue.close()
        if self._process is not None:
            self._process.kill()

    def _compile_once(self, key: bytes, constraint: Constraint, asked: str) -> str | None:
        """Calls `_compile` and times it, unless another request compiled the constraint meanwhile."""
        with suppress(KeyError):
            return self._verdicts[key]
        is_first, began_at = self._process is None, time.monotonic()
        try:
            message = self._verdicts[key] = self._compile(constraint, asked)
            return message
        finally:
            if not is_first:
                self._seconds += (time.monotonic() - began_at - self._seconds) * NEWEST_WEIGHT

    def _compile(self, constraint: Constraint, asked: str) -> str | None:
        """Returns the error message, or None if the constraint compiles. Starts the process if it is not running.

        Runs in the queue's thread.

        `asked`: the constraint as JSON. Raises: CapacityError, InternalError, NotSupportedError.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            if (message := _ask(self._process, json.dumps(self._tokenizer))) is not None:
                self._process.wait(ANSWER_SECONDS)  # the process exits by itself
                raise NotSupportedError(message, field=f"sampling.{constraint.kind}")
        try:
            return _ask(self._process, asked)
        except InternalError:
            status = self._process.wait(ANSWER_SECONDS)
            if self._is_closed or -status not in _LIMIT_SIGNALS:
                raise
            _log.warning("constraint exceeded the compiler's limits", kind=constraint.kind, signal=-status)
            return (
                f"the {constraint.kind} needs more than {MAX_CPU_SECONDS:g} s to compile, or too much memory: "
                "use fewer intersections and repetitions"
            )


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 runs this interpreter with our own module
        module_command("outrider.constraints.compile_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C must reach only the router, which closes the process's input when it ends
    )


def _ask(process: subprocess.Popen[str], asked: str) -> str | None:
    """Returns the process's answer. Raises: InternalError if it has ended; CapacityError if no answer comes in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + ANSWER_SECONDS
    watchdog = threading.Timer(ANSWER_SECONDS, process.kill)  # even writing blocks if the process is stopped
    watchdog.start()
    try:
        with suppress(BrokenPipeError):  # the process ended before it had read everything
            process.stdin.write(asked + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    if line:
        answer: str | None = json.loads(line)
        return answer
    status = process.wait(ANSWER_SECONDS)
    if time.monotonic() >= deadline:
        raise CapacityError("constraint compiler timed out waiting for CPU", reason="CONSTRAINTS_BUSY")
    raise InternalError(f"constraint compiler ended with status {status}")
