"""Constraints are compiled before a request is admitted: in a process of its own, within bounds of time and memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from outrider.constraints.compile_process import MAX_CPU_SECONDS
from outrider.errors import CapacityError, InternalError, InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.request import Constraint
from outrider.service.telemetry.logging import get_logger
from router.encoding_queue import EncodingQueue

ANSWER_SECONDS = 20.0
"""On a machine that has much else to do; the process itself stops far earlier."""
MAX_VERDICTS = 1024
MAX_VERDICT_BYTES = 4 << 20
"""Of the constraints of which the verdict is known."""

_TOO_MUCH = (signal.SIGVTALRM, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
"""Of a processor, or of memory; other signals say nothing of a constraint."""

_log = get_logger("constraints")


class ConstraintChecker:
    """Owned by the event loop. The process starts with the first constraint, and again after one that ended it."""

    def __init__(self, tokenizer_json: bytes, info: ModelInfo) -> None:
        self._tokenizer = {
            "tokenizer": tokenizer_json.decode(),
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
        }
        self._queue = EncodingQueue(1)
        self._process: subprocess.Popen[str] | None = None  # of the queue's thread
        self._verdicts: OrderedDict[Constraint, str | None] = OrderedDict()  # most recently asked for last
        self._num_bytes = 0  # of those constraints
        self._is_closed = False

    async def check(self, constraint: Constraint, *, client: str = "") -> None:
        """Raises: InvalidRequestError for one that cannot be compiled in time; CapacityError when too many wait;
        NotSupportedError where the tokenizer is of no known kind.
        """
        if constraint not in self._verdicts:
            size = _num_bytes(constraint)
            verdict = await self._queue.run(lambda: self._compile(constraint), client=client, num_bytes=size)
            if constraint not in self._verdicts:
                self._verdicts[constraint] = verdict
                self._num_bytes += size
        self._verdicts.move_to_end(constraint)
        while len(self._verdicts) > MAX_VERDICTS or self._num_bytes > MAX_VERDICT_BYTES:
            self._num_bytes -= _num_bytes(self._verdicts.popitem(last=False)[0])
        if constraint in self._verdicts and (message := self._verdicts[constraint]) is not None:
            raise InvalidRequestError(message, field=f"sampling.{constraint.kind}", reason="INVALID_CONSTRAINT")

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        self._is_closed = True
        self._queue.close()
        if self._process is not None:
            self._process.kill()

    def _compile(self, constraint: Constraint) -> str | None:
        """What is wrong. In the queue's thread. Raises: CapacityError, InternalError, NotSupportedError."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
            if (message := _ask(self._process, self._tokenizer)) is not None:
                self._process.wait(ANSWER_SECONDS)  # it ends
                raise NotSupportedError(message, field=f"sampling.{constraint.kind}")
        try:
            return _ask(self._process, asdict(constraint))
        except _EndedError as error:
            if self._is_closed or error.signal not in _TOO_MUCH:
                raise
            _log.warning("a constraint was too much for its compiler", kind=constraint.kind, signal=error.signal)
            return (
                f"the {constraint.kind} takes more than {MAX_CPU_SECONDS:g} s to compile, or too much memory: "
                "intersect fewer patterns, or repeat less"
            )

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "outrider.constraints.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's signals are for the router, with which its input ends
        )


class _EndedError(InternalError):
    """A signal has ended the process."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the compiler of constraints was ended by signal {number}")
        self.signal = number


def _ask(process: subprocess.Popen[str], message: dict[str, Any]) -> str | None:
    """Its answer. Raises: _EndedError; CapacityError when there is none in time; InternalError for a fault of ours."""
    assert process.stdin is not None
    assert process.stdout is not None
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    watchdog = threading.Timer(ANSWER_SECONDS, give_up)  # a process that is stopped leaves its input unread, too
    watchdog.start()
    line = ""
    try:
        with suppress(BrokenPipeError):  # it ended before it had read all
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
    finally:
        watchdog.cancel()
    if line:
        answer: str | None = json.loads(line)
        return answer
    status = process.wait(ANSWER_SECONDS)
    if is_late.is_set():
        raise CapacityError("compiling the constraint got no processor", reason="CONSTRAINTS_BUSY")
    if status >= 0:
        raise InternalError(f"the compiler of constraints has ended with {status}")
    raise _EndedError(-status)


def _num_bytes(constraint: Constraint) -> int:
    return len(constraint.text) + sum(map(len, constraint.options))
