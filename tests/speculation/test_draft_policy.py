"""When drafts are verified, on simulated steps whose cost is known."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.draft_policy import (
    POSITION_TOKENS,
    PRIOR_ACCEPTANCE,
    PRIOR_TOKENS,
    RETRY_STEPS,
    WINDOW,
    DraftPolicy,
    _Record,
)


@dataclass
class Machine:
    """A step takes base + per_row · rows seconds; a draft token is accepted with the sequence's probability."""

    base_seconds: float
    seconds_per_row: float
    acceptance: list[float]
    num_speculative_tokens: int = 5
    noise: float = 0.05
    seed: int = 1

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.num_speculative_tokens)
        self._random = random.Random(self.seed)
        self.drafted: list[list[int]] = [[] for _ in self.acceptance]

    def seconds(self, num_rows: int) -> float:
        return self.base_seconds + self.seconds_per_row * num_rows

    def step(self) -> tuple[int, float]:
        """One step of the whole batch: (tokens committed, seconds taken)."""
        num_rows = num_tokens = 0
        for sequence_id, acceptance in enumerate(self.acceptance):
            num_draft = self.policy.num_draft_tokens(sequence_id, maximum=self.num_speculative_tokens)
            self.drafted[sequence_id].append(num_draft)
            num_accepted = 0
            while num_accepted < num_draft and self._random.random() < acceptance:
                num_accepted += 1
            if num_draft:
                self.policy.observe_verdict(sequence_id, num_draft, num_accepted)
            num_rows += 1 + num_draft
            num_tokens += 1 + num_accepted
        seconds = self.seconds(num_rows) * self._random.uniform(1 - self.noise, 1 + self.noise)
        self.policy.observe_step(seconds, num_rows, len(self.acceptance))
        return num_tokens, seconds

    def throughput(self, num_steps: int) -> float:
        outcomes = [self.step() for _ in range(num_steps)]
        return sum(tokens for tokens, _ in outcomes) / sum(seconds for _, seconds in outcomes)

    @property
    def plain_throughput(self) -> float:
        return len(self.acceptance) / self.seconds(len(self.acceptance))

    def fixed_throughput(self, num_draft: int) -> float:
        """Expected, with every sequence drafting `num_draft` tokens in every step."""
        tokens = sum(sum(a**i for i in range(num_draft + 1)) for a in self.acceptance)
        return tokens / self.seconds(len(self.acceptance) * (1 + num_draft))


def one_client(acceptance: float, **changes) -> Machine:
    return Machine(0.030, 0.003, [acceptance], **changes)


def sixteen_clients(acceptance: float, **changes) -> Machine:
    return Machine(0.030, 0.003, [acceptance] * 16, **changes)


def test_a_new_sequence_drafts_as_many_tokens_as_configured():
    assert DraftPolicy(5).num_draft_tokens(1, maximum=8) == 5
    assert DraftPolicy(5).num_draft_tokens(1, maximum=2) == 2
    assert DraftPolicy(0).num_draft_tokens(1, maximum=8) == 0


def test_drafts_that_are_always_accepted_are_always_verified_in_full():
    machine = one_client(1.0)
    machine.throughput(200)
    assert set(machine.drafted[0]) == {5}


def test_drafts_that_are_never_accepted_stop_and_are_tried_again_every_32_steps():
    machine = sixteen_clients(0.0)
    machine.throughput(400)
    steps = [step for step, num_draft in enumerate(machine.drafted[3]) if num_draft]
    late = [step for step in steps if step > 64]
    assert len(late) >= 8
    assert {after - before for before, after in itertools.pairwise(late)} == {RETRY_STEPS}
    assert all(machine.drafted[3][step] <= 2 for step in late)  # a trial is cheap


def test_a_trial_waits_for_a_step_that_has_a_draft():
    machine = sixteen_clients(0.0)
    machine.throughput(40)
    policy = machine.policy
    for _ in range(100):
        policy.observe_step(0.05, 16, 16)
    assert policy.num_draft_tokens(3, maximum=5) > 0
    assert policy.num_draft_tokens(3, maximum=5) > 0
    policy.observe_verdict(3, 1, 0)
    assert policy.num_draft_tokens(3, maximum=5) == 0


def test_drafts_that_begin_to_pay_are_verified_again():
    machine = one_client(0.0)
    machine.throughput(200)
    machine.acceptance[0] = 0.95
    machine.throughput(150)
    assert sum(machine.drafted[0][-50:]) / 50 > 4


def test_sequences_are_judged_each_by_its_own():
    machine = Machine(0.030, 0.003, [0.95, 0.02] * 8)
    machine.throughput(300)
    late = [sum(drafted[100:]) / 200 for drafted in machine.drafted]
    assert min(late[0::2]) > 1.5
    assert max(late[1::2]) < 0.5


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("clients", [1, 4, 16])
def test_it_is_hardly_ever_slower_than_plain_decoding(acceptance, clients):
    machine = Machine(0.030, 0.003, [acceptance] * clients)
    machine.throughput(50)
    assert machine.throughput(800) > 0.97 * machine.plain_throughput


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("clients", [1, 4, 16])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(acceptance, clients):
    machine = Machine(0.030, 0.003, [acceptance] * clients)
    machine.throughput(50)
    best = max(machine.fixed_throughput(num_draft) for num_draft in range(6))
    assert machine.throughput(800) > 0.9 * best


def test_at_one_client_even_rare_hits_pay_and_at_sixteen_they_do_not():
    alone, crowded = one_client(0.35), sixteen_clients(0.35)
    alone.throughput(400)
    crowded.throughput(400)
    assert sum(alone.drafted[0][100:]) / 300 > 1
    assert sum(crowded.drafted[0][100:]) / 300 < 0.4


def test_when_rows_are_free_everything_is_drafted():
    machine = Machine(0.010, 0.0, [0.3] * 16)
    machine.throughput(300)
    assert sum(machine.drafted[0][-100:]) / 100 > 4


def test_steps_that_compute_prompts_say_nothing_about_the_cost_of_drafts():
    policy = DraftPolicy(5)
    for rows in (1, 3, 5) * 20:
        policy.observe_step(0.030 + 0.003 * rows, rows, 1)
    before = policy.row_price()
    policy.observe_step(2.0, 512, 1, num_prefill_rows=511)
    assert policy.row_price() == pytest.approx(before)


def test_a_forgotten_sequence_starts_afresh():
    policy = DraftPolicy(5)
    policy.observe_step(0.030, 1, 1)
    for _ in range(100):
        policy.observe_verdict(1, 5, 0)
    assert policy.num_draft_tokens(1, maximum=5) == 0
    policy.forget(1)
    policy.forget(2)
    assert policy.num_draft_tokens(1, maximum=5) == 5


@given(verdicts=st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=40))
def test_acceptance_is_that_of_the_last_verdicts_however_many_there_were(verdicts):
    """Against a walk over the window."""
    record = _Record()
    for verdict in verdicts:
        record.add(*verdict)
    window = verdicts[-WINDOW:]
    accepted = sum(num for _, num in window)
    decided = accepted + sum(num < drafted for drafted, num in window)
    overall = (accepted + PRIOR_TOKENS * PRIOR_ACCEPTANCE) / (decided + PRIOR_TOKENS)
    for position, found in enumerate(record.acceptance_by_position(8)):
        kept = sum(num > position for _, num in window)
        reached = sum(drafted > position and num >= position for drafted, num in window)
        assert found == pytest.approx((kept + POSITION_TOKENS * overall) / (reached + POSITION_TOKENS))
    assert record.balance(0.25) == pytest.approx(sum(num - 0.25 * drafted for drafted, num in window))
