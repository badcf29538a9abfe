"""Every kind of fault at every point of the protocol, and the check that clients notice nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.faults import FAULT_POINTS
from tests.faults.faulty_cluster import FaultyCluster, TooLateError
from tests.faults.requests import KINDS, Request

ACTIONS: Mapping[str, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP; SIGCONT when the answer has ended, for a router after five seconds",
    "hang": "the thread that is at the point blocks until the answer has ended",
    "close": "every connection of the process is reset",
    "slow": "whatever goes to or from the process takes 50 ms longer, until the answer has ended",
    "partition": "nothing reaches the process or leaves it until the answer has ended, for a router for three seconds",
}
AFTER_TOKENS = 5
MID_ANSWER = frozenset(("decode.step", "decode.before_emit", "decode.done", "router.token", "router.before_finish"))
"""Points that are armed once the client has enough tokens. The others are armed before the request is sent."""
SLOW_SECONDS = 0.05
ROUTER_STOP_SECONDS = 5.0  # longer than nodes wait for a silent router
ROUTER_PARTITION_SECONDS = 3.0
BOTH_STOP_SECONDS = 4.0
REACH_SECONDS = 20.0
RESUME_SECONDS = 30.0  # without a resume window, a request ends with its connection
ANSWER_SECONDS = 40.0
"""Seconds within which every answer must end, on a busy machine too."""
MAX_TRIES = 6
NUM_IN_CROWD = 12
NUM_SHORT = 80
NUM_TO_FORGET = 6
PROMPT_TO_FORGET_TOKENS = 1500


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    point: str
    action: str
    kind: str  # the request's kind, a key of KINDS
    then: str = ""  # point at which the node that takes over gets the same fault; "": it gets none

    @property
    def needs_store(self) -> bool:
        """Whether another router must take over the answer."""
        return self.point.startswith("router.") and self.action == "kill"

    def __str__(self) -> str:
        return f"{self.point}-{self.action}" + (f"-then-{self.then}" if self.then else "")


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a case that passed."""

    gap_seconds: float  # the longest time between two deltas
    attempts: int


def make_cases() -> tuple[Case, ...]:
    def cases() -> Iterator[tuple[str, str, str]]:
        for point in FAULT_POINTS:
            for action in ACTIONS:
                if not point.startswith("router.") or action not in ("kill", "hang"):
                    yield point, action, ""
        for then in ("decode.granted", "decode.before_first_token", "decode.step"):
            yield "decode.step", "kill", then
        yield "prefill.frame", "kill", "prefill.before_commit"
        yield "decode.kv_ready", "stop", "decode.before_grant"  # no decode node is left until the stopped ones go on
        for point in FAULT_POINTS:
            if point.startswith("router."):  # no "hang", which would equal "stop"
                yield point, "kill", ""

    kinds = list(KINDS)
    return tuple(
        Case(number, point, action, "drafts" if point.startswith("draft.") else kinds[number % len(kinds)], then)
        for number, (point, action, then) in enumerate(cases())
    )


CASES = make_cases()


class Matrix:
    """Runs cases on one cluster."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.cluster = cluster
        self._undisturbed: dict[tuple[str, int], dict[str, Any]] = {}

    def prepare(self, cases: Sequence[Case]) -> None:
        """Gets every answer once without a fault, then clears the prefix caches, so that each case has a hand-off."""
        self.cluster.wait_until_whole()
        asked = [request for case in cases for request in _asked(case)]
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda request: self._answer(*request), asked)
            self._undisturbed = dict(zip(asked, answers, strict=True))
        for number in range(NUM_TO_FORGET):
            self.cluster.client.complete([3 + number] * PROMPT_TO_FORGET_TOKENS, max_tokens=1)

    def run(self, case: Case) -> Result:
        """Runs a case. Raises AssertionError if anything differs, is missing, doubled, left behind or late."""
        for _ in range(MAX_TRIES - 1 if case.point in MID_ANSWER else 0):
            with contextlib.suppress(TooLateError):  # on a busy machine the answer may end before the point is armed
                return self._run(case)
        return self._run(case)

    def _run(self, case: Case) -> Result:
        cluster = self.cluster
        cluster.wait_until_whole()
        restarts = cluster.restarts()
        killed: list[str] = []
        requests: list[Request] = []
        try:
            if case.point in MID_ANSWER:
                requests = self._send(case)
                for request in requests:
                    request.wait_for_tokens(AFTER_TOKENS, timeout_seconds=ANSWER_SECONDS)
            cluster.points.arm(case.point)
            if case.point == "draft.hello":  # before the requests, since reconnecting takes longer than an answer
                cluster.network.close_connections("draft-0")
                self._strike(case.point, case.action, requests, killed)
                requests = self._send(case)
            else:
                requests = requests or self._send(case)
                self._strike(case.point, case.action, requests, killed)
            if case.then:
                cluster.points.arm(case.then)
                self._strike(case.then, case.action, requests, killed)
                if case.action == "stop":
                    time.sleep(BOTH_STOP_SECONDS)
                    cluster.thaw()
            told = [request.join(timeout_seconds=ANSWER_SECONDS) for request in requests]
        finally:
            cluster.undo()
        cluster.wait_until_whole()
        assert cluster.restarts() == {name: num + killed.count(name) for name, num in restarts.items()}
        for asked, answer in zip(_asked(case), told, strict=True):
            assert_same(answer, self._undisturbed[asked])
        return Result(max(request.longest_gap_seconds for request in requests), max(r.attempts for r in requests))

    def _send(self, case: Case) -> list[Request]:
        if case.point == "decode.preempted":  # makes nodes expect that long answers will be short
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _: self.cluster.client.complete("short", max_tokens=1), range(NUM_SHORT)))
        more = {"resume_window_seconds": RESUME_SECONDS} if case.point.startswith("router.") else {}
        return [Request(self.cluster.client, kind, number, **more) for kind, number in _asked(case)]

    def _answer(self, kind: str, number: int) -> dict[str, Any]:
        return Request(self.cluster.client, kind, number).join(timeout_seconds=ANSWER_SECONDS)

    def _strike(self, point: str, action: str, requests: Sequence[Request], killed: list[str]) -> None:
        """Applies the fault to the process that comes to the point, then lets that process go on unless it hangs."""
        cluster = self.cluster
        name = cluster.wait_reached(
            point,
            until=lambda: bool(requests) and all(request.is_done for request in requests),
            timeout_seconds=REACH_SECONDS,
        )
        cluster.inflict(action, name, slow_seconds=SLOW_SECONDS)
        if action == "kill":
            killed.append(name)
        if action != "hang":
            cluster.points.release(point)
        if name.startswith("router") and action == "stop":
            time.sleep(ROUTER_STOP_SECONDS)
            cluster.thaw()
        if name.startswith("router") and action == "partition":
            time.sleep(ROUTER_PARTITION_SECONDS)
            cluster.network.heal()


def _asked(case: Case) -> list[tuple[str, int]]:
    """Returns (kind, number) of the case's requests: one request, or more than fit in the cache at once."""
    if case.point == "decode.preempted":
        return [("drafts", 10_000 * (1 + index) + case.number) for index in range(NUM_IN_CROWD)]
    return [(case.kind, case.number)]


def assert_same(told: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for what, value in undisturbed.items():
        assert told[what] == value, f"another {what}: {told[what]} instead of {value}"
