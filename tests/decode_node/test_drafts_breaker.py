from __future__ import annotations

from decode_node.draft_breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert [breaker.miss() for _ in range(5)] == [False] * 4 + [True]
    return breaker


def test_five_misses_in_a_row_open_it_and_a_success_in_between_starts_anew():
    breaker = Breaker(Clock())
    for _ in range(4):
        breaker.miss()
    breaker.success()
    for _ in range(4):
        breaker.miss()
    assert not breaker.is_open
    breaker.miss()
    assert breaker.is_open
    assert breaker.num_openings == 1


def test_while_open_it_lets_a_probe_through_once_a_second():
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.may_send()
    clock.now = 1.0
    assert breaker.may_send()
    breaker.probed()
    assert not breaker.may_send()
    clock.now = 2.0
    assert breaker.may_send()


def test_a_success_closes_it():
    breaker = opened(Clock())
    assert breaker.success()
    assert not breaker.is_open
    assert breaker.may_send()
    assert not breaker.success()
