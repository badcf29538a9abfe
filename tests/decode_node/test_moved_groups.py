"""Groups that are migrated from another node while blocks are short; each sample has tokens of its own."""

from __future__ import annotations

import pytest

from decode_node.commands import DrainStarted
from outrider.session import KvReady, Rejected, SampleStart
from tests.decode_node.conftest import SHORT_PROMPT

PROMPT = tuple(range(1, 30))  # takes eight blocks of four tokens
SAMPLING = {"n": 3, "max_tokens": 40}


def moved(node, cuts, *, prompt=SHORT_PROMPT, sampling=SAMPLING):
    """Opens a group as another node left it. `cuts`: number of generated tokens by sample."""
    whole = node.model.generate(prompt, sampling["max_tokens"])
    samples = tuple(SampleStart(sample, tuple(whole[:cut])) for sample, cut in cuts.items())
    group_id = node.open(prompt=prompt, sampling=sampling, samples=samples)
    return group_id, whole


@pytest.mark.parametrize("cancelled", [(), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_samples_that_are_preempted_before_their_own_tokens_are_computed_go_on_alike(make_scripted_node, cancelled):
    """Those that are cancelled, because another node has computed them, end where they are."""
    node = make_scripted_node(num_blocks=40)
    group_id, whole = moved(node, {0: 30, 1: 12, 2: 0})
    held = node.engine.pool.allocate(node.engine.pool.num_free_blocks - 14)  # leaves room for one sample and some more
    while not node.num_preempted:
        node.iterate()
    node.loop._report()  # otherwise a device's last step is reported with the next one
    before = {sample: node.tokens(group_id, sample) for sample in range(3)}
    if cancelled:
        node.cancel(group_id, *cancelled)
    node.run()
    for sample, cut in {0: 30, 1: 12, 2: 0}.items():
        assert node.tokens(group_id, sample) == (before[sample] if sample in cancelled else whole[cut:])
    node.engine.pool.release(held)
    node.assert_nothing_is_held()


def test_room_is_asked_for_with_what_each_sample_has_of_its_own(make_scripted_node):
    """Two samples of 36 tokens each take 18 blocks from the start, although they share a short prompt."""
    node = make_scripted_node(num_blocks=40)
    node.groups._admission._mean_output_tokens = 1.0
    node.open(prompt=tuple(place % 60 for place in range(92)), sampling={"max_tokens": 5})  # 23 blocks
    node.iterate()
    fresh = node.open(sampling={**SAMPLING, "max_tokens": 40})
    node.iterate()
    assert not node.find(Rejected, fresh)
    node.cancel(fresh)
    group_id, _ = moved(node, {0: 33, 1: 33, 2: 0})
    node.iterate()
    (rejected,) = node.find(Rejected, group_id)
    assert rejected.kv_blocks_needed > node.engine.pool.num_free_blocks


def test_a_draining_node_goes_on_with_what_it_has_until_that_is_moved(make_scripted_node):
    node = make_scripted_node()
    running, waiting = node.open(sampling={"max_tokens": 50}), node.open(prompt=PROMPT)
    node.iterate()
    node.loop.submit(DrainStarted())
    node.iterate()
    num_tokens = len(node.tokens(running))
    node.iterate()
    assert len(node.tokens(running)) == num_tokens + 1
    node.push(waiting, PROMPT)
    node.iterate()
    assert node.find(KvReady, waiting)
    assert not node.loop.is_drained
    node.cancel(running)  # as a router does when the other node has its first token
    node.cancel(waiting)
    node.iterate()
    assert node.loop.is_drained
    node.assert_nothing_is_held()
