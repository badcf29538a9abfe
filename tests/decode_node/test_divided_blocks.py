"""A decode node whose blocks are divided among ranks: where groups go, which are refused, and what the node reports."""

from __future__ import annotations

import pytest

from outrider.session import Rejected

LONG = {"max_tokens": 100}
"""Sampling parameters of a sample that grows until its rank is full."""


def prompt(first, length):
    return tuple(1 + (first + 7 * at) % 60 for at in range(length))


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node(num_blocks=64, num_parts=2)


def ranks_of(node, *group_ids):
    groups = [node.groups._groups.find(1, group_id) for group_id in group_ids]
    return [{block // 32 for kv in group.tables() for block in kv.block_ids} for group in groups]


def test_short_groups_that_arrive_together_go_to_different_ranks(node):
    node.groups._admission._mean_output_tokens = 8.0
    groups = [node.open(prompt=prompt(first, 4), sampling=LONG) for first in range(4)]
    node.iterate()
    assert ranks_of(node, *groups) == [{0}, {1}, {0}, {1}]


def test_a_block_that_one_rank_lacks_rejects_no_group_of_another(node):
    running = node.open(prompt=prompt(0, 4), sampling=LONG)
    node.iterate()
    waiting = node.open(prompt=prompt(30, 40))
    node.iterate()
    assert ranks_of(node, running, waiting) == [{0}, {1}]
    part = node.engine.pool.parts[0]
    held = part.allocate(part.num_free_blocks)
    for _ in range(20):
        node.iterate()
    assert node.engine.scheduler.running[0].num_uncomputed == 1, "it waits for a block"
    assert not node.find(Rejected, waiting)
    part.release(held)
    node.cancel(waiting)
    node.run()
    assert len(node.tokens(running)) == 100


def test_a_report_shows_room_only_if_one_rank_has_it(node):
    pool = node.engine.pool
    held = [part.allocate(20) for part in pool.parts]
    refused = node.open(prompt=prompt(0, 80))
    node.iterate()
    (rejected,) = node.find(Rejected, refused)
    assert rejected.kv_blocks_needed > pool.num_free_in_scarcest
    for part, blocks in zip(pool.parts, held, strict=True):
        part.release([blocks.pop() for _ in range(4)])
    assert rejected.kv_blocks_needed > pool.num_free_in_scarcest, "there are 32 free blocks, but 16 in each rank"
    pool.parts[1].release(held.pop())
    assert rejected.kv_blocks_needed <= pool.num_free_in_scarcest
    again = node.open(prompt=prompt(0, 80))
    node.iterate()
    assert ranks_of(node, again) == [{1}]


def test_what_runs_on_one_rank_takes_no_room_from_another(node):
    node.groups._admission._mean_output_tokens = 100.0
    first = node.open(prompt=prompt(0, 24), sampling=LONG)
    node.iterate()
    node.engine.pool.parts[0].allocate(20)
    second = node.open(prompt=prompt(30, 24), sampling=LONG)
    node.iterate()
    assert ranks_of(node, first, second) == [{0}, {1}]
    third = node.open(prompt=prompt(15, 24), sampling=LONG)
    node.iterate()
    assert node.find(Rejected, third), "both ranks are full once their samples have grown"
