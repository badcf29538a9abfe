"""Replication of answers to a store: one request or id never delays another."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc

from outrider.errors import AlreadyRunningError, StoreError
from router.durability.keeper import CREATES_AT_ONCE
from router.durability.store.base import SpansRefusedError
from tests.router.conftest import PATIENCE_SECONDS, eventually, refused
from tests.router.take_over import gated, request, serve, watched
from tests.support.memory_store import MemoryAnswerStore


class TakenStore(MemoryAnswerStore):
    """A store in which another router creates a request that was lost, just before this router does."""

    num_refused = 0
    is_taken = False

    async def create(self, stored):
        if self.is_taken:
            self.num_refused += 1
            raise AlreadyRunningError("another router has it")
        await super().create(stored)


async def test_an_id_that_was_taken_meanwhile_does_not_end_the_keeping_of_the_others(cluster):
    store, records = await serve(cluster, TakenStore, store_lease_seconds=0.1)
    call = cluster.stub.Generate(request(cluster, 100))
    await call.read()
    store.is_taken = True
    records.remove("r")
    await cluster.eventually(lambda: store.num_refused >= 2, what="the keeper asks again")
    store.is_taken = False
    await cluster.eventually(lambda: records.get("r") is not None, what="the keeper goes on")
    call.cancel()


class FullStore(MemoryAnswerStore):
    """A store without memory for tokens."""

    num_renewals = 0

    async def append(self, spans):
        raise StoreError("OOM command not allowed")

    async def renew(self, request_ids):
        self.num_renewals += 1
        return await super().renew(request_ids)


async def test_leases_are_renewed_while_the_store_takes_no_tokens(cluster):
    store, records = await serve(cluster, FullStore, lease_seconds=0.3, store_lease_seconds=0.3)
    call = cluster.stub.Generate(request(cluster, 100))
    await call.read()
    expires_at = records.get("r").expires_at
    await cluster.eventually(lambda: store.num_renewals >= 3, what="renewals")
    assert records.get("r").expires_at > expires_at
    call.cancel()


class RefusingStore(MemoryAnswerStore):
    """A store that refuses the tokens of one request."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.starts = Counter()  # number of spans by request and start position

    async def append(self, spans):
        spans = list(spans)
        self.starts.update((span.request_id, span.start_position) for span in spans)
        await super().append(span for span in spans if span.request_id != "refused")
        if any(span.request_id == "refused" for span in spans):
            raise SpansRefusedError("WRONGTYPE", frozenset({"refused"}))


async def test_tokens_that_the_store_refuses_of_one_request_hold_up_no_other(cluster):
    store, records = await serve(cluster, RefusingStore)
    calls = [cluster.stub.Generate(request(cluster, 400, request_id=name)) for name in ("refused", "taken")]
    for call in calls:
        await call.read()
    await cluster.eventually(lambda: len(records.get("taken").tokens.token_ids().get(0, ())) > 10)
    assert set(store.starts.values()) == {1}, "nothing is sent twice"
    assert [name for name, _ in store.starts].count("refused") == 1
    for call in calls:
        call.cancel()


async def test_a_store_that_was_emptied_is_filled_again_by_several_calls_at_a_time(cluster):
    store, records = await serve(cluster, store_lease_seconds=0.1)
    names = [f"r{number}" for number in range(20)]
    calls = [cluster.stub.Generate(request(cluster, 400, request_id=name)) for name in names]
    for call in calls:
        await call.read()
    gate, entered, create = asyncio.Event(), [], store.create

    async def create_later(stored):
        entered.append(stored.request_id)
        await gate.wait()
        await create(stored)

    store.create = create_later
    for name in names:
        records.remove(name)
    await cluster.eventually(lambda: len(entered) >= CREATES_AT_ONCE)
    assert len(entered) == CREATES_AT_ONCE
    gate.set()
    await cluster.eventually(lambda: all(records.get(name) for name in names))
    await cluster.eventually(lambda: all(records.get(name).tokens.token_ids() for name in names), what="all tokens")
    for call in calls:
        call.cancel()


async def test_a_whole_answer_is_looked_at_again_when_it_is_read_and_when_its_window_ends(cluster):
    """The keeper does not poll the answer in between."""
    _, records = await serve(cluster, lease_seconds=0.1, store_lease_seconds=0.1)
    keeper = cluster.service.requests.keeper
    await cluster.generate(request(cluster, 3, seconds=1.0))
    await cluster.eventually(lambda: list(keeper._resting) == ["r"] and not keeper._kept)
    live, take = cluster.service.requests._by_key["r"], asyncio.Event()

    async def read_slowly(_event):
        await take.wait()

    reading = asyncio.ensure_future(live.write(read_slowly, lambda event: event))
    await cluster.eventually(lambda: list(keeper._kept) == ["r"] and not keeper._resting)
    expires_at = records.get("r").expires_at
    await cluster.eventually(lambda: records.get("r").expires_at > expires_at, what="a renewal")
    take.set()
    await reading
    live.leave()
    await cluster.eventually(lambda: list(keeper._resting) == ["r"])
    await cluster.eventually(lambda: len(records) == 0 and not (keeper._resting or keeper._kept or keeper._to_delete))
    assert len(cluster.service.requests) == 0


async def test_a_name_that_is_used_again_while_the_store_forgets_it_is_kept(cluster):
    store, records = await serve(cluster)
    gate = gated(store, "delete")
    await cluster.generate(request(cluster, 4, seconds=0))
    await gate.until_entered()
    keeper = cluster.service.requests.keeper
    keep = watched(keeper, "keep")
    call = cluster.stub.Generate(request(cluster, 60))
    await keep.until_entered()
    gate.open()
    assert (await asyncio.wait_for(call.read(), PATIENCE_SECONDS)).HasField("started")
    assert "r" in keeper._kept
    await cluster.eventually(lambda: len(records.get("r").tokens.token_ids().get(0, ())) > 5)
    call.cancel()


class SlowStore(MemoryAnswerStore):
    """A store that creates nothing until eleven requests have been asked for."""

    num_asked = num_created = 0

    async def create(self, stored):
        self.num_asked += 1
        await eventually(lambda: self.num_asked > 10)
        await super().create(stored)
        self.num_created += 1


async def test_a_slow_store_delays_each_request_for_itself(cluster):
    store, _ = await serve(cluster, SlowStore)

    await asyncio.gather(*(cluster.generate(request(cluster, 2, request_id=f"r{number}")) for number in range(20)))
    assert store.num_created == 20


async def test_a_claim_of_a_name_that_is_being_deleted_waits_and_is_kept(cluster):
    store, records = await serve(cluster)
    gate = gated(store, "delete")
    await cluster.generate(request(cluster, 4, seconds=0))
    await gate.until_entered()
    claim = watched(store, "claim")
    reading = asyncio.ensure_future(refused(cluster.resume_call()))
    await cluster.eventually(lambda: cluster.service.requests.keeper.is_claiming("r"))
    assert not claim._entered.is_set()
    gate.open()
    assert (await reading).code is grpc.StatusCode.NOT_FOUND
    assert records.get("r") is None


class LateStore(MemoryAnswerStore):
    """A store that takes tokens, but always responds too late."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.num_tokens = []

    async def append(self, spans):
        spans = list(spans)
        self.num_tokens.append(sum(len(span.token_ids) for span in spans))
        await super().append(spans)
        raise StoreError("too late")


async def test_tokens_that_are_sent_again_are_a_bounded_number(cluster, monkeypatch):
    monkeypatch.setattr("router.durability.keeper.MAX_SPAN_TOKENS", 10)
    store, _ = await serve(cluster, LateStore)
    cluster.decode.step_seconds = 0.001
    await cluster.generate(request(cluster, 200))
    await cluster.eventually(lambda: len(store.num_tokens) > 5)
    assert max(store.num_tokens) == 10
