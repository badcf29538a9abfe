"""Constraints are compiled before a request is admitted: in a process of its own, within bounds of time and memory."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict

from outrider.constraints.compile_process import MAX_CPU_SECONDS
from outrider.errors import CapacityError, InternalError, InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.own_modules import module_command
from outrider.request import Constraint
from outrider.service.telemetry.logging import get_logger
from router.encoding_queue import EncodingQueue

ANSWER_SECONDS = 20.0
"""On a machine that has much else to do; the process itself stops far earlier."""
MAX_VERDICTS = 1024

_TOO_MUCH = (signal.SIGVTALRM, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
"""Of a processor, or of memory; other signals say nothing of a constraint."""

_log = get_logger("constraints")


class ConstraintChecker:
    """Owned by the event loop. The process starts with the first constraint, and again after one that ended it."""

    def __init__(self, tokenizer_json: bytes, info: ModelInfo) -> None:
        self._tokenizer = {
            "tokenizer_json": tokenizer_json.decode(),
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
        }
        self._queue = EncodingQueue(1)
        self._process: subprocess.Popen[str] | None = None  # of the queue's thread
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # by hash, most recently asked for last
        self._is_closed = False

    async def check(self, constraint: Constraint, *, client: str = "") -> None:
        """Raises: InvalidRequestError for one that cannot be compiled in time; CapacityError when too many wait;
        NotSupportedError where the tokenizer is of no known kind.
        """
        asked = json.dumps(asdict(constraint))
        key = hashlib.sha256(asked.encode()).digest()
        if key not in self._verdicts:
            self._verdicts[key] = await self._queue.run(
                lambda: self._compile(constraint, asked), client=client, num_bytes=len(asked)
            )
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if (message := self._verdicts[key]) is not None:
            raise InvalidRequestError(message, field=f"sampling.{constraint.kind}", reason="INVALID_CONSTRAINT")

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        self._is_closed = True
        self._queue.close()
        if self._process is not None:
            self._process.kill()

    def _compile(self, constraint: Constraint, asked: str) -> str | None:
        """What is wrong. `asked`: the constraint, as the process reads it. In the queue's thread.

        Raises: CapacityError, InternalError, NotSupportedError.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            if (message := _ask(self._process, json.dumps(self._tokenizer))) is not None:
                self._process.wait(ANSWER_SECONDS)  # it ends
                raise NotSupportedError(message, field=f"sampling.{constraint.kind}")
        try:
            return _ask(self._process, asked)
        except InternalError:
            status = self._process.wait(ANSWER_SECONDS)
            if self._is_closed or -status not in _TOO_MUCH:
                raise
            _log.warning("a constraint was too much for its compiler", kind=constraint.kind, signal=-status)
            return (
                f"the {constraint.kind} takes more than {MAX_CPU_SECONDS:g} s to compile, or too much memory: "
                "intersect fewer patterns, or repeat less"
            )


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 this interpreter, and our own module
        module_command("outrider.constraints.compile_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's signals are for the router, with which its input ends
    )


def _ask(process: subprocess.Popen[str], asked: str) -> str | None:
    """Its answer. Raises: InternalError when it has ended; CapacityError when there is no answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + ANSWER_SECONDS
    watchdog = threading.Timer(ANSWER_SECONDS, process.kill)  # a process that is stopped leaves its input unread, too
    watchdog.start()
    try:
        with suppress(BrokenPipeError):  # it ended before it had read all
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
        raise CapacityError("compiling the constraint got no processor", reason="CONSTRAINTS_BUSY")
    raise InternalError(f"the compiler of constraints has ended with {status}")
