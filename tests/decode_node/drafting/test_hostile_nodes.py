"""DraftClient against nodes that freeze, flap, lie or flood."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from outrider.drafting import book, link
from outrider.speculation.draft_stream import MAX_ANSWERS_PER_MESSAGE, DraftStatus, SequenceProposals
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from tests.decode_node.drafting.streams import (
    GENEROUS_WAIT_SECONDS,
    TEXT,
    VOCAB_SIZE,
    Impostor,
    client_of,
    is_connected,
    open_sequence,
    serving,
    take,
    tokens,
)
from tests.support.fake_clock import FakeClock
from tests.support.waiting import until


async def test_a_frozen_node_is_waited_for_once(monkeypatch):
    impostor, clock, waits = Impostor(), FakeClock(), []
    async with serving(impostor) as port, client_of(port) as client:
        client._book._clock = clock
        await until(is_connected(client))
        open_sequence(client, 7)
        await until(lambda: impostor.messages)
        taken = await take(client, 7, wait_seconds=0.02)
        assert taken.waited_seconds >= 0.019
        clock.advance(0.03)
        client.commit([(7, (1,), 3)])
        monkeypatch.setattr(client._changed, "wait", waits.append)
        for _ in range(5):
            clock.advance(0.01)
            await take(client, 7, wait_seconds=0.02)
        assert not waits


async def test_a_node_that_thaws_finds_one_message_with_the_newest_state():
    impostor = Impostor(lambda update: [SequenceProposals(update.sequence_id, DraftStatus.NOTHING, update.length)])
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7)
        await until(lambda: len(impostor.messages) == 1)
        impostor.may_read.clear()
        text = list(TEXT)
        for step in range(300):
            text.append(step % 10)
            client.commit([(7, (step % 10,), 3)])
            await asyncio.sleep(0)
        impostor.may_read.set()
        await until(lambda: impostor.messages[-1][-1].length == len(text))
        assert len(impostor.messages) <= 4  # one in transit, one that waited, and the newest
        assert impostor.messages[-1][-1].prefix_hash == prefix_hash(text)


async def test_a_node_that_has_lost_an_update_is_sent_everything_anew(monkeypatch):
    monkeypatch.setattr(book, "UNANSWERED_SECONDS", 0.05)
    num_updates = itertools.count()
    impostor = Impostor(lambda update: [honest(update)] if next(num_updates) else [])
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7)
        await until(lambda: tokens(client.take([7], wait_seconds=0.0)) == {7: (1, 2)})


async def test_a_node_that_says_no_hello_is_given_up_and_costs_nothing(monkeypatch):
    monkeypatch.setattr(link, "HELLO_TIMEOUT_SECONDS", 0.05)
    async with serving(Impostor(says_hello=False)) as port, client_of(port) as client:
        open_sequence(client, 7)
        taken = await take(client, 7)
        assert tokens(taken) == {}
        assert taken.waited_seconds < GENEROUS_WAIT_SECONDS / 2
        assert not client.links[0].is_connected


async def test_a_node_whose_streams_end_at_once_is_dialled_ever_more_rarely(monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def note_pause(seconds):
        if link.FIRST_BACKOFF_SECONDS / 2 < seconds < 2 * link.MAX_BACKOFF_SECONDS:  # not the pause between two lookups
            pauses.append(seconds)
        await sleep(0)

    async def end(_link, _call):
        raise link.PeerLostError("ended", node="x")

    monkeypatch.setattr(link.asyncio, "sleep", note_pause)
    monkeypatch.setattr(link.DraftLink, "_exchange_state", end)
    async with serving(Impostor()) as port, client_of(port):
        async with asyncio.timeout(GENEROUS_WAIT_SECONDS):
            while len(pauses) < 8:
                await sleep(0.002)
    assert pauses[0] < 2 * link.FIRST_BACKOFF_SECONDS
    assert min(pauses[5:8]) > 0.7 * link.MAX_BACKOFF_SECONDS


def honest(update, **changes):
    """Returns a valid answer, except for `changes` to its branch."""
    branch = replace(DraftTree(update.length, update.prefix_hash, (1, 2)), **changes)
    return SequenceProposals(update.sequence_id, DraftStatus.PROPOSED, update.length, (branch,))


async def test_a_lying_node_is_not_believed_about_that_sequence_any_more():
    """test_branches.py tests which answers count as lies."""
    first = []  # stream id of the first sequence

    def answer(update):
        first[:] = first or [update.sequence_id]
        return [honest(update, token_ids=(1, VOCAB_SIZE)) if update.sequence_id in first else honest(update)]

    async with serving(Impostor(answer)) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7)
        await until(lambda: client.status().counters.num_quarantined == 1)
        assert tokens(await take(client, 7)) == {}
        open_sequence(client, 8)
        assert tokens(await take(client, 8)) == {8: (1, 2)}
        assert client.links[0].is_connected


async def test_a_node_that_sends_too_many_answers_at_once_loses_its_stream():
    impostor = Impostor(lambda update: [honest(update)._replace(sequence_id=999)] * (MAX_ANSWERS_PER_MESSAGE + 1))
    async with serving(impostor) as port, client_of(port) as client:
        await until(is_connected(client))
        open_sequence(client, 7)
        await until(lambda: not is_connected(client)())
        assert client.status().counters.num_stale_answers == 0


async def test_a_node_that_reads_nothing_is_given_up_also_in_the_middle_of_a_message(monkeypatch):
    """Its window is full, so the write does not return. Unanswered updates are only checked between writes."""
    monkeypatch.setattr(link, "UNANSWERED_SECONDS", 0.05)

    class Full:
        async def write(self, _message):
            await asyncio.Event().wait()

    async with client_of(1) as client:  # no node listens there
        client._book.connected(client.links[0].node)
        open_sequence(client, 7)
        async with asyncio.timeout(GENEROUS_WAIT_SECONDS):
            with pytest.raises(TimeoutError):
                await client.links[0]._write(Full())
