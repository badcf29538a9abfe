"""DraftClient against real draft nodes (or impostors) on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from decode_node.draft_link import draft_rank
from decode_node.drafts import DraftClient, DraftWant, NoDrafts
from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.node import ModelInfo, NodeInfo, NodeRole, NodeState
from outrider.protocol_versions import SUPPORTED_VERSIONS, ProtocolVersions
from outrider.request import SamplingParams
from outrider.service.config import ServerConfig
from outrider.service.resolver import FakeResolver
from outrider.speculation.draft_stream import (
    MAX_ANSWERS_PER_MESSAGE,
    DraftHello,
    DraftStatus,
    SequenceProposals,
    SequenceStart,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.speculation.proposers.scripted import ScriptedProposer
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.draft import proposals_to_proto, update_from_proto
from outrider.wire.node import info_to_proto

VOCAB_SIZE = 100
HELLO = DraftHello(
    incarnation=bytes(16),
    name="decode@test",
    vocab_size=VOCAB_SIZE,
    vocabulary_fingerprint="vocabulary-of-the-target",
    max_model_len=4096,
)
TEXT = [1, 2, 3, 4, 5, 6, 7, 8] * 20
PATIENCE_SECONDS = 30.0
GENEROUS_WAIT_SECONDS = 30.0


def start_of(prompt, *, max_tokens=1000) -> tuple[SequenceStart, tuple[int, ...]]:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    return SequenceStart(params=params, sample=0, prompt_length=len(prompt)), tuple(prompt)


def tokens(drafts) -> dict[int, tuple[int, ...]]:
    return {sequence_id: tree.token_ids for sequence_id, tree in drafts.trees.items()}


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails after a while."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def serving(servicer_or_service, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    is_node = isinstance(servicer_or_service, DraftNode)
    if is_node:
        servicer_or_service.add_to(server)
    else:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer_or_service, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    if is_node:
        await servicer_or_service.start(f"127.0.0.1:{bound}")
    try:
        yield bound
    finally:
        await server.stop(0)
        if is_node:
            await servicer_or_service.stop()


def draft_node(proposer=None, *, name="draft@test", **settings) -> DraftNode:
    config = DraftNodeConfig(server=ServerConfig(name=name), **settings)
    return DraftNode(config, registry=CollectorRegistry(), proposer=proposer or NgramProposer())


@contextlib.asynccontextmanager
async def client_of(*ports: int, hello: DraftHello = HELLO) -> AsyncIterator[DraftClient]:
    async with started(DraftClient([f"127.0.0.1:{port}" for port in ports], hello)) as client:
        await until(lambda: len(client.status().targets) == len(ports))
        yield client


@contextlib.asynccontextmanager
async def started(client: DraftClient) -> AsyncIterator[DraftClient]:
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def take(client: DraftClient, *wants: DraftWant, wait_seconds: float = GENEROUS_WAIT_SECONDS):
    """As the engine thread would."""
    return await asyncio.to_thread(client.take, wants, wait_seconds=wait_seconds)


def is_connected(client: DraftClient) -> Callable[[], bool]:
    return lambda: all(target.is_connected for target in client.status().targets)


async def test_a_draft_node_proposes_what_followed_last_time():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        taken = await take(client, DraftWant(7, TEXT, 4))
        assert tokens(taken) == {7: (1, 2, 3, 4)}
        assert set(tokens(taken)) == {7}


async def test_committed_tokens_use_up_the_branch_and_bring_the_next():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        text = list(TEXT)
        client.open(7, *start_of(text))
        for step in range(20):
            taken = await take(client, DraftWant(7, text, 3))
            expected = tuple(1 + (len(TEXT) + 4 * step + i) % 8 for i in range(3))
            assert tokens(taken)[7] == expected[: len(tokens(taken)[7])]
            committed = [1 + (len(text) + i) % 8 for i in range(4)]
            text += committed
            client.update([(7, committed, 3)])


async def test_what_is_left_of_a_branch_serves_the_next_step_without_any_wait():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT), num_wanted=3)
        await take(client, DraftWant(7, TEXT, 3))
        client.update([(7, (1, 2), 3)])
        taken = client.take([DraftWant(7, [*TEXT, 1, 2], 3)], wait_seconds=0.0)
        assert tokens(taken) == {7: (3, 4, 5)}


async def test_a_node_without_a_proposal_answers_at_once_and_is_no_miss():
    async with serving(draft_node()) as port, client_of(port) as client:
        await until(is_connected(client))
        text = list(range(50))
        client.open(7, *start_of(text))
        for token_id in range(50, 70):
            started = time.monotonic()
            taken = await take(client, DraftWant(7, text, 3))
            assert tokens(taken) == {}
            assert time.monotonic() - started < GENEROUS_WAIT_SECONDS / 2
            text.append(token_id)
            client.update([(7, (token_id,), 3)])
        assert not client.status().targets[0].is_breaker_open


async def test_a_restarted_draft_node_is_found_again_and_sent_everything():
    async with client_of(unused_port()) as client:
        port = int(client.status().targets[0].target.rsplit(":", 1)[1])
        client.open(7, *start_of(TEXT))
        for _ in range(2):
            async with serving(draft_node(), port):
                await until(is_connected(client))
                taken = await take(client, DraftWant(7, TEXT, 4))
                assert tokens(taken) == {7: (1, 2, 3, 4)}
            await until(lambda: not client.status().targets[0].is_connected)


async def test_a_node_that_forgot_a_sequence_asks_for_it_and_goes_on():
    node = draft_node()
    async with serving(node) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        assert set(tokens(await take(client, DraftWant(7, TEXT, 2)))) == {7}
        loop = node.draft_loop()
        for held in list(loop._held):
            loop._held._drop(held.name)
        text = [*TEXT, *TEXT[:40]]
        client.update([(7, TEXT[:40], 2)])
        await until(lambda: client.status().counters.num_syncs == 1)
        taken = await take(client, DraftWant(7, text, 2))
        assert tokens(taken) == {7: (1, 2)}


async def test_a_long_text_is_sent_in_pieces():
    async with serving(draft_node()) as port, client_of(port, hello=long_hello()) as client:
        await until(is_connected(client))
        text = TEXT * 80
        client.open(7, *start_of(text))
        await until(lambda: client.status().counters.num_updates_sent >= 4)
        found = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not found:  # a node that was slow to answer the pieces is not waited for in each step
                found = tokens(await take(client, DraftWant(7, text, 2)))
        assert found == {7: (1, 2)}


async def test_two_decode_nodes_use_one_draft_node_at_once_and_their_ids_do_not_meet():
    async with serving(draft_node()) as port, client_of(port) as one, client_of(port) as other:
        await until(lambda: is_connected(one)() and is_connected(other)())
        one.open(7, *start_of(TEXT))
        other.open(7, *start_of([9, 8] * 20))
        assert tokens(await take(one, DraftWant(7, TEXT, 2))) == {7: (1, 2)}
        assert tokens(await take(other, DraftWant(7, [9, 8] * 20, 2))) == {7: (9, 8)}
        await one.stop()
        assert tokens(await take(other, DraftWant(7, [9, 8] * 20, 2))) == {7: (9, 8)}


async def test_another_vocabulary_is_refused_and_both_are_named():
    proposer = ScriptedProposer([TEXT], vocabulary_fingerprint="vocabulary-of-a-draft-model")
    async with serving(draft_node(proposer)) as port, client_of(port) as client:
        await until(lambda: client.status().targets[0].refusal != "")
        status = client.status().targets[0]
        assert "decode@test" in status.refusal
        assert "draft@test" in status.refusal
        assert "vocabulary-of-th" in status.refusal
        assert "vocabulary-of-a-" in status.refusal
        assert status.is_breaker_open
        client.open(7, *start_of(TEXT))
        assert tokens(await take(client, DraftWant(7, TEXT, 2))) == {}


async def test_another_protocol_version_is_refused():
    hello = DraftHello(
        protocol_versions=ProtocolVersions(oldest=SUPPORTED_VERSIONS.newest + 1, newest=SUPPORTED_VERSIONS.newest + 2),
        incarnation=bytes(16),
        name="decode@new",
        vocab_size=VOCAB_SIZE,
        vocabulary_fingerprint="",
        max_model_len=64,
    )
    async with serving(draft_node()) as port, client_of(port, hello=hello) as client:
        await until(lambda: client.status().targets[0].refusal != "")
        assert "protocol" in client.status().targets[0].refusal


async def test_sequences_of_a_node_that_dies_move_to_another():
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(draft_node(name="first")))
        async with serving(draft_node(name="second")) as second:
            client = await stack.enter_async_context(client_of(first, second))
            await until(is_connected(client))
            for sequence_id in range(6):
                client.open(sequence_id, *start_of(TEXT))
            assert [target.num_sequences for target in client.status().targets] == [3, 3]
        await until(lambda: [target.num_sequences for target in client.status().targets] == [6, 0])
        wants = [DraftWant(sequence_id, TEXT, 2) for sequence_id in range(6)]
        await until(lambda: client.take(wants, wait_seconds=0.0).hits == set(range(6)))


async def test_a_draft_node_that_comes_is_used_and_one_that_leaves_the_name_is_left_when_its_stream_ends():
    resolver = FakeResolver({})
    client = DraftClient(["draft.test:1"], HELLO, resolver=resolver, resolve_interval_seconds=0.01)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(started(client))
        client.open(0, *start_of(TEXT))
        first = await stack.enter_async_context(serving(draft_node(name="first")))
        resolver.set("draft.test:1", f"127.0.0.1:{first}")
        await until(lambda: client.status().counters.num_branches == 1)
        async with serving(draft_node(name="second")) as second:
            resolver.set("draft.test:1", f"127.0.0.1:{first}", f"127.0.0.1:{second}")
            await until(lambda: [target.is_connected for target in client.status().targets] == [True, True])
            client.open(1, *start_of(TEXT))
            assert sequences_by_node(client) == {"first": 1, "second": 1}
            resolver.set("draft.test:1", f"127.0.0.1:{first}")
            num_lookups = resolver.num_lookups
            await until(lambda: resolver.num_lookups > num_lookups + 2)
            assert sequences_by_node(client) == {"first": 1, "second": 1}
        await until(lambda: sequences_by_node(client) == {"first": 2})
        wants = [DraftWant(sequence_id, TEXT, 2) for sequence_id in range(2)]
        await until(lambda: client.take(wants, wait_seconds=0.0).hits == {0, 1})


async def test_two_targets_that_lead_to_one_process_are_one_node():
    async with serving(draft_node()) as port:
        resolver = FakeResolver({"draft.test:1": [f"127.0.0.1:{port}"], "alias.test:1": [f"ipv4:127.0.0.1:{port}"]})
        client = DraftClient(["draft.test:1", "alias.test:1"], HELLO, resolver=resolver)
        async with started(client):
            await until(lambda: any("already" in target.refusal for target in client.status().targets))
            await until(lambda: [target.is_connected for target in client.status().targets].count(True) == 1)


def test_decode_nodes_begin_with_different_draft_nodes():
    def first_choice(decode_node: int) -> str:
        hello = dataclasses.replace(HELLO, incarnation=decode_node.to_bytes(16, "big"))
        return min(("10.0.0.1:1", "10.0.0.2:1"), key=lambda target: draft_rank(hello, target))

    choices = [first_choice(decode_node) for decode_node in range(64)]
    assert 16 < choices.count("10.0.0.1:1") < 48


def sequences_by_node(client: DraftClient) -> dict[str, int]:
    return {target.node: target.num_sequences for target in client.status().targets}


class Impostor(draft_pb2_grpc.DraftServiceServicer):
    """Says hello, records every message, and answers with whatever it is told to."""

    def __init__(self, answer=lambda _update: [], *, says_hello=True) -> None:
        self.messages: list[list] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._answer = answer
        self._says_hello = says_hello

    async def Draft(self, request_iterator, context):
        await anext(request_iterator)
        if not self._says_hello:
            await asyncio.Event().wait()
        model = ModelInfo(
            name="impostor",
            vocab_size=0,
            max_model_len=0,
            eos_token_ids=(),
            dtype="",
            fingerprint="",
            vocabulary_fingerprint="",
        )
        info = NodeInfo(
            incarnation=bytes(16),
            name="impostor",
            role=NodeRole.DRAFT,
            state=NodeState.SERVING,
            version="",
            model=model,
        )
        await context.write(draft_pb2.DraftProposals(hello=info_to_proto(info)))
        while True:
            await self.may_read.wait()
            message = await anext(request_iterator, None)
            if message is None:
                return
            updates = [update_from_proto(proto) for proto in message.sequences]
            self.messages.append(updates)
            answers = [proposals_to_proto(answer) for update in updates for answer in self._answer(update)]
            if answers:
                await context.write(draft_pb2.DraftProposals(sequences=answers))


async def test_a_frozen_node_opens_the_breaker_and_is_not_waited_for_any_more():
    impostor = Impostor()
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        text = list(TEXT)
        client.open(7, *start_of(text))
        for _ in range(5):
            assert not client.status().targets[0].is_breaker_open
            taken = await take(client, DraftWant(7, text, 3), wait_seconds=0.02)
            assert taken.waited_seconds >= 0.019
            text.append(1)
            client.update([(7, (1,), 3)])
        assert client.status().targets[0].is_breaker_open
        taken = await take(client, DraftWant(7, text, 3), wait_seconds=GENEROUS_WAIT_SECONDS)
        assert taken.waited_seconds < GENEROUS_WAIT_SECONDS / 2


async def test_a_node_that_thaws_finds_one_message_with_the_newest_state():
    impostor = Impostor(
        lambda update: [SequenceProposals(sequence_id=7, status=DraftStatus.NOTHING, acked_length=update.length)]
    )
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        await until(lambda: len(impostor.messages) == 1)
        impostor.may_read.clear()
        text = list(TEXT)
        for step in range(300):
            text.append(step % 10)
            client.update([(7, (step % 10,), 3)])
            await asyncio.sleep(0)
        impostor.may_read.set()
        await until(lambda: impostor.messages[-1][-1].length == len(text))
        assert len(impostor.messages) <= 4  # one that was under way, one that waited, the newest
        assert impostor.messages[-1][-1].prefix_hash == prefix_hash(text)


async def test_the_breaker_closes_by_itself_when_the_node_answers_again():
    is_frozen = True

    def answer(update):
        proposed = DraftTree(update.length, update.prefix_hash, (1, 2, 3))
        return [
            SequenceProposals(
                sequence_id=7, status=DraftStatus.PROPOSED, acked_length=update.length, branches=(proposed,)
            )
        ]

    impostor = Impostor(lambda update: [] if is_frozen else answer(update))
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        text = list(TEXT)
        client.open(7, *start_of(text))
        client.open(8, *start_of(text))
        for _ in range(6):
            await take(client, DraftWant(7, text, 3), DraftWant(8, text, 3), wait_seconds=0.01)
        assert client.status().targets[0].is_breaker_open
        is_frozen = False
        client.open(9, *start_of(text))  # sent when the next probe is due, within a second
        await until(lambda: not client.status().targets[0].is_breaker_open)


async def test_a_node_that_says_no_hello_is_given_up_and_costs_nothing(monkeypatch):
    monkeypatch.setattr("decode_node.draft_link.HELLO_TIMEOUT_SECONDS", 0.05)
    async with serving(Impostor(says_hello=False)) as port, client_of(port) as client:
        client.open(7, *start_of(TEXT))
        taken = await take(client, DraftWant(7, TEXT, 3))
        assert tokens(taken) == {}
        assert taken.waited_seconds < GENEROUS_WAIT_SECONDS / 2
        assert not client.status().targets[0].is_connected


def lie(**changes):
    """An answer that is right but for `changes`."""

    def answer(update):
        branch = DraftTree(
            changes.get("length", update.length),
            changes.get("prefix_hash", update.prefix_hash),
            changes.get("token_ids", (1, 2)),
        )
        answer = SequenceProposals(
            sequence_id=changes.get("sequence_id", update.sequence_id),
            status=DraftStatus.PROPOSED,
            acked_length=changes.get("acked_length", update.length),
            branches=(branch,) * changes.get("num_branches", 1),
        )
        return [answer]

    return answer


@pytest.mark.parametrize(
    "lies",
    [
        {"token_ids": (VOCAB_SIZE, 1)},
        {"token_ids": (2**32 - 1,)},
        {"token_ids": (1,) * 200},
        {"prefix_hash": 12345},
        {"length": 10**6},
        {"num_branches": 50},
        {"acked_length": 10**6},
    ],
    ids=str,
)
async def test_a_lying_node_is_not_believed_about_that_sequence_any_more(lies):
    impostor = Impostor(lambda update: lie(**lies)(update) if update.sequence_id == 7 else lie()(update))
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        await until(lambda: client.status().counters.num_quarantined == 1)
        assert tokens(await take(client, DraftWant(7, TEXT, 4))) == {}
        client.open(8, *start_of(TEXT))
        assert tokens(await take(client, DraftWant(8, TEXT, 4))) == {8: (1, 2)}
        assert client.status().targets[0].is_connected


async def test_answers_about_unknown_sequences_are_counted_and_ignored():
    impostor = Impostor(lambda update: [*lie(sequence_id=999)(update), *lie()(update)])
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        assert tokens(await take(client, DraftWant(7, TEXT, 4))) == {7: (1, 2)}
        assert client.status().counters.num_stale_answers == 1
        assert client.status().counters.num_quarantined == 0


async def test_a_node_that_always_needs_sync_is_sent_the_text_once_a_second_only():
    impostor = Impostor(
        lambda update: [SequenceProposals(sequence_id=update.sequence_id, status=DraftStatus.UNKNOWN_PREFIX)]
    )
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        text = list(TEXT)
        started = time.monotonic()
        client.open(7, *start_of(text))
        for _ in range(50):
            text.append(1)
            client.update([(7, (1,), 3)])
            await asyncio.sleep(0.002)
        assert len(impostor.messages) <= 3 + (time.monotonic() - started)


async def test_a_node_that_sends_too_many_answers_at_once_loses_its_stream():
    impostor = Impostor(lambda update: lie(sequence_id=999)(update) * (MAX_ANSWERS_PER_MESSAGE + 1))
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        await until(lambda: not is_connected(client)())
        assert client.status().counters.num_stale_answers == 0


async def test_a_closed_sequence_is_forgotten_over_there():
    node = draft_node()
    async with serving(node) as port, client_of(port) as client:
        await until(is_connected(client))
        client.open(7, *start_of(TEXT))
        await take(client, DraftWant(7, TEXT, 2))
        assert len(node.draft_loop()._held) == 1
        client.close(7)
        await until(lambda: len(node.draft_loop()._held) == 0)


async def test_without_draft_nodes_everything_is_a_no_op():
    drafts = NoDrafts()
    await drafts.start()
    drafts.open(1, *start_of(TEXT))
    drafts.update([(1, (1,), 3)])
    assert tokens(drafts.take([DraftWant(1, TEXT, 3)], wait_seconds=1.0)) == {}
    drafts.close(1)
    assert drafts.status().targets == ()
    await drafts.stop()


def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def long_hello() -> DraftHello:
    return DraftHello(
        incarnation=bytes(16),
        name="decode@test",
        vocab_size=VOCAB_SIZE,
        vocabulary_fingerprint="",
        max_model_len=100_000,
    )
