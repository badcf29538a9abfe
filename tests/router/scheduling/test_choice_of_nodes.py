"""Placement and the queue: the nodes that a request gets, and what it waits for. The links have no connections."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest

from outrider.node import NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.request import Adapter
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected, RejectReason
from router.nodes.link import DecodeLink, PrefillLink
from router.nodes.room import Refusal, Size
from router.scheduling.placement import Demand, Placement, _can_compute
from router.scheduling.prefix_map import PREFIX_CHUNK_TOKENS, PrefixMap, prefix_hashes
from router.scheduling.request_queue import QueuedRequest, RequestQueue
from tests.support.router_fakes import fake_model_info

BLOCK_TOKENS = 16
ROWS = 512


def rejected(num_blocks, num_samples=1, wait_seconds=0.0):
    return Rejected(
        sequence_group_id=b"",
        reason=RejectReason.NO_ROOM,
        message="",
        kv_blocks_needed=num_blocks,
        num_sequences_needed=num_samples,
        wait_seconds=wait_seconds,
    )


def make_link(kind, role, name):
    link = kind(role=role, address=name, transport=None, identity=None, owner=None, liveness_timeout_seconds=1e6)
    link.info = NodeInfo(incarnation=name.encode(), name=name, role=role, state=NodeState.SERVING, version="")
    link.session = SimpleNamespace(is_open=True)
    set_load(link, kv_blocks_total=100, kv_blocks_free=100, num_sequences_free=8, max_rows_per_step=ROWS)
    return link


@pytest.mark.parametrize("num_adapters", [1, 1000])
def test_adapters_are_found_without_comparing_them(num_adapters, monkeypatch):
    link = make_link(DecodeLink, NodeRole.DECODE, "d")
    link._owner = SimpleNamespace(on_link_change=lambda: None, on_link_report=lambda: None)
    adapters = [Adapter(f"a{number}", f"{number:064}") for number in range(num_adapters)]
    link._take_report(dataclasses.replace(link.report, adapters=tuple(adapters)))
    known = link.adapters
    num_compared = 0

    def compare(one, other):
        nonlocal num_compared
        num_compared += 1
        return one.name == other.name

    monkeypatch.setattr(Adapter, "__eq__", compare)
    link._take_report(dataclasses.replace(link.report, adapters=None))
    assert link.adapters is known
    assert _can_compute(link, Demand((1,), adapter=Adapter(f"a{num_adapters - 1}", f"{num_adapters - 1:064}")))
    assert not _can_compute(link, Demand((1,), adapter=Adapter("a0", "f" * 64)))
    assert num_compared <= 2


def set_load(link, **load):
    link.report = NodeReport(state=NodeState.SERVING, incarnation=link.incarnation, load=NodeLoad(**load))


class Nodes:
    """A fake `NodeDirectory` with placement and a queue."""

    def __init__(self, num_decode_nodes=2, num_prefill_nodes=0):
        self.decode_nodes = [
            make_link(DecodeLink, NodeRole.DECODE, f"decode-{number}") for number in range(num_decode_nodes)
        ]
        self.prefill_nodes = [
            make_link(PrefillLink, NodeRole.PREFILL, f"prefill-{number}") for number in range(num_prefill_nodes)
        ]
        self.placement = Placement(self, prefill_outstanding_tokens=1024)
        self.queue = RequestQueue(
            self.placement, max_waiting=100, max_waiting_tokens=1 << 20, no_node_timeout_seconds=60.0
        )
        self.tasks = []

    def set_free(self, num_blocks):
        for link in self.decode_nodes:
            set_load(link, kv_blocks_free=num_blocks, num_sequences_free=8)

    async def ask(self, num_tokens, num_samples=1, first_token=0):
        demand = Demand(tuple(range(first_token, first_token + num_tokens)), num_samples=num_samples)
        task = asyncio.ensure_future(self.queue.wait_for_place(QueuedRequest(demand, priority=0)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def pump(self):
        self.queue.pump()
        await asyncio.sleep(0)

    async def refuse(self, num_tokens, num_samples=1):
        """Starts a request. Every decode node that it is placed on rejects it for lack of blocks, until it waits."""
        task = await self.ask(num_tokens, num_samples)
        while task.done():
            place = task.result()
            needed = -(-num_tokens // BLOCK_TOKENS)
            assert place.decode.report.load.kv_blocks_free < needed
            place.release(rejected(needed, num_samples))
            task = await self.ask(num_tokens, num_samples)
        return task


@pytest.fixture
async def make_nodes():
    made = []

    def make(**numbers):
        made.append(Nodes(**numbers))
        return made[-1]

    yield make
    for nodes in made:
        for task in nodes.tasks:
            task.cancel()
        await asyncio.gather(*nodes.tasks, return_exceptions=True)


# ---------------------------------------------------------------- room on decode nodes

ROOM = NodeLoad(kv_blocks_free=10, num_sequences_free=2)
SIZE = Size(160, 2)


@pytest.mark.parametrize(
    ("is_kept_out", "size", "load", "after"),
    [
        (False, SIZE, ROOM, 0.5),
        (True, SIZE, ROOM, 0.4),  # within the rejection's wait_seconds (0.5), another router goes first
        (True, Size(1, 1), ROOM, 0.4),
        (True, SIZE, NodeLoad(kv_blocks_free=9, num_sequences_free=2), 1.0),
        (True, SIZE, NodeLoad(kv_blocks_free=10, num_sequences_free=1), 1.0),
        (True, Size(161, 2), NodeLoad(kv_blocks_free=9, num_sequences_free=2), 1.0),
        (False, Size(159, 2), NodeLoad(kv_blocks_free=9, num_sequences_free=2), 1.0),
        (False, Size(160, 1), NodeLoad(kv_blocks_free=9, num_sequences_free=1), 1.0),
        (True, Size(1, 1), NodeLoad(kv_blocks_free=9, num_sequences_free=0), 1.0),
        (False, SIZE, NodeLoad(), NO_ROOM_RETRY_SECONDS),
    ],
)
def test_a_refusal_keeps_out_what_is_no_smaller_until_a_report_shows_what_was_missing(is_kept_out, size, load, after):
    refusal = Refusal(rejected(10, 2, wait_seconds=0.5), 100.0, SIZE)
    assert refusal.keeps_out(size, load, 100.0 + after) is is_kept_out


def test_room_that_has_become_free_by_our_own_requests_needs_no_report():
    nodes = Nodes(1)
    (link,) = nodes.decode_nodes
    places = [nodes.placement.place(Demand((1,) * num_tokens)) for num_tokens in (60, 100, 160)]
    places.pop().release(rejected(200))
    assert [nodes.placement.place(Demand((1,) * 160)) for _ in range(2)] == [None, None]
    for place, is_kept_out in zip(places, (True, False), strict=True):
        place.release()
        assert link.has_room(Size(160, 1), time.monotonic()) is not is_kept_out
    assert [nodes.placement.place(Demand((1,) * 160)) is None for _ in range(2)] == [False, True], "room for one"


def test_a_node_keeps_its_refusals_by_size():
    (link,) = Nodes(1).decode_nodes
    set_load(link, kv_blocks_free=5, num_sequences_free=4)
    for num_tokens in (400, 200, 100):
        assert link.has_room(Size(num_tokens, 1), time.monotonic())
        link.add_refusal(rejected(num_tokens // BLOCK_TOKENS), Size(num_tokens, 1))
    set_load(link, kv_blocks_free=11, num_sequences_free=4)
    room = [link.has_room(Size(num_tokens, 1), time.monotonic()) for num_tokens in (400, 399, 200, 199, 100, 50)]
    assert room == [False, False, False, True, True, True]
    for num_tokens in range(99, 50, -1):
        link.add_refusal(rejected(99), Size(num_tokens, 1))
    assert len(link.refusals) <= 16


@pytest.mark.parametrize("has_left", [False, True])
async def test_small_requests_pass_a_large_one_on_all_nodes_but_the_one_kept_for_it(make_nodes, has_left):
    nodes = make_nodes(num_decode_nodes=3)
    nodes.set_free(20)
    set_load(nodes.decode_nodes[1], kv_blocks_free=25, num_sequences_free=8)
    large = await nodes.refuse(500)
    if has_left:
        large.cancel()
        await asyncio.sleep(0)
    small = [await nodes.ask(50) for _ in range(30)]
    assert all(task.done() for task in small)
    used = {task.result().decode.name for task in small}
    assert used == ({"decode-0", "decode-1", "decode-2"} if has_left else {"decode-0", "decode-2"})
    if not has_left:
        set_load(nodes.decode_nodes[1], kv_blocks_free=32, num_sequences_free=8)
        await nodes.pump()
        assert large.result().decode.name == "decode-1"


async def test_many_large_requests_keep_one_node_and_not_one_each(make_nodes):
    nodes = make_nodes(num_decode_nodes=2)
    nodes.set_free(20)
    large = [await nodes.refuse(500) for _ in range(4)]
    small = [await nodes.ask(50) for _ in range(4)]
    assert [task.done() for task in (*large, *small)] == [False] * 4 + [True] * 4


async def test_of_nodes_that_lack_sequences_the_one_is_kept_where_the_fewest_have_to_end(make_nodes):
    nodes = make_nodes(num_decode_nodes=2)
    for link, num_blocks, num_sequences in zip(nodes.decode_nodes, (90, 60), (1, 7), strict=True):
        set_load(link, kv_blocks_total=100, kv_blocks_free=num_blocks, num_sequences_free=num_sequences, num_running=8)
        link.add_refusal(rejected(8, num_samples=8), Size(100, 8))
    several = await nodes.ask(100, num_samples=8)
    small = [await nodes.ask(16) for _ in range(2)]
    assert [task.done() for task in (several, *small)] == [False, True, True]
    assert {task.result().decode.name for task in small} == {"decode-0"}


# ---------------------------------------------------------------- room on prefill nodes


@pytest.mark.parametrize("num_tokens", [6000, 2000], ids=["beyond a node's share", "nearly all of it"])
async def test_a_long_prompt_keeps_one_prefill_node_and_no_decode_node(make_nodes, num_tokens):
    nodes = make_nodes(num_decode_nodes=1, num_prefill_nodes=3)
    for number, link in enumerate(nodes.prefill_nodes):
        link.num_outstanding_tokens = 300 + 10 * number
    large = await nodes.ask(num_tokens)
    small = [await nodes.ask(100, first_token=200 * number) for number in range(10)]
    assert [task.done() for task in (large, *small)] == [False] + [True] * 10
    assert {task.result().prefill.name for task in small} == {"prefill-1", "prefill-2"}
    nodes.placement.release_prefill(nodes.prefill_nodes[0], 300, 0)
    await nodes.pump()
    assert large.result().prefill.name == "prefill-0"


async def test_no_prefill_node_is_kept_that_gets_nothing_because_it_failed(make_nodes):
    nodes = make_nodes(num_decode_nodes=1, num_prefill_nodes=3)
    failed, *healthy = nodes.prefill_nodes
    failed.breaker.fail()
    failed.breaker.begin()
    for number, link in enumerate(healthy):
        link.num_outstanding_tokens = 300 + 10 * number
    assert not (await nodes.ask(6000)).done()
    assert {(await nodes.ask(50)).result().prefill.name for _ in range(4)} == {"prefill-2"}


async def test_what_waits_for_two_kinds_of_nodes_gets_both(make_nodes):
    """Other requests take the room of one role while the request waits for the other role, but not forever."""
    nodes = make_nodes(num_decode_nodes=2, num_prefill_nodes=2)
    for link in nodes.prefill_nodes:
        link.num_outstanding_tokens = 300
    large = await nodes.ask(6000)
    assert (await nodes.ask(100)).result().prefill.name == "prefill-1"
    nodes.set_free(20)
    for link in nodes.decode_nodes:
        link.add_refusal(rejected(375), Size(6000, 1))
    nodes.placement.release_prefill(nodes.prefill_nodes[0], 300, 0)
    assert not large.done()
    small = [await nodes.ask(100, first_token=200 * number) for number in range(10)]
    assert all(task.done() for task in small)
    assert {(task.result().decode.name, task.result().prefill.name) for task in small} == {("decode-0", "prefill-1")}
    set_load(nodes.decode_nodes[1], kv_blocks_free=375, num_sequences_free=8)
    await nodes.pump()
    assert (large.result().decode.name, large.result().prefill.name) == ("decode-1", "prefill-0")


# ---------------------------------------------------------------- nodes that have failed


def name_of(place):
    return None if place is None else place.decode.name


def test_a_node_that_is_on_time_is_found_though_it_failed_lately_and_a_late_one_did_not(monkeypatch):
    nodes = Nodes()
    late, sick = nodes.decode_nodes
    monkeypatch.setattr(DecodeLink, "is_late", property(lambda link: link is late))
    sick.breaker.fail()
    assert name_of(nodes.placement.place(Demand((1,)), must_be_on_time=True)) == sick.name
    assert name_of(nodes.placement.place(Demand((1,)))) == late.name


def test_where_healthy_nodes_are_full_those_that_failed_get_one_request_each():
    nodes = Nodes(4)
    healthy, *failed = nodes.decode_nodes
    for link in failed:
        link.breaker._cooldown_seconds = 30.0
        link.breaker.fail()
    assert name_of(nodes.placement.place(Demand((1,)))) == healthy.name
    healthy.add_refusal(rejected(1000), Size(1, 1))
    trials = [nodes.placement.place(Demand((1,))) for _ in range(4)]
    assert sorted(map(str, map(name_of, trials))) == ["None", *(link.name for link in failed)]
    failed[0].breaker.fail()
    assert nodes.placement.place(Demand((1,))) is None, "it is ill: its cooldown holds"
    failed[1].breaker.succeed()
    assert [name_of(nodes.placement.place(Demand((1,)))) for _ in range(2)] == [failed[1].name] * 2


def test_where_all_nodes_have_failed_they_are_used_as_if_none_had():
    nodes = Nodes(2)
    for link in nodes.decode_nodes:
        link.breaker.fail()
    assert None not in [nodes.placement.place(Demand((1,))) for _ in range(10)]


def test_prefill_nodes_that_failed_are_used_where_the_others_are_full():
    nodes = Nodes(1, 2)
    full, failed = nodes.prefill_nodes
    failed.breaker.fail()
    full.num_outstanding_tokens = 4 * ROWS
    assert nodes.placement.place(Demand(tuple(range(100)))).prefill is failed
    assert nodes.placement.place(Demand(tuple(range(100)))) is None
    failed.breaker.succeed()
    assert nodes.placement.place(Demand(tuple(range(100)))).prefill is failed


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("has_prefill_node", [True, False])
def test_a_request_that_requires_numerics_gets_nodes_that_have_them_although_others_have_less_to_do(has_prefill_node):
    nodes = Nodes(2, 2)
    for other, alike in (nodes.decode_nodes, nodes.prefill_nodes):
        other.info = dataclasses.replace(other.info, model=fake_model_info(numerics="exact (amx)"))
        alike.info = dataclasses.replace(alike.info, model=fake_model_info(numerics="exact (avx2)"))
    nodes.decode_nodes[1].num_placed = 5
    nodes.prefill_nodes[1].num_outstanding_tokens = 50
    if not has_prefill_node:
        nodes.prefill_nodes.pop()
    place = nodes.placement.place(Demand((1, 2), numerics="exact (avx2)"))
    assert place.decode.name == "decode-1"
    assert (place.prefill and place.prefill.name) == ("prefill-1" if has_prefill_node else None)


# ---------------------------------------------------------------- prefixes


def test_prefixes_are_known_by_whole_chunks_and_by_node():
    prefixes = PrefixMap(max_chunks=8)
    tokens = list(range(3 * PREFIX_CHUNK_TOKENS + 1))
    hashes = prefix_hashes(tokens)
    assert len(hashes) == 3
    assert len(prefix_hashes(tokens[:-1])) == 2, "the last token is always computed"
    prefixes.remember(hashes[:2], b"a")
    assert prefixes.num_held_tokens(hashes, b"a") == 2 * PREFIX_CHUNK_TOKENS
    assert prefixes.num_held_tokens(hashes, b"b") == 0
    other = prefix_hashes([9, *tokens[1:]])
    assert prefixes.num_held_tokens(other, b"a") == 0
    for start in range(1000, 1020):
        prefixes.remember(prefix_hashes(list(range(start, start + PREFIX_CHUNK_TOKENS + 1))), b"a")
    assert len(prefixes._nodes) == 8
    assert prefixes.num_held_tokens(hashes, b"a") == 0, "the least recently used is forgotten"


def test_of_a_blended_prompt_only_the_first_piece_is_remembered_and_only_of_prefill_nodes():
    nodes = Nodes(num_decode_nodes=1, num_prefill_nodes=1)
    tokens = tuple(range(5 * PREFIX_CHUNK_TOKENS))
    blended, plain = Demand(tokens, num_exact=2 * PREFIX_CHUNK_TOKENS + 1), Demand(tokens)
    place = nodes.placement.place(blended)
    assert place is not None
    held = [
        nodes.placement._prefixes.num_held_tokens(plain.prefix_hashes, link.incarnation)
        for link in (place.prefill, place.decode)
    ]
    assert held == [2 * PREFIX_CHUNK_TOKENS, 0]
