"""Draft nodes on loopback, or impostors, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from decode_node.drafting.client import DraftClient
from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.node import NodeInfo, NodeRole, NodeState
from outrider.rpc.channels import server_options
from outrider.speculation.draft_stream import DraftHello
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.draft import proposals_to_proto, update_from_proto
from outrider.wire.node import info_to_proto
from tests.support.draft_messages import hello_of, start_of
from tests.support.waiting import until

VOCAB_SIZE = 100
HELLO = hello_of(name="decode@test", vocab_size=VOCAB_SIZE, vocabulary_fingerprint="vocabulary-of-the-target")
TEXT = [1, 2, 3, 4, 5, 6, 7, 8] * 20
GENEROUS_WAIT_SECONDS = 30.0


def open_sequence(client: DraftClient, sequence_id: int, prompt=TEXT, *, num_wanted: int = 4) -> None:
    client.open(sequence_id, start_of(len(prompt)), tuple(prompt), num_wanted=num_wanted)


def tokens(drafts, num_tokens: int = 2) -> dict[int, tuple[int, ...]]:
    """Returns the first tokens of each draft."""
    return {sequence_id: tree.token_ids[:num_tokens] for sequence_id, tree in drafts.trees.items()}


@contextlib.asynccontextmanager
async def serving(servicer_or_service, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=server_options())
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
    config = DraftNodeConfig(**settings)
    return DraftNode(config, lambda: proposer or NgramProposer(), name=name, registry=CollectorRegistry())


@contextlib.asynccontextmanager
async def client_of(*ports: int, hello: DraftHello = HELLO) -> AsyncIterator[DraftClient]:
    async with started(DraftClient([f"127.0.0.1:{port}" for port in ports], hello)) as client:
        await until(lambda: len(client.links) == len(ports))
        yield client


@contextlib.asynccontextmanager
async def started(client: DraftClient) -> AsyncIterator[DraftClient]:
    client.observe_step(30.0)  # so that no node is late on a busy machine
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def take(client: DraftClient, *sequence_ids: int, wait_seconds: float = GENEROUS_WAIT_SECONDS):
    """Takes drafts in another thread, as the engine thread does."""
    return await asyncio.to_thread(client.take, sequence_ids, wait_seconds=wait_seconds)


def is_connected(client: DraftClient) -> Callable[[], bool]:
    return lambda: all(target.is_connected for target in client.links)


class Impostor(draft_pb2_grpc.DraftServiceServicer):
    """A draft node that says hello, records every message, and sends the answers that `answer` returns."""

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
        info = NodeInfo(
            incarnation=bytes(16), name="impostor", role=NodeRole.DRAFT, state=NodeState.SERVING, version=""
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


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
