"""Prompt logprobs of a decode node that computes the prompt: all of them, in order, before the first token."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.pending import read
from outrider.engine.sampler.logprobs import pending_prompt_logprobs
from outrider.engine.scheduler import StepReservation
from outrider.prefill import MAX_SCORED_ROWS
from outrider.session import Granted, PromptLogprobs, SampleStart
from outrider.wire.answer import PackedLogprobs

PROMPT = tuple(3 + (7 * n) % 290 for n in range(2 * MAX_SCORED_ROWS + 5))
NUM_TOP = 2


def expected_logprobs(node):
    """Returns the prompt logprobs of a single forward pass over unused blocks."""
    size = node.engine.pool.block_size
    num_blocks = -(-len(PROMPT) // size)
    blocks = range(node.engine.pool.num_blocks - num_blocks, node.engine.pool.num_blocks)
    rows = SequenceRows(PROMPT[:-1], 0, blocks, len(PROMPT) - 1)
    with torch.inference_mode():
        logits = node.engine.runner.forward(build_input_batch([rows], size))
        return read(pending_prompt_logprobs(logits, PROMPT[1:], NUM_TOP))[0]


def run(node):
    for _ in range(1000):
        node.iterate()
        if not node.engine.scheduler.has_work:
            node.iterate()
            return
    raise AssertionError("the loop does not end")


def assert_scored(node, group_id, expected, *, num_top=NUM_TOP):
    events = [event for event in node.events if event.sequence_group_id == group_id]
    kinds = [type(event) for event in events if not isinstance(event, Granted)]
    num_pieces = kinds.count(PromptLogprobs)
    assert set(kinds[:num_pieces]) == {PromptLogprobs}
    assert PromptLogprobs not in kinds[num_pieces:]
    found = PackedLogprobs(b"".join(event.packed for event in events[1 : 1 + num_pieces]))
    assert [entry.token_id for entry in found] == list(PROMPT[1:])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, rel=1e-4)
        assert [top_id for top_id, _ in mine.top] == [top_id for top_id, _ in theirs.top[:num_top]]


def test_they_come_before_the_first_token(make_node):
    node = make_node(num_speculative_tokens=0)
    plain = node.open(prompt=PROMPT, transfer_id=b"")
    run(node)
    # Neither the cached prompt nor another running sequence changes the logprobs.
    other = node.open(prompt=PROMPT[::-1], transfer_id=b"")
    scored = node.open(prompt=PROMPT, transfer_id=b"", prompt_logprobs=NUM_TOP)
    run(node)
    assert node.tokens(scored) == node.tokens(plain)
    assert len(node.tokens(other)) == node.max_tokens
    (granted,) = node.find(Granted, scored)
    assert (granted.held_prefix_length, granted.num_tokens_to_compute) == (0, len(PROMPT))
    assert not node.find(PromptLogprobs, other)
    assert_scored(node, scored, expected_logprobs(node))
    node.assert_nothing_is_held()


def test_samples_share_them(make_node):
    node = make_node(num_speculative_tokens=0)
    group = node.open(prompt=PROMPT, transfer_id=b"", prompt_logprobs=0, sampling={"n": 3, "max_tokens": 3})
    run(node)
    assert {len(node.tokens(group, sample)) for sample in range(3)} == {3}
    assert_scored(node, group, expected_logprobs(node), num_top=0)


def test_of_a_continuation_the_prompt_alone_is_scored(make_node):
    node = make_node(num_speculative_tokens=0)
    whole = node.open(prompt=PROMPT, transfer_id=b"", sampling={"max_tokens": 30})
    run(node)
    known = tuple(node.tokens(whole)[:20])
    group = node.open(
        prompt=PROMPT, transfer_id=b"", prompt_logprobs=NUM_TOP, samples=(SampleStart(0, known),),
        sampling={"max_tokens": 30},
    )  # fmt: skip
    run(node)
    assert node.tokens(group) == node.tokens(whole)[20:]
    assert_scored(node, group, expected_logprobs(node))


def test_preemption_leaves_no_gap_and_repeats_nothing(make_node):
    node = make_node(num_speculative_tokens=0)
    node.open(prompt=PROMPT[:30], transfer_id=b"")
    scored = node.open(prompt=PROMPT, transfer_id=b"", prompt_logprobs=NUM_TOP, sampling={"max_tokens": 10})
    while not node.find(PromptLogprobs, scored):
        node.iterate()
    scheduler = node.engine.scheduler
    (sequence,) = (each for each in scheduler.running if each.scoring is not None)
    scheduler._preempt(sequence, StepReservation())
    run(node)
    assert len(node.tokens(scored)) == 10
    assert_scored(node, scored, expected_logprobs(node))


def test_a_transferred_prompt_is_not_scored_here(make_scripted_node):
    node = make_scripted_node()
    prompt = tuple(range(1, 20))
    group = node.open(prompt=prompt, prompt_logprobs=1)
    assert node.granted(group).kv_address
    node.push(group, prompt)
    node.run()
    assert not node.find(PromptLogprobs, group)
    assert len(node.tokens(group)) == 5
