"""Constraints are compiled in a process of its own. Only a constraint that exceeds its limits ends the process."""

import asyncio
import fcntl
import itertools
import json
import os
import signal
import termios
import threading

import pytest

from outrider.errors import CapacityError, InternalError, InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.request import Constraint, ConstraintKind
from router.text import constraint_checker
from router.text.constraint_checker import ConstraintChecker
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer

GOOD = Constraint(ConstraintKind.REGEX, "a+b")
BAD = Constraint(ConstraintKind.REGEX, "(a")
ENDLESS = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(400)]}),
)
"""A constraint that takes minutes to compile."""


@pytest.fixture
def checker():
    info = ModelInfo(
        name="m", vocab_size=300, max_model_len=10, eos_token_ids=(EOS_TOKEN_ID,), dtype="float32",
        fingerprint="f", vocabulary_fingerprint="v",
    )  # fmt: skip
    checker = ConstraintChecker(tiny_tokenizer().to_str().encode(), info)
    yield checker
    checker.close()


async def verdict(checker, constraint):
    """Returns the message of the error, or an empty text if there is none."""
    async with asyncio.timeout(60):
        (error,) = await asyncio.gather(checker.check(constraint), return_exceptions=True)
    if error is None:
        return ""
    if not isinstance(error, InvalidRequestError):
        raise error
    assert (error.field, error.reason) == (f"sampling.{constraint.kind}", "INVALID_CONSTRAINT")
    return error.message


def unread_bytes(pipe):
    return int.from_bytes(fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)), "little")


def stop(process):
    """Returns once the process has stopped. Until then it may still read what is written after the signal was sent."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


async def test_the_endless_one_is_refused_in_time_and_the_next_ones_are_compiled(checker):
    found = await asyncio.gather(*(verdict(checker, each) for each in (GOOD, ENDLESS, BAD, GOOD)))
    assert found[0] == found[3] == ""
    assert "needs more than 0.5 s to compile" in found[1]
    assert "unclosed group" in found[2]


async def test_a_verdict_is_kept(checker, monkeypatch):
    before = [await verdict(checker, each) for each in (GOOD, BAD)]
    monkeypatch.setattr(checker, "_compile", None)
    assert [await verdict(checker, each) for each in (GOOD, BAD)] == before


async def test_a_constraint_that_many_ask_for_is_compiled_once_as_long_as_one_of_them_waits(checker, monkeypatch):
    asked, release = [], threading.Event()

    def compile_constraint(constraint, _asked):
        asked.append(constraint)
        assert release.wait(60)

    monkeypatch.setattr(checker, "_compile", compile_constraint)
    first, *others = [asyncio.ensure_future(checker.check(GOOD, client=str(index // 3))) for index in range(5)]
    given_up = asyncio.ensure_future(checker.check(BAD))
    await asyncio.sleep(0)
    first.cancel()
    given_up.cancel()
    await asyncio.wait((first, given_up))
    others += [asyncio.ensure_future(checker.check(each)) for each in (BAD, GOOD)]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*others)
    assert asked == [GOOD, BAD]
    assert not checker._compiling


async def test_those_who_wait_for_one_compiling_share_its_failure(checker, monkeypatch):
    """Otherwise each would wait 20 s, one after the other, for a compiler that gets no CPU time."""
    asked, release = [], threading.Event()

    def compile_constraint(constraint, _asked):
        asked.append(constraint)
        assert release.wait(60)
        raise CapacityError("starved", reason="CONSTRAINTS_BUSY")

    monkeypatch.setattr(checker, "_compile", compile_constraint)
    waiting = [asyncio.ensure_future(checker.check(GOOD)) for _ in range(5)]
    await asyncio.sleep(0)
    release.set()
    async with asyncio.timeout(60):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [CapacityError] * 5
        assert asked == [GOOD]
        with pytest.raises(CapacityError):
            await checker.check(GOOD)
    assert asked == [GOOD] * 2, "a later request tries again"


async def test_nobody_waits_behind_all_that_another_client_has_before_the_same_constraint(checker, monkeypatch):
    asked, turns = [], threading.Semaphore(0)

    def compile_constraint(constraint, _asked):
        assert turns.acquire(timeout=60)
        asked.append(constraint)

    monkeypatch.setattr(checker, "_compile", compile_constraint)
    backlog = [Constraint(ConstraintKind.REGEX, f"a{{{number}}}") for number in range(20)]
    busy = [asyncio.ensure_future(checker.check(each, client="busy")) for each in (*backlog, GOOD)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(checker.check(GOOD, client="other"))
    turns.release(2)
    async with asyncio.timeout(60):
        await other
        turns.release(19)
        await asyncio.gather(*busy)
    assert asked[1] == GOOD
    assert len(asked) == 21


async def test_how_many_constraints_wait_depends_on_how_long_one_takes(checker, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(checker, "_compile", lambda _constraint, _asked: release.wait(60) and None)

    async def accepted(client):
        """Returns how many of a client's hundred constraints are queued."""
        tasks = [asyncio.ensure_future(checker.check(numbered(), client=client)) for _ in range(100)]
        for _ in range(10):  # a few turns of the event loop suffice, because the queue refuses at once
            await asyncio.sleep(0)
        refused = [error for task in tasks if task.done() and (error := task.exception())]
        assert all(isinstance(error, CapacityError) and error.reason == "CONSTRAINTS_BUSY" for error in refused)
        waiting.extend(tasks)
        return len(tasks) - len(refused)

    waiting, numbers = [], itertools.count()
    numbered = lambda: Constraint(ConstraintKind.REGEX, f"a{{{next(numbers)}}}")  # noqa: E731
    checker._seconds = 0.5
    assert [await accepted(client) for client in ("one", "another", "a third")] == [16, 16, 1]
    assert sum([await accepted(f"made up {number}") for number in range(10)]) <= 10
    for task in waiting:
        task.cancel()
    release.set()
    await asyncio.wait(waiting)
    checker._seconds = 0.05
    assert await accepted("one") == 100
    await asyncio.gather(*waiting[-100:])


async def test_a_process_that_was_killed_is_started_again(checker):
    assert await verdict(checker, GOOD) == ""
    process = checker._process
    process.kill()
    process.wait(10)
    assert "unclosed" in await verdict(checker, BAD)


async def test_a_failure_of_ours_is_not_the_clients(checker, monkeypatch):
    assert await verdict(checker, GOOD) == ""
    process = checker._process
    monkeypatch.setattr(checker, "_tokenizer", {"no tokenizer": "in it"})
    process.kill()
    process.wait(10)
    with pytest.raises(InternalError, match="ended with status 1"):
        await verdict(checker, BAD)


async def test_a_tokenizer_of_an_unknown_kind_supports_no_constraint(checker, monkeypatch):
    description = json.loads(tiny_tokenizer().to_str()) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
    unknown = {"tokenizer_json": json.dumps(description), "vocab_size": 300, "eos_token_ids": [2]}
    monkeypatch.setattr(checker, "_tokenizer", unknown)
    for _ in range(2):
        with pytest.raises(NotSupportedError, match=r"no constraints with this model's tokenizer.*BPEDecoder"):
            await verdict(checker, GOOD)


async def test_what_else_ends_the_process_says_nothing_of_a_constraint(checker):
    assert await verdict(checker, GOOD) == ""
    process = checker._process
    stop(process)  # before it reads the constraint
    asking = asyncio.create_task(verdict(checker, BAD))
    async with asyncio.timeout(10):
        while not unread_bytes(process.stdin):
            await asyncio.sleep(0)
    process.terminate()
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(InternalError, match="ended with status -15"):
        await asking
    assert "unclosed group" in await verdict(checker, BAD)


async def test_ctrl_c_is_not_for_the_process(checker):
    await verdict(checker, GOOD)
    assert os.getsid(checker._process.pid) != os.getsid(0)


async def test_a_process_that_is_stopped_is_given_up(checker, monkeypatch):
    """This holds even if the process has not read a long constraint."""
    assert await verdict(checker, GOOD) == ""
    monkeypatch.setattr(constraint_checker, "ANSWER_SECONDS", 0.5)
    stop(checker._process)
    with pytest.raises(CapacityError, match="timed out waiting for CPU"):
        await verdict(checker, Constraint(ConstraintKind.REGEX, "a" * 300_000))


async def test_closing_ends_the_process(checker):
    await verdict(checker, GOOD)
    process = checker._process
    checker.close()
    assert process.wait(10) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
