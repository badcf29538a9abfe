"""Named fault points, at which tests make a process die, stop, hang or slow down. Torch-free.

They do nothing unless the variable OUTRIDER_FAULTS is set when the process starts:

    OUTRIDER_FAULTS="decode.granted=kill; prefill.before_commit:2=stop; decode.step:*=delay:50"

In this example, the prefill node stops when it is about to commit for the second time. Without a number a fault
happens the first time that its point is reached, with `*` every time. It happens in the thread that reaches the point.
With OUTRIDER_FAULTS_ONCE=PATH each fault happens only once in all processes and restarts that share the path: the file
PATH.POINT records that the fault has happened, and holds the process's id. A test can disarm a point by writing this
file first, and rearm it by removing the file. `hold` waits until the file is emptied, which leaves the point disarmed,
or removed, which leaves it armed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from outrider.errors import ConfigError
from outrider.lossy_stream import drain_standard_streams

FAULTS_VARIABLE = "OUTRIDER_FAULTS"
ONCE_VARIABLE = "OUTRIDER_FAULTS_ONCE"

FAULT_POINTS: Mapping[str, str] = {
    "decode.before_grant": "an Open has arrived; nothing is reserved or answered",
    "decode.granted": "a Granted has been written to the router",
    "decode.first_frame": "the first KV frame of a transfer is about to be written into its blocks",
    "decode.between_frames": "a later KV frame is about to be written",
    "decode.before_commit_answer": "a transfer is complete here; the prefill node does not know yet",
    "decode.kv_ready": "a group's KV is complete; the router does not know yet",
    "decode.before_first_token": "a group's samples have joined the batch; no token of this attempt is computed",
    "decode.step": "a step begins",
    "decode.before_emit": "tokens of a step are committed; no router has heard of them",
    "decode.preempted": "a sequence has lost its KV to another and waits to be computed again",
    "decode.done": "a sample has ended; the router does not know yet",
    "prefill.received": "a Prefill call has arrived",
    "prefill.chunk": "a forward pass of prompt chunks is about to begin",
    "prefill.before_push": "a push is about to connect to the decode node",
    "prefill.frame": "a KV frame is about to be sent",
    "prefill.before_commit": "every frame is sent; the commit is not",
    "prefill.committed": "the decode node has answered the commit",
    "prefill.answered": "a Prefill call is about to be answered",
    "draft.hello": "a decode node's hello fits; the draft node's own is not sent",
    "draft.update": "newest states of a decode node have arrived",
    "draft.proposal": "proposals are about to be written to a decode node",
    "router.admitted": "a request has left the queue; no node knows of it",
    "router.opened": "an Open has been sent to a decode node",
    "router.granted": "a Granted has arrived",
    "router.token": "tokens have arrived; the client has not seen them",
    "router.before_finish": "a request has its last token; the client does not know yet",
}
"""All fault points, and the state in which each is reached."""

ACTIONS: Mapping[str, str] = {
    "kill": "SIGKILL to this process",
    "stop": "SIGSTOP to this process; SIGCONT continues it",
    "hang": "the thread blocks for good; the others go on",
    "hold": "the thread waits until the file of OUTRIDER_FAULTS_ONCE is empty or gone; the others go on",
    "delay:MS": "the thread sleeps for this many milliseconds",
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_HOLD_POLL_SECONDS = 0.002


@dataclass(slots=True)
class Fault:
    """A fault to inject: what to do when the program reaches `point`, and under which condition. Thread-safe."""

    point: str
    action: str  # "kill", "stop", "hang", "hold", "delay"
    delay_seconds: float = 0.0
    nth: int | None = 1  # None: every time
    once_path: str = ""  # a file that records that the fault has happened; empty: no record
    _num_reached: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self) -> None:
        with self._lock:
            self._num_reached += 1
            is_due = self.nth is None or self.nth == self._num_reached
        if is_due and self._is_first():
            sys.stderr.write(f"fault {self.point}: {self.action}\n")
            drain_standard_streams()
            self._happen()

    def _is_first(self) -> bool:
        if not self.once_path:
            return True
        path = Path(self.once_path)
        if path.exists():
            return False
        # The file appears together with its content: a later write could refill a file that a test has emptied.
        own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        own.write_text(str(os.getpid()))
        try:
            path.hardlink_to(own)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _happen(self) -> None:
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        elif self.action == "hang":
            threading.Event().wait()
        elif self.action == "hold":
            while self._is_held():
                time.sleep(_HOLD_POLL_SECONDS)
        else:
            time.sleep(self.delay_seconds)

    def _is_held(self) -> bool:
        try:
            return Path(self.once_path).stat().st_size > 0
        except FileNotFoundError:
            return False


def parse_faults(environ: Mapping[str, str]) -> dict[str, Fault]:
    """Returns the faults in the variables, by point. Raises: ConfigError that names the invalid part."""
    faults: dict[str, Fault] = {}
    for part in filter(None, (part.strip() for part in environ.get(FAULTS_VARIABLE, "").split(";"))):
        fault = _parse_fault(part, once=environ.get(ONCE_VARIABLE, ""))
        if fault.point in faults:
            raise ConfigError(f"{FAULTS_VARIABLE}: {fault.point} is given twice")
        faults[fault.point] = fault
    return faults


def _parse_fault(part: str, *, once: str) -> Fault:
    where, equals, what = (text.strip() for text in part.partition("="))
    point, _, times = where.partition(":")
    action, colon, milliseconds = what.partition(":")
    if point not in FAULT_POINTS:
        near = get_close_matches(point, FAULT_POINTS, n=1)
        hint = f"; {near[0]} is one" if near else ""
        raise ConfigError(f"{FAULTS_VARIABLE}: there is no fault point {point!r}{hint}")
    is_delay = action == "delay" and milliseconds.isdecimal()
    if not equals or not (is_delay or (action in ("kill", "stop", "hang", "hold") and not colon)):
        raise ConfigError(
            f"{FAULTS_VARIABLE}: {part!r} is not POINT[:NTH]=ACTION, an action being {', '.join(ACTIONS)}"
        )
    if times not in ("", "*") and not (times.isdecimal() and int(times) > 0):
        raise ConfigError(f"{FAULTS_VARIABLE}: {times!r} in {part!r} is neither a number from 1 nor *")
    if action == "hold" and not once:
        raise ConfigError(f"{FAULTS_VARIABLE}: {part!r} needs {ONCE_VARIABLE}")
    return Fault(
        point=point,
        action=action,
        delay_seconds=int(milliseconds) / 1000 if is_delay else 0.0,
        nth=None if times == "*" else int(times or 1),
        once_path=f"{once}.{point}" if once else "",
    )


def _do_nothing(point: str) -> None:
    return


def _chosen(environ: Mapping[str, str]) -> Callable[[str], None]:
    try:
        faults = parse_faults(environ)
    except ConfigError:
        return _do_nothing  # `parse_role_arguments` reads the variable again, and ends the process
    if not faults:
        return _do_nothing

    def reach(point: str) -> None:
        fault = faults.get(point)
        if fault is not None:
            fault.reach()

    return reach


fault_point: Callable[[str], None] = _chosen(os.environ)
"""Marks a point of `FAULT_POINTS`; does nothing unless a fault is due there."""
