"""DraftClient and draft nodes with a head, on loopback."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from decode_node.drafting.client import DraftClient
from outrider.node import FeatureFormat
from tests.decode_node.drafting.feature_target import FeatureTarget
from tests.decode_node.drafting.streams import (
    HELLO,
    TEXT,
    client_of,
    draft_node,
    is_connected,
    open_sequence,
    serving,
    started,
    tokens,
)
from tests.support.fake_head import FEATURES, FakeHead
from tests.support.waiting import until

HELLO_WITH_FEATURES = dataclasses.replace(HELLO, features=FEATURES)
LONG_TEXT = TEXT * 3
PROMPT = LONG_TEXT[: len(TEXT)]


class Engine:
    """Steps of a target on one sequence."""

    def __init__(self, client: DraftClient, target: FeatureTarget) -> None:
        self._client, self._target = client, target
        self._num_committed = len(PROMPT)
        open_sequence(client, 7, PROMPT)

    def step(self, num_tokens: int = 1) -> None:
        old, self._num_committed = self._num_committed, self._num_committed + num_tokens
        self._target.compute(7, LONG_TEXT[: self._num_committed])
        self._client.update([(7, LONG_TEXT[old : self._num_committed], 4)], self._target.tables)

    def has_draft(self) -> bool:
        found = tokens(self._client.take([7], wait_seconds=0.0))
        return found == {7: tuple(LONG_TEXT[self._num_committed : self._num_committed + 2])}


def started_client(target: FeatureTarget, *ports: int) -> contextlib.AbstractAsyncContextManager[DraftClient]:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return started(DraftClient(addresses, HELLO_WITH_FEATURES, feature_plane=target.plane))


async def test_a_head_drafts_from_features_that_go_along_with_the_tokens():
    head, target = FakeHead([LONG_TEXT]), FeatureTarget()
    async with serving(draft_node(head)) as port, started_client(target, port) as client:
        await until(lambda: client.needs_features)
        engine = Engine(client, target)
        for _ in range(5):
            engine.step(2)
            await until(engine.has_draft)
    assert not head.wrong


async def test_a_lost_nodes_sequence_goes_on_at_another_one_with_all_its_features():
    first, second, target = FakeHead([LONG_TEXT]), FakeHead([LONG_TEXT]), FeatureTarget()
    async with contextlib.AsyncExitStack() as others:
        one = await others.enter_async_context(serving(draft_node(first, name="one")))
        async with serving(draft_node(second, name="two")) as two, started_client(target, one, two) as client:
            await until(lambda: len(client.links) == 2 and is_connected(client)())
            engine = Engine(client, target)
            engine.step()
            await until(engine.has_draft)
            (used,) = (link for link in client.links if link.node.num_sequences)
            if used.node_name == "two":  # the one that ends is the one that can be ended here
                used.node.rank = 2**64
                client._book._move_away(used.node, keep=0)
                engine.step()
                await until(engine.has_draft)
            await others.aclose()
            await until(lambda: not is_connected(client)())
            engine.step()
            await until(engine.has_draft)
    assert not first.wrong
    assert not second.wrong


@pytest.mark.parametrize("computed", [None, dataclasses.replace(FEATURES, fingerprint="0" * 64)])
async def test_a_head_of_other_features_is_refused_and_both_are_named(computed: FeatureFormat | None):
    hello, plane = dataclasses.replace(HELLO, features=computed), FeatureTarget().plane if computed else None
    async with (
        serving(draft_node(FakeHead([]))) as port,
        started(DraftClient([f"127.0.0.1:{port}"], hello, feature_plane=plane)) as client,
    ):
        await until(lambda: any(link.refusal for link in client.links))
        for part in ("decode@test", "draft@test", str(FEATURES), str(computed or "none")):
            assert part in client.links[0].refusal


async def test_nothing_is_read_for_draft_nodes_without_a_head():
    target = FeatureTarget()
    async with serving(draft_node()) as port, started_client(target, port) as client:
        await until(is_connected(client))
        assert not client.needs_features
        engine = Engine(client, target)
        target.plane.read = None
        engine.step()
        await until(engine.has_draft)
    async with serving(draft_node(FakeHead([]))) as port, client_of(port) as client:
        assert not client.needs_features
