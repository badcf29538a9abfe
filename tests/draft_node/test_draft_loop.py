"""The draft node's story on scripted proposers: no network, no threads."""

from __future__ import annotations

import pytest

from draft_node.draft_loop import DraftLimits, DraftLoop
from outrider.request import SamplingParams
from outrider.speculation.draft_stream import DraftHello, DraftStatus, SequenceStart, SequenceUpdate
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.proposers.base import Progress, Proposal
from outrider.speculation.proposers.isolated import BENCH_SECONDS
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.speculation.proposers.scripted import ScriptedProposer

TEXT = tuple(range(1, 60))


def hello(vocab_size=100) -> DraftHello:
    return DraftHello(
        incarnation=bytes(16),
        name="decode",
        vocab_size=vocab_size,
        vocabulary_fingerprint="",
        max_model_len=4096,
    )


def update_of(text, *, since=0, sequence_id=1, num_wanted=3, max_tokens=1000) -> SequenceUpdate:
    start = SequenceStart(params=SamplingParams(seed=1, max_tokens=max_tokens), sample=0, prompt_length=2)
    return SequenceUpdate(
        sequence_id=sequence_id,
        start=start if since == 0 else None,
        start_length=since,
        token_ids=tuple(text[since:]),
        length=len(text),
        prefix_hash=prefix_hash(text),
        num_wanted=num_wanted,
    )


def loop_of(proposer, *, max_sequences=100, num_speculative_tokens=16) -> DraftLoop:
    return DraftLoop(proposer, DraftLimits(num_speculative_tokens=num_speculative_tokens, max_sequences=max_sequences))


def connect(loop: DraftLoop, **changes):
    return loop.connect(hello(**changes), lambda: None)


def test_an_update_is_answered_with_a_branch_keyed_by_its_content():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10])])
    loop.step()
    (answer,) = peer.take_answers()
    assert (answer.sequence_id, answer.acked_length) == (1, 10)
    (branch,) = answer.branches
    assert (branch.length, branch.prefix_hash, branch.token_ids) == (10, prefix_hash(TEXT[:10]), TEXT[10:13])


def test_only_the_newest_of_several_states_is_proposed_for():
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer)
    peer = connect(loop)
    for length in range(10, 20):
        loop.submit(peer, [update_of(TEXT[:length])])
    loop.step()
    assert [len(request.token_ids) for request in proposer.requests] == [19]
    assert [answer.acked_length for answer in peer.take_answers()] == [19]


def test_answers_that_could_not_be_sent_are_replaced_by_newer_ones():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    for length in range(10, 20):
        loop.submit(peer, [update_of(TEXT[:length])])
        loop.step()
    (answer,) = peer.take_answers()
    assert answer.acked_length == 19


def test_more_than_was_wanted_is_offered_so_that_the_rest_can_be_rebased():
    loop = loop_of(ScriptedProposer([TEXT], num_extra_tokens=100))
    peer = connect(loop)
    for num_wanted, num_offered in ((3, 11), (10, 16), (20, 16)):
        loop.submit(peer, [update_of(TEXT[:10], num_wanted=num_wanted)])
        loop.step()
        (answer,) = peer.take_answers()
        assert len(answer.branches[0].token_ids) == num_offered


def test_nothing_is_proposed_past_the_end_of_a_sequence_or_to_one_that_only_keeps_up():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10], max_tokens=9), update_of(TEXT[:10], sequence_id=2, num_wanted=0)])
    loop.step()
    first, second = peer.take_answers()
    assert first.branches[0].token_ids == TEXT[10:11]
    assert second.branches == ()
    assert second.acked_length == 10


def test_ids_that_the_target_does_not_have_are_cut_off():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop, vocab_size=13)
    loop.submit(peer, [update_of(TEXT[:10])])
    loop.step()
    (answer,) = peer.take_answers()
    assert answer.branches[0].token_ids == (11, 12)


def test_a_prefix_that_is_not_here_needs_sync_and_the_stream_goes_on():
    loop = loop_of(ScriptedProposer([TEXT]))
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10], since=5), update_of(TEXT[:10], sequence_id=2)])
    stats = loop.step()
    answers = {answer.sequence_id: answer for answer in peer.take_answers()}
    assert answers[1].status is DraftStatus.UNKNOWN_PREFIX
    assert answers[2].branches
    assert stats.num_refused == 1


class SlowProposer(ScriptedProposer):
    """Needs a second look at each sequence."""

    def propose(self, requests):
        first_time = {request.sequence_id for request in requests} - {old.sequence_id for old in self.requests}
        proposals = super().propose(requests)
        return [
            Proposal(
                sequence_id=proposal.sequence_id,
                tree=DraftTree(proposal.tree.length),
                progress=Progress.CATCHING_UP,
                num_computed=4,
            )
            if proposal.sequence_id in first_time
            else proposal
            for proposal in proposals
        ]


def test_a_sequence_that_is_not_caught_up_is_answered_at_once_and_proposed_for_later():
    loop = loop_of(SlowProposer([TEXT]))
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10])])
    loop.step()
    (answer,) = peer.take_answers()
    assert (answer.status, answer.acked_length, answer.num_computed) == (DraftStatus.CATCHING_UP, 10, 4)
    loop.step()
    (answer,) = peer.take_answers()
    assert answer.status is DraftStatus.PROPOSED
    assert answer.branches[0].token_ids == TEXT[10:13]
    assert not loop._pending


class FailingProposer(ScriptedProposer):
    fails = True

    def propose(self, requests):
        if self.fails:
            raise RuntimeError("out of order")
        return super().propose(requests)


def test_a_proposer_that_fails_costs_its_proposals_and_nothing_else():
    proposer = FailingProposer([TEXT])
    now = [100.0]
    limits = DraftLimits(num_speculative_tokens=16, max_sequences=100)
    loop = DraftLoop(proposer, limits, clock=lambda: now[0])
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10])])
    loop.step()
    (answer,) = peer.take_answers()
    assert (answer.acked_length, answer.branches) == (10, ())
    proposer.fails = False
    now[0] += BENCH_SECONDS
    loop.submit(peer, [update_of(TEXT[:12], since=10)])
    loop.step()
    assert peer.take_answers()[0].branches


class PickyProposer(ScriptedProposer):
    """Fails for every batch with a text that begins with 50."""

    def propose(self, requests):
        if any(request.token_ids[0] == 50 for request in requests):
            raise RuntimeError("not this one")
        return super().propose(requests)


def test_a_sequence_that_makes_the_proposer_fail_costs_the_others_no_draft():
    loop = loop_of(PickyProposer([TEXT]))
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[49:], sequence_id=7), *(update_of(TEXT[:10], sequence_id=i) for i in range(7))])
    loop.step()
    answers = {answer.sequence_id: answer for answer in peer.take_answers()}
    assert sorted(answers) == list(range(8))
    assert answers[7].branches == ()
    assert all(answers[i].branches[0].token_ids == TEXT[10:13] for i in range(7))


def test_what_a_gone_decode_node_had_is_forgotten():
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer)
    one, other = connect(loop), connect(loop)
    loop.submit(one, [update_of(TEXT[:10])])
    loop.submit(other, [update_of(TEXT[:10])])
    loop.step()
    assert loop.load().num_running == 2
    loop.disconnect(one)
    loop.step()
    assert loop.load().num_running == 1
    assert len(proposer.forgotten) == 1


def test_a_closed_sequence_is_forgotten():
    proposer = ScriptedProposer([TEXT])
    loop = loop_of(proposer)
    peer = connect(loop)
    loop.submit(peer, [update_of(TEXT[:10])])
    loop.step()
    peer.take_answers()
    loop.submit(peer, [SequenceUpdate(sequence_id=1, closed=True)])
    loop.step()
    assert proposer.forgotten == [0]
    assert peer.take_answers() == []


@pytest.mark.parametrize("num_peers", [1, 3])
def test_every_decode_node_gets_its_own_answers(num_peers):
    loop = loop_of(NgramProposer())
    peers = [connect(loop) for _ in range(num_peers)]
    for index, peer in enumerate(peers):
        text = [10 + index, 20, 30] * 4
        loop.submit(peer, [update_of(text, num_wanted=2)])
    loop.step()
    for index, peer in enumerate(peers):
        (answer,) = peer.take_answers()
        assert answer.branches[0].token_ids[:2] == (10 + index, 20)
