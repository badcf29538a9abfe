"""Random walks of a request's machine through events that can occur. Scenarios' checks apply to each event.

A walk is recorded as a scenario (`tests.support.scenarios`), so that a failing walk can become a test.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.requests import events as on
from router.requests.attempt import Attempt
from router.requests.machine import Request
from router.requests.states import AttemptState, State
from tests.support.scenarios import Scenario

NUM_WALKS = 300
NUM_EVENTS = 60
REQUESTS = (
    "request max_tokens=8 window=30",
    "request max_tokens=8",
    "request max_tokens=5 n=2 window=30",
    "request max_tokens=8 stop=jk window=30",
    "request max_tokens=6 prompt_logprobs window=30",
    "request max_tokens=8 method=rejection",
    "request max_tokens=8 known=3 window=30",
)
Choice = tuple[int, str]  # a weight, and an event


class Walk:
    """One request, and the events that can occur next."""

    def __init__(self, seed: int) -> None:
        self.told: list[str] = []  # the scenario so far
        self.seen: set[object] = set()  # states of the request and its attempts, alone and as a tuple
        self._random = random.Random(seed)
        self._scenario = Scenario()
        self._sent: dict[tuple[int, int], int] = {}  # (attempt, sample) -> the next position that the node sends
        self._num_reading = 0
        self._num_nodes = 0
        self._tell(self._random.choice(REQUESTS))

    def run(self) -> None:
        """Makes the walk. Raises: AssertionError or KeyError if something is held twice, lost or forgotten."""
        for _event in range(NUM_EVENTS):
            choices = self._choices()
            [(_weight, line)] = self._random.choices(choices, [weight for weight, _line in choices])
            self._tell(line)
        self._scenario.ledger.end()

    def _tell(self, line: str) -> None:
        self.told.append(line)
        self._note(line)
        answers = self._scenario.tell(line)
        assert not any("InvalidTransition" in answer for answer in answers), answers
        ledger = self._scenario.ledger
        states = [attempt.state for attempt in ledger.machine.attempts]
        self.seen |= {ledger.machine.state, *states, tuple(states)}
        for attempt in ledger.machine.attempts:
            number = self._number_of(attempt)
            for start in attempt.opened.samples:
                known = len(attempt.opened.known_token_ids(start))
                self._sent.setdefault((number, start.sample), known)
        for sample in ledger.answer.samples:
            ids = sample.generated_token_ids
            assert ids == tuple(range(sample.start_position, sample.start_position + len(ids)))

    def _note(self, line: str) -> None:
        """Records the positions that nodes have sent, and whether there is a reader."""
        word, *words = line.split()
        if word == "tokens" and "sample=7" not in words:
            sample = next((int(each[7:]) for each in words if each.startswith("sample=")), 0)
            self._sent[int(words[0]), sample] = int(words[1].split("..")[1])
        self._num_reading += (word == "reader-attached") - (word == "reader-left")

    def _number_of(self, attempt: Attempt) -> int:
        ids = self._scenario.ledger.group_ids
        return next(number for number, group_id in ids.items() if group_id == attempt.group_id)

    # ------------------------------------------------------------ events that can occur

    def _choices(self) -> list[Choice]:
        ledger = self._scenario.ledger
        if ledger.choosing:
            return [(1, f"prefill-chosen {min(ledger.choosing)} {chosen}") for chosen in (self._new_node("p"), "none")]
        if ledger.num_hedges_wanted:  # until the hedge is placed or refused, only the router's own events can occur
            place = f"placed {self._new_node('d')} {self._new_node('p')} hedge"
            return [(8, place), (4, "not-placed"), (3, "fail ANSWER_MEMORY_FULL"), (1, "drop ANSWER_EVICTED")]
        choices = self._of_clients()
        if ledger.is_in_queue:
            decode, prefill = self._new_node("d"), self._new_node("p")
            choices += [(30, f"placed {decode} {prefill}"), (10, f"placed {decode}"), (1, "not-placed NO_NODE")]
            choices += [(2, f"placed {decode} {prefill} prefill_numerics=other")]
        live = {self._number_of(attempt): attempt for attempt in ledger.machine.attempts}
        for number in ledger.prefills:
            failure = "no-adapter" if number % 2 else "failed"
            choices += [(12, f"prefill {number} ok"), (1, f"prefill {number} lost"), (1, f"prefill {number} {failure}")]
            choices += [(12, f"prefill {number} logprobs=3")]
        for number in ledger.group_ids:
            choices += self._of_attempt(number, live[number]) if number in live else self._of_forgotten(number)
        return choices

    def _of_clients(self) -> list[Choice]:
        choices: list[Choice] = [
            (3, "wait 0.1"),
            (3, "wait 10"),
            (1, "cluster not_timely"),
            (1, "cluster"),
            (1, "read"),
        ]
        choices += [(2, "reader-left" if self._num_reading else "reader-attached")]
        if self._random.random() < 0.05:
            choices += [(3, "abort"), (1, "fail DRAINING"), (1, "drop ANSWER_EVICTED"), (3, "wait 31")]
            choices += [(1, "cluster full"), (1, "cluster full incomplete")]
        return choices

    def _of_attempt(self, number: int, attempt: Attempt) -> list[Choice]:
        doubts = [(2, f"late {number}"), (1, f"draining {number}")]
        choices: list[Choice] = [(3, f"on-time {number}")] if attempt.is_in_doubt else doubts
        choices += [(1, f"lost {number}"), (1, f"failed {number}")]
        match attempt.state:
            case AttemptState.OPENING:
                grant = f"granted {number}{'' if attempt.prefill else ' local'}"
                choices += [(30, grant), (1, f"rejected {number} NO_ROOM"), (1, f"rejected {number} TOO_LARGE")]
                choices += [(1, f"rejected {number} NO_ADAPTER")]
            case AttemptState.TRANSFERRING:
                choices += [(20, f"kv-ready {number}"), (2, f"kv-failed {number}"), (1, f"prefill-late {number}")]
                choices += [(1, f"kv-failed {number} other"), (1, f"granted {number} other")]
            case AttemptState.RETARGETING:
                choices += [
                    (20, f"granted {number}{'' if attempt.prefill else ' local'}"),
                    (2, f"kv-ready {number} other"),
                ]
                choices += [(1, f"granted {number} other"), (1, f"prefill-late {number}")]
            case AttemptState.DECODING if attempt.hold is not None and not attempt.is_kv_ready:
                choices += [(20, f"logprobs {number} 3"), (1, f"logprobs {number} 9")]
        if attempt.state is AttemptState.DECODING or attempt.is_kv_ready:
            choices += [choice for sample in attempt.running for choice in self._of_sample(number, sample)]
        return choices

    def _of_sample(self, number: int, sample: int) -> list[Choice]:
        first, answer = self._sent[number, sample], self._scenario.ledger.answer
        end = min(first + self._random.randint(1, 3), answer.samples[sample].last_position)
        if first == end:
            return [(20, f"done {number} sample={sample}")]
        choices = [(20, f"tokens {number} {first}..{end} sample={sample}")]
        choices += [
            (1, f"tokens {number} {first + 1}..{end + 1} sample={sample}"),
            (1, f"done {number} reason=aborted"),
        ]
        choices += [(1, f"tokens {number} {first}..{end} sample=7")]
        return [*choices, (1, f"done {number} sample={sample} reason=stop")]

    def _of_forgotten(self, number: int) -> list[Choice]:
        return [
            (1, f"tokens {number} 4..5"),
            (1, f"granted {number}"),
            (1, f"kv-ready {number}"),
            (1, f"lost {number}"),
        ]

    def _new_node(self, role: str) -> str:
        self._num_nodes += 1
        return f"{role}{self._num_nodes}"


def walk(seed: int) -> Walk:
    """Makes a walk. If it fails, its scenario is added to the error."""
    walked = Walk(seed)
    try:
        walked.run()
    except Exception as error:
        error.add_note("\n".join([f"walk {seed}:", *walked.told]))
        raise
    return walked


def test_nothing_is_lost_on_any_way():
    seen = set().union(*(walk(seed).seen for seed in range(NUM_WALKS)))
    assert seen >= {State.QUEUED, State.SERVING, State.CONCLUDING, State.ENDED, State.CLOSED}
    assert seen >= set(AttemptState) - {AttemptState.COMPLETED}
    assert (AttemptState.DECODING, AttemptState.DECODING) in seen, "no walk had two attempts that decode"


def nothing(*_arguments: object) -> None:
    """Replaces a method, as if the machine forgot to call it."""


def walk_all() -> None:
    for seed in range(NUM_WALKS):
        walk(seed)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Request, "_drop_attempt"),
        (Request, "_free"),
        (Request, "_leave_queue"),
        (Request, "_stop_timer"),
        (Request, "_conclude"),
        (Attempt, "_stop_prefill"),
        (Attempt, "_stop_timer"),
    ],
)
def test_a_machine_that_forgets_something_fails(monkeypatch: pytest.MonkeyPatch, owner: type, name: str):
    """A negative control: the walks detect a machine that leaves one thing undone."""
    monkeypatch.setattr(owner, name, nothing)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        walk_all()


@pytest.mark.parametrize(
    ("handlers", "event"),
    [
        (Request.TABLE[State.QUEUED], on.NotPlaced),
        (Request.TABLE[State.CONCLUDING], on.TimerFired),
        (Request.TABLE[State.ENDED], on.Placed),
        (Request.TABLE[State.ENDED], on.Dropped),
        (Attempt.TABLE[AttemptState.OPENING], on.TimerFired),
        (Attempt.TABLE[AttemptState.TRANSFERRING], on.TimerFired),
    ],
)
def test_a_machine_with_a_broken_handler_fails(monkeypatch: pytest.MonkeyPatch, handlers: Any, event: type):
    monkeypatch.setitem(handlers, event, nothing)
    with pytest.raises(AssertionError):
        walk_all()
