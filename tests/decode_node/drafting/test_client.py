"""DraftClient against real draft nodes on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import pytest

from decode_node.drafting.client import DraftClient
from outrider.drafting.link import draft_rank
from outrider.node import FeatureFormat
from outrider.speculation.proposers.base import ProposerInfo
from tests.decode_node.drafting.feature_target import FeatureTarget
from tests.decode_node.drafting.streams import (
    GENEROUS_WAIT_SECONDS,
    HELLO,
    TEXT,
    client_of,
    draft_node,
    is_connected,
    open_sequence,
    serving,
    started,
    take,
    tokens,
    unused_port,
)
from tests.support.fake_head import FEATURES, FakeHead
from tests.support.fake_resolver import FakeResolver
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.waiting import until


async def test_committed_tokens_use_up_the_branch_and_bring_the_next():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        length = len(TEXT)
        open_sequence(client, 7)
        for _ in range(20):
            (draft,) = tokens(await take(client, 7), 3).values()
            assert draft == tuple(1 + (length + index) % 8 for index in range(len(draft)))
            committed = [1 + (length + index) % 8 for index in range(4)]
            length += 4
            client.commit([(7, committed, 3)])


async def test_a_node_without_a_proposal_answers_at_once_and_is_not_late():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7, list(range(50)))
        for token_id in range(50, 70):
            began_at = time.monotonic()
            assert tokens(await take(client, 7)) == {}
            assert time.monotonic() - began_at < GENEROUS_WAIT_SECONDS / 2
            client.commit([(7, (token_id,), 3)])
        assert not any(client.status().is_late.values())


async def test_a_restarted_draft_node_is_found_again_and_sent_everything():
    async with client_of(unused_port()) as client:
        port = int(client.links[0].address.rsplit(":", 1)[1])
        open_sequence(client, 7)
        for _ in range(2):
            async with serving(draft_node(), port):
                await until(is_connected(client))
                await until(lambda: tokens(client.take([7], wait_seconds=0.0)) == {7: (1, 2)})
            await until(lambda: not client.links[0].is_connected)


async def test_a_node_that_forgot_a_sequence_asks_for_it_and_goes_on():
    node = draft_node()
    async with serving(node) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7)
        assert set(tokens(await take(client, 7))) == {7}
        loop = node.draft_loop()
        for sequence_id in list(loop._held._holdings[0].sequences):
            loop._held.close(loop._peers[0], sequence_id)
        client.commit([(7, TEXT[:40], 2)])
        await until(lambda: tokens(client.take([7], wait_seconds=0.0)) == {7: (1, 2)})


async def test_another_vocabulary_is_refused_and_both_are_named():
    proposer = ScriptedProposer([TEXT])
    proposer.info = ProposerInfo(name="scripted", vocabulary_fingerprint="vocabulary-of-a-draft-model")
    async with serving(draft_node(proposer)) as port, client_of(port) as client:
        await until(lambda: client.links[0].refusal != "")
        for part in ("decode@test", "draft@test", "vocabulary-of-th", "vocabulary-of-a-"):
            assert part in client.links[0].refusal
        assert all(client.status().is_late.values())
        open_sequence(client, 7)
        assert tokens(await take(client, 7)) == {}


@pytest.mark.parametrize("computed", [None, dataclasses.replace(FEATURES, fingerprint="0" * 64)])
async def test_a_head_of_other_features_is_refused_and_both_are_named(computed: FeatureFormat | None):
    hello, plane = dataclasses.replace(HELLO, features=computed), FeatureTarget().plane if computed else None
    async with (
        serving(draft_node(FakeHead([]))) as port,
        started(DraftClient([f"127.0.0.1:{port}"], hello, features=plane)) as client,
    ):
        await until(lambda: any(link.refusal for link in client.links))
        for part in ("decode@test", "draft@test", str(FEATURES), str(computed or "none")):
            assert part in client.links[0].refusal


async def test_neither_a_step_nor_the_event_loop_waits_while_features_are_read():
    target, is_reading, may_go_on, went_on = FeatureTarget(), threading.Event(), threading.Event(), []

    class SlowSource:
        bytes_per_token, reads_wait = target.plane.bytes_per_token, True

        def read(self, ranges):
            is_reading.set()
            went_on.append(may_go_on.wait(1.0))
            return target.plane.read(ranges)

    hello = dataclasses.replace(HELLO, features=FEATURES)
    async with (
        serving(draft_node(FakeHead([]))) as port,
        started(DraftClient([f"127.0.0.1:{port}"], hello, features=SlowSource())) as client,
    ):
        await until(is_connected(client))
        open_sequence(client, 7)
        client.commit([(7, (1,), 3)], {7: target.compute(7, [*TEXT, 1])})
        await until(is_reading.is_set)
        client.commit([(7, (2,), 3)], {7: target.compute(7, [*TEXT, 1, 2])})
        client.take([7], wait_seconds=0.0)
        may_go_on.set()
        await until(lambda: went_on)
    assert went_on[0]


async def test_the_event_loop_itself_reads_features_in_main_memory(monkeypatch):
    target, readers = FeatureTarget(), []
    read = target.plane.read
    monkeypatch.setattr(target.plane, "read", lambda ranges: readers.append(threading.current_thread()) or read(ranges))
    hello = dataclasses.replace(HELLO, features=FEATURES)
    async with (
        serving(draft_node(FakeHead([]))) as port,
        started(DraftClient([f"127.0.0.1:{port}"], hello, features=target.plane)) as client,
    ):
        await until(is_connected(client))
        open_sequence(client, 7)
        client.commit([(7, (1,), 3)], {7: target.compute(7, [*TEXT, 1])})
        await until(lambda: readers)
    assert set(readers) == {threading.current_thread()}


async def test_a_draft_node_that_comes_is_used_and_one_that_leaves_the_name_is_left_when_its_stream_ends():
    resolver = FakeResolver({})
    client = DraftClient(["draft.test:1"], HELLO, resolver=resolver, resolve_interval_seconds=0.01)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(started(client))
        open_sequence(client, 0)
        first = await stack.enter_async_context(serving(draft_node(name="first")))
        resolver.set("draft.test:1", f"127.0.0.1:{first}")
        await until(lambda: client.take([0], wait_seconds=0.0).hits == {0})
        async with serving(draft_node(name="second")) as second:
            resolver.set("draft.test:1", f"127.0.0.1:{first}", f"127.0.0.1:{second}")
            await until(lambda: [node.is_connected for node in client.links] == [True, True])
            open_sequence(client, 1)
            assert sequences_by_node(client) == {"first": 1, "second": 1}
            resolver.set("draft.test:1", f"127.0.0.1:{first}")
            num_lookups = resolver.num_lookups
            await until(lambda: resolver.num_lookups > num_lookups + 2)
            assert sequences_by_node(client) == {"first": 1, "second": 1}
        await until(lambda: sequences_by_node(client) == {"first": 2})
        await until(lambda: client.take([0, 1], wait_seconds=0.0).hits == {0, 1})


def sequences_by_node(client):
    return {link.node_name: link.node.num_sequences for link in client.links}


async def test_two_names_that_lead_to_one_process_are_one_node():
    async with serving(draft_node()) as port:
        resolver = FakeResolver({"draft.test:1": [f"127.0.0.1:{port}"], "alias.test:1": [f"ipv4:127.0.0.1:{port}"]})
        client = DraftClient(["draft.test:1", "alias.test:1"], HELLO, resolver=resolver)
        async with started(client):
            await until(lambda: any("already" in node.refusal for node in client.links))
            await until(lambda: [node.is_connected for node in client.links].count(True) == 1)


def test_decode_nodes_begin_with_different_draft_nodes():
    def first_choice(decode_node: int) -> str:
        hello = dataclasses.replace(HELLO, incarnation=decode_node.to_bytes(16, "big"))
        return min(("10.0.0.1:1", "10.0.0.2:1"), key=lambda address: draft_rank(hello, address))

    choices = [first_choice(decode_node) for decode_node in range(64)]
    assert 16 < choices.count("10.0.0.1:1") < 48
