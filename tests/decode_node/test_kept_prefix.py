"""KV that arrived completely before a transfer was lost is kept if the router says that numerics stay equal."""

from __future__ import annotations

import pytest

from decode_node.reservations import WRITE_SECONDS
from outrider.kv_transfer.base import Region
from outrider.session import KvFailed
from tests.decode_node.test_reservations import PROMPT, SECOND, THIRD

NUM_BROUGHT = 18  # tokens whose KV arrives: four and a half blocks


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node()


def lose_transfer(node, *, breaks, brings=NUM_BROUGHT):
    """Opens a group whose transfer fails in the middle of its prompt: its stream breaks, or its sender is late."""
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    node.push(group_id, PROMPT, until=brings)
    if breaks:
        node.ingest.inbox.fail(group_id[::-1], "the stream broke")
    return group_id


@pytest.mark.parametrize("breaks", [True, False], ids=["its stream breaks", "its sender is late"])
def test_the_next_transfer_brings_what_is_missing(node, breaks):
    group_id = lose_transfer(node, breaks=breaks)
    node.retarget(group_id, SECOND, keeps_received=True)
    granted = node.granted(group_id)
    assert (granted.transfer_id, granted.held_prefix_length, granted.num_tokens_to_compute) == (SECOND, NUM_BROUGHT, 1)
    held = node.ingest.inbox.read(SECOND, Region("k", range(1), range(NUM_BROUGHT), range(1)))
    assert list(memoryview(held[1]).cast("i")) == list(PROMPT[:NUM_BROUGHT])
    node.push(group_id, PROMPT, transfer_id=SECOND)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    assert bool(node.find(KvFailed, group_id)) is breaks
    node.assert_nothing_is_held()


@pytest.mark.parametrize("breaks", [True, False], ids=["its stream breaks", "its sender is late"])
def test_without_a_prefill_node_the_node_goes_on_from_there(node, breaks):
    group_id = lose_transfer(node, breaks=breaks)
    node.retarget(group_id, b"", keeps_received=True)
    granted = node.granted(group_id)
    assert (granted.held_prefix_length, granted.num_tokens_to_compute) == (NUM_BROUGHT, len(PROMPT) - NUM_BROUGHT)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    assert node.num_rows == len(PROMPT) - NUM_BROUGHT + 4
    node.assert_nothing_is_held()


def test_nothing_is_transferred_again_where_a_retarget_overtakes_the_end_of_a_whole_transfer(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    node.push(group_id, PROMPT, until=len(PROMPT) - 1)
    node.retarget(group_id, SECOND, keeps_received=True)
    granted = node.granted(group_id)
    assert (granted.transfer_id, granted.kv_address, granted.num_tokens_to_compute) == (SECOND, "", 1)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    node.assert_nothing_is_held()


def test_what_several_transfers_have_brought_adds_up_until_a_node_of_other_numerics_goes_on(node):
    group_id = lose_transfer(node, breaks=True)
    node.retarget(group_id, SECOND, keeps_received=True)
    node.granted(group_id)
    node.push(group_id, PROMPT, transfer_id=SECOND, until=25)
    node.retarget(group_id, THIRD, keeps_received=True)
    assert node.granted(group_id).held_prefix_length == 25
    node.retarget(group_id, b"")
    granted = node.granted(group_id)
    assert (granted.held_prefix_length, granted.num_tokens_to_compute) == (0, len(PROMPT))
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    node.assert_nothing_is_held()


def test_tokens_that_lack_a_plane_or_a_layer_are_not_kept(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    sender = node.push(group_id, PROMPT, until=8)
    payload = memoryview(bytes(4 * 8))
    sender.put(Region("k", range(1), range(8, 16), range(1)), payload)
    node.retarget(group_id, SECOND, keeps_received=True)
    assert node.granted(group_id).held_prefix_length == 8


def test_a_write_that_was_lost_keeps_nothing(node, monkeypatch):
    group_id = lose_transfer(node, breaks=False)

    def refuse(*_arguments, **_options):
        raise RuntimeError("the cache refuses")

    monkeypatch.setattr(node.ingest.cache, "write", refuse)
    region = Region("k", range(1), range(20, 21), range(1))
    transfer = node.ingest.inbox._find(group_id[::-1])
    node.ingest.inbox._write(transfer, region, memoryview(bytes(4)))
    node.retarget(group_id, SECOND, keeps_received=True)
    assert node.granted(group_id).held_prefix_length == 0


def test_a_frame_that_is_being_written_is_waited_for(node):
    group_id = node.open(prompt=PROMPT)
    first = node.granted(group_id)
    sender = node.push(group_id, PROMPT, until=8)
    region = Region("k", range(1), range(8, 9), range(1))
    with node.writing(sender.put, region, memoryview(bytes(4))):
        node.retarget(group_id, SECOND, keeps_received=True)
        assert node.granted(group_id) == first, "not yet"
    granted = node.granted(group_id)
    assert (granted.transfer_id, granted.held_prefix_length) == (SECOND, 8)
    node.push(group_id, PROMPT, transfer_id=SECOND)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    node.assert_nothing_is_held()


def test_of_blocks_that_may_still_be_written_into_nothing_is_kept(node):
    group_id = lose_transfer(node, breaks=True)
    node.retarget(group_id, SECOND, keeps_received=True)
    node.granted(group_id)
    sender = node.push(group_id, PROMPT, transfer_id=SECOND, until=20)
    region = Region("k", range(1), range(20, 21), range(1))
    with node.writing(sender.put, region, memoryview(bytes(4))):
        node.retarget(group_id, THIRD, keeps_received=True)
        node.granted(group_id)
        node.clock.advance(WRITE_SECONDS)
        granted = node.granted(group_id)
    assert (granted.transfer_id, granted.held_prefix_length) == (THIRD, 0)
    node.push(group_id, PROMPT, transfer_id=THIRD)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    node.assert_nothing_is_held()
