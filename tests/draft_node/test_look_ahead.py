"""Look-ahead: the real draft loop, proposer and book, on a clock that the test moves."""

from __future__ import annotations

import pytest

from benchmarks.three_lines.speed_model import SpeedModel
from outrider.speculation.draft_stream import DraftStatus, StepNotice
from outrider.speculation.proposers.base import MAX_SEQUENCES, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import MAX_FORWARD_ROWS, DraftModelProposer
from tests.draft_node.simulated_pair import VOCAB_SIZE, ScriptedForward, SimulatedPair
from tests.drafting.books import take_updates
from tests.support.draft_messages import start_of
from tests.support.fake_clock import FakeClock
from tests.support.pool_integrity import check_proposer


def hit_rate(node, *, after: int = 3) -> float:
    hits = [hit for sequence in node.sequences.values() for hit in sequence.hits[after:]]
    return sum(hits) / len(hits)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.005])
def test_an_oracle_is_accepted_whole_with_every_step_a_hit_after_the_first(delay_seconds):
    pair = SimulatedPair(delay_seconds=delay_seconds)
    node = pair.add_node(1.0)
    pair.run(1.0)
    (sequence,) = node.sequences.values()
    assert sequence.num_steps > 30
    assert hit_rate(node, after=2) == 1.0
    assert sequence.num_accepted == sequence.num_drafted
    assert sequence.num_drafted >= 4 * (sequence.num_steps - 3)
    assert node.book.counters.lead_seconds > 0.0


def test_without_look_ahead_a_draft_comes_a_step_late():
    texts = []
    for max_alternatives in (0, 31):
        pair = SimulatedPair(max_alternatives=max_alternatives)
        node = pair.add_node(1.0)
        pair.run(1.0)
        texts.append(node.sequences[0])
        assert bool(pair.num_ahead_tokens) is bool(max_alternatives)
    assert texts[0].num_steps == texts[1].num_steps
    assert texts[0].num_accepted < 0.7 * texts[1].num_accepted


def test_a_rejection_whose_token_was_a_runner_up_is_a_hit():
    pair = SimulatedPair()
    node = pair.add_node(0.7, 0.3)
    pair.run(2.0)
    (sequence,) = node.sequences.values()
    assert sequence.num_accepted < sequence.num_drafted
    assert hit_rate(node) > 0.9
    check_proposer(pair.proposer)


def test_what_was_drafted_ahead_is_what_the_drafter_would_draft_then():
    """The scripted forward pass asserts that the KV of every path is that of the path's text."""
    pair = SimulatedPair(num_blocks=60)  # so few blocks that alternatives are often dropped
    node = pair.add_node(0.6, 0.2, 0.1, num_sequences=3)
    pair.run(1.0)
    assert node.book.counters.num_quarantined == 0
    assert any(sequence.num_accepted for sequence in node.sequences.values())
    check_proposer(pair.proposer)


def test_siblings_win_where_the_drafter_is_often_wrong():
    """With the same number of rows per step, trees give the same text as chains, but more of it in the same time."""
    texts = []
    for takes_trees in (False, True):
        pair = SimulatedPair()
        node = pair.add_node(0.35, 0.45, 0.1, takes_trees=takes_trees)
        pair.run(3.0)
        texts.append(node.sequences[0])
        assert texts[-1].num_drafted <= 4 * texts[-1].num_steps
        assert node.book.counters.num_quarantined == 0
        check_proposer(pair.proposer)
    chains, trees = texts
    assert trees.num_accepted / trees.num_steps > 1.15 * chains.num_accepted / chains.num_steps
    size = min(len(text.token_ids) for text in texts)
    assert chains.token_ids[:size] == trees.token_ids[:size]


def test_a_good_drafters_rows_are_a_chain():
    pair = SimulatedPair()
    node = pair.add_node(1.0, takes_trees=True)
    pair.run(1.0)
    sequence = node.sequences[0]
    assert sequence.num_accepted > 3.5 * (sequence.num_steps - 5)


def test_a_target_that_verifies_nothing_costs_no_forward_after_its_step():
    pair = SimulatedPair()
    pair.add_node(0.7, 0.2)
    pair.run(0.5)
    last_update = pair.now
    num_calls = len(pair.forward.calls)
    pair.run(1.0, is_stepping=False)
    late = [at for at, _ in pair.forward.calls[num_calls:] if at > last_update + pair.step_seconds + pair.delay_seconds]
    assert late == []


def test_a_confirmed_path_is_answered_without_a_forward():
    pair = SimulatedPair(delay_seconds=0.0)
    node = pair.add_node(1.0)
    pair.run(0.29)
    num_forwards = len(pair.forward.calls)
    node._finish_step()
    (update,) = take_updates(node.book, node.draft_node)
    pair.loop.submit(node.peer, [update], step_seconds=0.03)
    pair.loop.step()
    (answer,) = node.peer.take_answers()
    assert len(answer.branches[0]) == 4
    assert len(pair.forward.calls) == num_forwards


def test_the_first_token_is_the_answer_and_the_rest_follows_as_it_is_made():
    pair = SimulatedPair()
    node = pair.add_node(1.0)
    (update,) = take_updates(node.book, node.draft_node)
    pair.loop.submit(node.peer, [update], step_seconds=0.03)
    sizes = []
    for _ in range(4):
        pair.loop.step()
        sizes += [
            (each.status, len(branch))
            for each in node.peer.take_answers()
            for branch in each.branches
            if branch.length == update.length
        ]
    assert sizes == [(DraftStatus.PROPOSED, 1), (DraftStatus.AHEAD, 2), (DraftStatus.AHEAD, 4)]


def test_without_a_step_time_the_answer_is_the_whole_draft():
    pair = SimulatedPair()
    node = pair.add_node(1.0)
    (update,) = take_updates(node.book, node.draft_node)
    pair.loop.submit(node.peer, [update])
    while not (answers := node.peer.take_answers()):
        pair.loop.step()
    assert [len(answer.branches[0]) for answer in answers] == [4 + pair.proposer.info.num_extra_tokens]
    assert not pair.loop.has_work


def test_eight_decode_nodes_of_sixteen_sequences_are_served_alike():
    pair = SimulatedPair(num_blocks=60_000)
    for _ in range(8):
        pair.add_node(0.8, 0.1, num_sequences=16)
    pair.run(0.1)
    hits = [sum(sum(sequence.hits) for sequence in node.sequences.values()) for node in pair.nodes]
    assert min(hits) > 0.6 * max(hits) > 0


def test_the_pool_is_whole_when_all_sequences_have_ended():
    pair = SimulatedPair()
    nodes = [pair.add_node(0.6, 0.2, num_sequences=4) for _ in range(2)]
    pair.run(0.3)
    nodes[0].close_all()
    pair.loop.disconnect(nodes[1].peer)
    pair.run(0.1, is_stepping=False)
    check_proposer(pair.proposer)
    assert pair.forward.pool.num_free_blocks == 4096
    assert pair.loop.load().num_running == 0


def test_what_was_drafted_and_never_committed_is_counted():
    pair = SimulatedPair()
    pair.add_node(0.0)
    pair.run(0.3)
    drafted = sum(rows for _, rows in pair.forward.calls)
    assert 0 < pair.proposer.num_wasted_tokens <= drafted


def scripted_proposer(*, num_blocks):
    clock = FakeClock()
    forward = ScriptedForward(clock, num_blocks=num_blocks)
    return DraftModelProposer(forward, ProposerInfo(name="draft_model:scripted"), clock=clock), forward


def request(key, token_ids, *, looks_ahead=False):
    start = start_of(8, max_tokens=200)
    return ProposalRequest(key, token_ids, 4, start=start, max_alternatives=7, looks_ahead=looks_ahead)


def test_a_sequence_that_loses_its_kv_to_a_waiting_one_is_not_looked_ahead_for():
    proposer, _ = scripted_proposer(num_blocks=10)
    verified = list(range(8))
    proposer.propose([request(1, verified, looks_ahead=False)])
    for _ in range(3):  # finds alternatives to its draft, until all blocks are taken
        proposer.propose([request(1, verified, looks_ahead=True)])
    waiting = list(range(10, 46))
    found, ahead = proposer.propose([request(2, waiting, looks_ahead=False), request(1, verified, looks_ahead=True)])
    assert found.tree
    assert not ahead.has_more
    check_proposer(proposer)


def test_no_forward_has_more_rows_than_memory_is_kept_for():
    proposer, forward = scripted_proposer(num_blocks=60_000)

    def requests(keys, num_tokens, **changes):
        return [request(key, [key % 64, *(place % 64 for place in range(num_tokens))], **changes) for key in keys]

    old, new = range(MAX_SEQUENCES - 100), range(MAX_SEQUENCES - 100, MAX_SEQUENCES)
    for keys in (old[:300], old[300:]):
        for _ in range(8):  # a prefix of eight tokens each, within the budget for catching up
            proposer.propose(requests(keys, 7))
    ahead = requests(old[300:], 7, looks_ahead=True)
    for num_tokens in range(8, 12):
        proposer.propose([*requests(old[:300], num_tokens), *requests(new, 50), *ahead])
    most = max(num_rows for _, num_rows in forward.calls)
    assert 256 < most <= MAX_FORWARD_ROWS


def test_a_drafter_across_5_ms_beats_one_beside_the_target():
    """80 % of the drafter's first choices are accepted; most other tokens are its second choices."""
    pair = SimulatedPair(delay_seconds=0.0025)
    node = pair.add_node(0.8, 0.12, 0.04, num_wanted=8)
    pair.run(2.0)
    text = node.sequences[0]
    colocated = SpeedModel(acceptance=0.8, num_draft_tokens=8, step_seconds=0.030, token_seconds=0.002).colocated()
    assert (len(text.token_ids) - 3) / text.num_steps > 1.15 * colocated


def test_a_notice_gives_the_outcomes_that_are_drafted_for_and_the_time_for_it():
    """The target verifies two tokens, of which the second is not the drafter's own."""
    pair = SimulatedPair(max_alternatives=4)
    node = pair.add_node(1.0)
    (update,) = take_updates(node.book, node.draft_node)
    pair.loop.submit(node.peer, [update])
    while not node.peer.take_answers():
        pair.loop.step()
    main = pair.proposer._trees[0].main.token_ids
    other = [main[0], next(each for each in range(VOCAB_SIZE) if each not in main[:3])]
    assert not pair.loop.has_work
    pair.loop.submit(node.peer, [StepNotice(update.sequence_id, update.length + 1, tuple(other))], step_seconds=0.03)
    pair.loop.step()
    assert not pair.loop.has_work, "the notice is for another length"
    pair.loop.submit(node.peer, [StepNotice(update.sequence_id, update.length, tuple(other))], step_seconds=0.03)
    while pair.loop.has_work:
        pair.loop.step()
    tree = pair.proposer._trees[0]
    assert other in [path.token_ids[:2] for path in tree.alternatives]
    assert {path.num_assumed for path in tree.alternatives} <= {1, 2}
    assert len(tree.main) == 1 + 1 + 4
    check_proposer(pair.proposer)
