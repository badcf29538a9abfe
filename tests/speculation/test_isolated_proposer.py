"""A proposer that fails for some sequences."""

from __future__ import annotations

import pytest

from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.isolated import (
    ALL_COOLDOWN_SECONDS,
    COOLDOWN_SECONDS,
    MAX_FAILED_CALLS,
    IsolatedProposer,
)
from tests.support.scripted_proposer import ScriptedProposer

TEXT = tuple(range(60))


class Picky(ScriptedProposer):
    """A proposer that raises for every batch with a sequence in `bad`."""

    def __init__(self, *bad: int) -> None:
        super().__init__([TEXT])
        self.bad = set(bad)
        self.batches: list[list[int]] = []

    def propose(self, requests):
        batch = [request.sequence_id for request in requests]
        self.batches.append(batch)
        if self.bad & set(batch):
            raise RuntimeError("not these")
        return super().propose(requests)


class Isolated:
    """The wrapper, the failures that it reported, and a clock that only the test advances."""

    def __init__(self, *bad: int) -> None:
        self.now = 100.0
        self.inner = Picky(*bad)
        self.failures: list[int] = []
        self.proposer = IsolatedProposer(
            self.inner, on_failure=lambda _error, sequence_id: self.failures.append(sequence_id), clock=lambda: self.now
        )

    def served(self, num_sequences: int) -> set[int]:
        """Returns the sequences that got a draft."""
        requests = [ProposalRequest(index, TEXT[:10], 3) for index in range(num_sequences)]
        proposals = self.proposer.propose(requests)
        assert [proposal.sequence_id for proposal in proposals] == list(range(num_sequences))
        assert all(proposal.tree.length == 10 for proposal in proposals)
        return {proposal.sequence_id for proposal in proposals if proposal.tree.token_ids}


@pytest.mark.parametrize("bad", [(0,), (7,), (3, 4), (0, 1, 7)])
def test_only_those_that_fail_go_without(bad):
    isolated = Isolated(*bad)
    assert isolated.served(8) == set(range(8)) - set(bad)
    assert isolated.failures == list(bad)
    assert isolated.inner.forgotten == list(bad)


def test_one_that_has_failed_costs_no_call_for_a_while_and_is_tried_again():
    isolated = Isolated(3)
    isolated.served(8)
    isolated.inner.batches.clear()
    assert isolated.served(8) == set(range(8)) - {3}
    assert isolated.inner.batches == [[0, 1, 2, 4, 5, 6, 7]]
    isolated.now += COOLDOWN_SECONDS
    isolated.inner.bad.clear()
    assert isolated.served(8) == set(range(8))


def test_ten_bad_sequences_among_a_hundred_cost_the_ninety_good_ones_neither_drafts_nor_what_is_remembered():
    bad = set(range(3, 100, 10))
    isolated = Isolated(*bad)
    served: set[int] = set()
    requests = [ProposalRequest(index, TEXT[:10], 3) for index in range(100)]
    for _ in range(10):
        before = len(isolated.inner.batches)
        proposals = isolated.proposer.propose([each for each in requests if each.sequence_id not in served])
        served |= {each.sequence_id for each in proposals if each.tree}
        assert len(isolated.inner.batches) - before <= 3 * MAX_FAILED_CALLS  # work in one call is bounded
    assert served == set(range(100)) - bad
    assert set(isolated.inner.forgotten) == bad


def test_a_proposer_that_fails_for_all_is_soon_left_alone_for_a_while_and_keeps_most_of_what_it_remembers():
    isolated = Isolated(*range(256))
    for _ in range(8):
        assert isolated.served(256) == set()
    assert len(isolated.inner.batches) == MAX_FAILED_CALLS
    assert len(isolated.inner.forgotten) < 256 // 4
    isolated.inner.bad.clear()
    isolated.now += ALL_COOLDOWN_SECONDS
    assert isolated.served(256) == set(range(256)) - set(isolated.inner.forgotten)


def test_some_that_always_fail_keep_no_drafts_from_the_others_for_long():
    isolated = Isolated(*range(12))  # they come first, so one search ends before it has found all of them
    served = []
    for _ in range(30):
        served.append(len(isolated.served(128)))
        isolated.now += COOLDOWN_SECONDS / 10
    assert served.count(128 - 12) > 10


def test_forgetting_ends_the_wait():
    isolated = Isolated(0)
    isolated.served(1)
    isolated.inner.bad.clear()
    assert isolated.served(1) == set()
    isolated.proposer.forget(0)
    assert isolated.served(1) == {0}
