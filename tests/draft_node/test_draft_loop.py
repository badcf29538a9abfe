"""The draft loop on scripted proposers, without network and threads."""

from __future__ import annotations

from dataclasses import replace

from draft_node.draft_loop import DraftLoop
from draft_node.draft_peer import MAX_UPDATES_PER_STEP
from outrider.speculation.draft_stream import DraftStatus, SequenceUpdate
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import AheadBranch, Progress, Proposal
from outrider.speculation.proposers.isolated import COOLDOWN_SECONDS
from tests.support.draft_messages import hello_of, update_of
from tests.support.fake_clock import FakeClock
from tests.support.fake_head import FakeHead, feature_bytes
from tests.support.scripted_proposer import ScriptedProposer

TEXT = tuple(range(1, 60))


def loop_of(proposer, *, max_sequences=100, **options) -> DraftLoop:
    return DraftLoop(proposer, max_sequences=max_sequences, **options)


def connect(loop: DraftLoop, **changes):
    return loop.connect(hello_of(**changes), lambda: None)


def answers_to(loop, peer, *updates):
    """Returns the answers to these updates after one step."""
    loop.submit(peer, updates)
    loop.step()
    return peer.take_answers()


def test_only_the_newest_of_several_states_is_proposed_for():
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer)
    peer = connect(loop)
    for length in range(10, 20):
        loop.submit(peer, [update_of(TEXT[:length])])
    loop.step()
    assert [len(request.token_ids) for request in proposer.requests] == [19]
    assert [answer.acked_length for answer in peer.take_answers()] == [19]


def test_more_than_was_wanted_is_offered_so_that_the_rest_can_be_rebased():
    loop = loop_of(ScriptedProposer([TEXT], num_extra_tokens=100))
    peer = connect(loop)
    for num_wanted, num_offered in ((3, 11), (10, 16), (40, 32)):
        (answer,) = answers_to(loop, peer, update_of(TEXT[:10], num_wanted=num_wanted))
        assert len(answer.branches[0].token_ids) == num_offered


def test_nothing_is_proposed_past_the_end_of_a_sequence_or_to_one_that_only_keeps_up():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    first, second = answers_to(
        loop, peer, update_of(TEXT[:10], max_tokens=9), update_of(TEXT[:10], sequence_id=2, num_wanted=0)
    )
    assert first.branches[0].token_ids == TEXT[10:11]
    assert second.branches == ()
    assert second.acked_length == 10


def test_ids_that_the_target_does_not_have_are_cut_off():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop, vocab_size=13)
    (answer,) = answers_to(loop, peer, update_of(TEXT[:10]))
    assert answer.branches[0].token_ids == (11, 12)


class SlowProposer(ScriptedProposer):
    """A proposer that spends its first call for each sequence on catching up."""

    def propose(self, requests):
        first_time = {request.sequence_id for request in requests} - {old.sequence_id for old in self.requests}
        proposals = super().propose(requests)
        return [
            Proposal(
                sequence_id=proposal.sequence_id,
                tree=DraftTree(proposal.tree.length),
                progress=Progress.CATCHING_UP,
            )
            if proposal.sequence_id in first_time
            else proposal
            for proposal in proposals
        ]


def test_a_sequence_that_is_not_caught_up_is_answered_at_once_and_proposed_for_later():
    loop = loop_of(SlowProposer([TEXT]))
    peer = connect(loop)
    (answer,) = answers_to(loop, peer, update_of(TEXT[:10]))
    assert (answer.status, answer.acked_length) == (DraftStatus.CATCHING_UP, 10)
    loop.step()
    (answer,) = peer.take_answers()
    assert answer.status is DraftStatus.PROPOSED
    assert answer.branches[0].token_ids == TEXT[10:13]
    assert not loop._pending


def test_a_sequence_that_gives_way_before_it_was_answered_is_refused():
    loop = loop_of(SlowProposer([TEXT]), max_sequences=2)
    first, second = connect(loop), connect(loop)
    loop.submit(first, [update_of(TEXT[:10]), update_of(TEXT[:10], sequence_id=2)])
    loop.submit(second, [update_of(TEXT[:10])])
    while loop.has_work:
        loop.step()
    statuses = {answer.sequence_id: answer.status for answer in first.take_answers()}
    assert statuses == {1: DraftStatus.NO_ROOM, 2: DraftStatus.PROPOSED}
    assert [answer.status for answer in second.take_answers()] == [DraftStatus.PROPOSED]


class FailingProposer(ScriptedProposer):
    fails = True

    def propose(self, requests):
        if self.fails:
            raise RuntimeError("out of order")
        return super().propose(requests)


def test_a_proposer_that_fails_costs_its_proposals_and_nothing_else():
    proposer = FailingProposer([TEXT])
    clock = FakeClock(100.0)
    loop = loop_of(proposer, clock=clock)
    peer = connect(loop)
    (answer,) = answers_to(loop, peer, update_of(TEXT[:10]))
    assert (answer.acked_length, answer.branches) == (10, ())
    proposer.fails = False
    clock.advance(COOLDOWN_SECONDS)
    assert answers_to(loop, peer, update_of(TEXT[:12], since=10))[0].branches


def test_a_decode_node_that_sends_many_updates_delays_no_answer_to_another():
    loop = loop_of(ScriptedProposer([TEXT]))
    flood, other = connect(loop), connect(loop)
    loop.submit(flood, [update_of(TEXT[:3], since=2, sequence_id=key) for key in range(6000)])
    loop.submit(other, [update_of(TEXT[:10])])
    loop.step()
    assert [answer.acked_length for answer in other.take_answers()] == [10]
    answered = {answer.sequence_id for answer in flood.take_answers()}
    assert len(answered) == MAX_UPDATES_PER_STEP
    while loop.has_work:
        loop.step()
        while answers := flood.take_answers():
            answered.update(answer.sequence_id for answer in answers)
    assert len(answered) == 6000


def test_a_decode_node_that_fills_the_node_makes_room_for_another():
    """The next update of an evicted sequence has an unknown prefix; sent again from its start, it finds no room."""
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer, max_sequences=4)
    first, second = connect(loop), connect(loop)
    answers_to(loop, first, *(update_of(TEXT[:10], sequence_id=key) for key in range(4)))
    answers = answers_to(loop, second, *(update_of(TEXT[:10], sequence_id=key) for key in range(2)))
    assert [answer.status for answer in answers] == 2 * [DraftStatus.PROPOSED]
    assert proposer.forgotten == [0, 1]
    statuses = []
    for since in (10, 0):
        statuses += [
            answer.status for answer in answers_to(loop, first, update_of(TEXT[:11], since=since, sequence_id=0))
        ]
    assert statuses == [DraftStatus.UNKNOWN_PREFIX, DraftStatus.NO_ROOM]


def test_a_decode_node_that_reads_nothing_makes_no_answers_of_closed_sequences_pile_up():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    for sequence_id in range(20):
        loop.submit(peer, [update_of(TEXT[:10], sequence_id=sequence_id)])
        loop.step()
        if sequence_id:
            loop.submit(peer, [SequenceUpdate(sequence_id=sequence_id, closed=True)])
    loop.step()
    assert [answer.sequence_id for answer in peer.take_answers()] == [0]


# Features


def with_features(update: SequenceUpdate, start: int, end: int) -> SequenceUpdate:
    return update._replace(feature_start=start, features=feature_bytes(TEXT, start, end))


def test_a_head_drafts_once_it_has_the_features_of_all_tokens_but_the_newest():
    head = FakeHead([TEXT])
    loop = loop_of(head)
    peer = connect(loop)
    (answer,) = answers_to(loop, peer, update_of(TEXT[:10]))
    assert (answer.status, answer.acked_features) == (DraftStatus.NOTHING, 0)
    (answer,) = answers_to(loop, peer, with_features(update_of(TEXT[:10], since=10), 0, 6))
    assert (answer.status, answer.acked_features) == (DraftStatus.NOTHING, 6)
    (answer,) = answers_to(loop, peer, with_features(update_of(TEXT[:10], since=10), 6, 9))
    assert (answer.status, answer.acked_length, answer.acked_features) == (DraftStatus.PROPOSED, 10, 9)
    (answer,) = answers_to(loop, peer, with_features(update_of(TEXT[:13], since=10), 9, 12))
    assert answer.branches[0].token_ids == TEXT[13:16]
    assert not head.wrong
    assert not loop.has_work


def test_a_proposer_that_needs_no_features_gets_none():
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer)
    (answer,) = answers_to(loop, connect(loop), with_features(update_of(TEXT[:10]), 0, 9))
    assert (answer.status, answer.acked_features) == (DraftStatus.PROPOSED, 0)
    assert proposer.requests[0].features is None


class BranchingProposer(ScriptedProposer):
    """Finds a branch in each call with look-ahead, and takes long for texts of 40 tokens."""

    def __init__(self, clock):
        super().__init__([TEXT])
        self.info = replace(self.info, can_look_ahead=True)
        self._clock, self._num_branches = clock, 0

    def propose(self, requests):
        self._clock.advance(0.1 if any(len(each.token_ids) == 40 for each in requests) else 0.002)
        answers = {
            each.sequence_id: each for each in super().propose([each for each in requests if not each.looks_ahead])
        }
        return [answers.get(each.sequence_id) or self._ahead(each) for each in requests]

    def _ahead(self, request):
        self._num_branches += 1
        length = len(request.token_ids)
        branch = AheadBranch((self._num_branches,), DraftTree(length + 1, token_ids=(5,)))
        return Proposal(request.sequence_id, DraftTree(length), ahead=(branch,), has_more=True)


def test_branches_are_not_kept_back_during_the_forward_of_an_answer():
    clock, sent_at = FakeClock(100.0), []
    loop = loop_of(BranchingProposer(clock), max_alternatives=7, clock=clock)
    peer = loop.connect(hello_of(), lambda: sent_at.append(clock()))
    other = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10])], step_seconds=1.0)
    loop.step()
    assert len(sent_at) == 1
    loop.step()
    assert len(sent_at) == 1, "the branch is kept back"
    made_at = clock()
    loop.submit(other, [update_of(TEXT[:40])])
    loop.step()
    assert sent_at[1] == made_at


def test_a_stream_is_told_once_of_an_answer_that_it_does_not_read():
    calls = []
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = loop.connect(hello_of(), lambda: calls.append(1))
    loop.submit(peer, [update_of(TEXT[:10])])
    for _ in range(3):
        loop.step()
    assert calls == [1]
