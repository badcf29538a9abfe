"""The promises of every answer store to the routers that share it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from valkey.asyncio import Valkey

from outrider.errors import AlreadyRunningError, MismatchError
from router.durability.store.base import StoredRequest, TokenSpan
from router.durability.store.valkey import ValkeyAnswerStore
from router.store_address import store_address
from tests.support.memory_store import MemoryAnswerStore, MemoryRecords

LEASE_SECONDS = 300.0
WINDOW_SECONDS = 500.0
MARGIN_SECONDS = 100.0
"""Seconds that tests leave as a margin for the real time that passes on a server."""
PATIENCE_SECONDS = 60.0
STORED = StoredRequest(
    request_id="alice·r 1}",
    fingerprint="f" * 64,
    resume_window_seconds=WINDOW_SECONDS,
    start_position=10,
    request=bytes(range(256)),
)


class MemoryStores:
    """Stores of routers that share records."""

    def __init__(self):
        self.now = 100.0
        self.records = MemoryRecords(clock=lambda: self.now)

    def router(self, owner):
        return MemoryAnswerStore(owner=owner, lease_seconds=LEASE_SECONDS, records=self.records)

    async def advance(self, seconds):
        self.now += seconds

    async def evict(self, request_id):
        """Drops a record, but not its tokens if they are stored separately."""
        self.records.remove(request_id)

    async def close(self):
        """Does nothing."""


class ValkeyStores:
    """Stores on a server. Advancing the time shortens the expiries of the server's keys."""

    ADVANCE = """
        for _, key in ipairs(redis.call('KEYS', '*')) do
          local left = redis.call('PTTL', key) - ARGV[1]
          if left > 0 then redis.call('PEXPIRE', key, left) else redis.call('DEL', key) end
        end
    """

    def __init__(self, server):
        self.server = server
        self.keys = Valkey(host="127.0.0.1", port=server.port)
        self.opened = []

    def router(self, owner):
        address = store_address(self.server.url, environ={})
        store = ValkeyAnswerStore(address, owner=owner, timeout_seconds=PATIENCE_SECONDS, lease_seconds=LEASE_SECONDS)
        self.opened.append(store)
        return store

    async def advance(self, seconds):
        await self.keys.eval(self.ADVANCE, 0, round(seconds * 1000))

    async def evict(self, request_id):
        await self.keys.delete(f"outrider:{{r:{request_id}}}:request")

    async def close(self):
        for store in self.opened:
            await store.close()
        await self.keys.aclose()


@pytest.fixture(params=["memory", "valkey"])
async def stores(request):
    stores = MemoryStores() if request.param == "memory" else ValkeyStores(request.getfixturevalue("store_server"))
    yield stores
    await stores.close()


@pytest.fixture
def first(stores):
    return stores.router(b"first\0router")


@pytest.fixture
def second(stores):
    return stores.router(b"second")


def spans(*positions, sample=0, request_id=STORED.request_id):
    """Returns one span whose token at each position is 1000 × sample + position."""
    return [TokenSpan(request_id, sample, positions[0], [1000 * sample + position for position in positions])]


async def claim(store, request_id=STORED.request_id, **options):
    return await store.claim(request_id, fingerprint=STORED.fingerprint, **options)


async def is_missing(store):
    """Returns whether the record is missing. A renewal by a router that does not own it changes nothing."""
    renewal = await store.renew([STORED.request_id])
    assert renewal.taken | renewal.missing == {STORED.request_id}
    return bool(renewal.missing)


async def test_a_claim_returns_the_request_and_the_tokens_of_each_sample(first, second):
    await first.create(STORED)
    await first.append([*spans(10, 11), *spans(10, sample=1)])
    await first.append(spans(12))
    answer = await claim(second)
    assert answer.request == STORED
    assert answer.token_ids == {0: (10, 11, 12), 1: (1010,)}
    assert not answer.is_aborted


async def test_an_id_that_is_not_stored_is_none(first):
    assert await claim(first) is None
    assert await first.read(STORED.request_id) is None
    assert not await first.request_abort(STORED.request_id)
    await first.finish([STORED.request_id])
    await first.delete([STORED.request_id])
    renewal = await first.renew([])
    assert not renewal.taken | renewal.missing | renewal.aborted


async def test_an_id_is_one_routers_at_a_time(first, second):
    await first.create(STORED)
    with pytest.raises(AlreadyRunningError) as refused:
        await second.create(STORED)
    assert refused.value.reason == "DUPLICATE_REQUEST_ID"
    await first.finish([STORED.request_id])
    with pytest.raises(AlreadyRunningError):
        await second.create(STORED)
    await first.delete([STORED.request_id])
    await second.create(STORED)


async def test_of_simultaneous_creates_one_succeeds(stores):
    routers = [stores.router(bytes([number])) for number in range(8)]
    results = await asyncio.gather(*(router.create(STORED) for router in routers), return_exceptions=True)
    assert [type(result) for result in results].count(AlreadyRunningError) == 7
    assert results.count(None) == 1


async def test_a_create_that_is_repeated_starts_anew(first):
    await first.create(STORED)
    await first.append(spans(10, 11))
    await first.request_abort(STORED.request_id)
    other = replace(STORED, request=b"other")
    await first.create(other)
    answer = await claim(first)
    assert (answer.request, answer.token_ids, answer.is_aborted) == (other, {}, False)


async def test_repeated_and_overlapping_spans_count_once(first):
    await first.create(STORED)
    await first.append(spans(10, 11, 12))
    await first.append(spans(10, 11, 12))
    await first.append(spans(11, 12, 13, 14))
    assert (await claim(first)).token_ids == {0: (10, 11, 12, 13, 14)}


async def test_a_new_request_has_no_tokens_of_an_earlier_one_that_was_evicted(stores, first):
    await first.create(STORED)
    await first.append(spans(10, 11))
    await stores.evict(STORED.request_id)
    await first.create(STORED)
    await first.append(spans(10))
    assert (await claim(first)).token_ids == {0: (10,)}


async def test_tokens_behind_a_gap_are_not_known_until_it_is_filled(first):
    await first.create(STORED)
    await first.append(spans(12, 13))
    assert (await claim(first)).token_ids == {}
    await first.append([*spans(10, 11, 12), *spans(13)])
    await first.append(spans(15))
    assert (await claim(first)).token_ids == {0: (10, 11, 12, 13)}


async def test_one_append_is_of_many_requests_and_passes_over_those_that_are_unknown(first):
    requests = [replace(STORED, request_id=f"r{number}") for number in range(50)]
    for stored in requests:
        await first.create(stored)
    await first.append([])
    await first.append([*spans(10, request_id="nobody"), *(spans(10, request_id=r.request_id)[0] for r in requests)])
    for stored in requests:
        assert (await claim(first, stored.request_id)).token_ids == {0: (10,)}
    assert await claim(first, "nobody") is None


async def test_many_spans_of_one_request(first):
    """A Lua call accepts only a few thousand values, but a store that was unreachable gets all tokens at once."""
    await first.create(STORED)
    await first.append([TokenSpan(STORED.request_id, 0, 10 + index, [index]) for index in range(5000)])
    assert (await claim(first)).token_ids == {0: tuple(range(5000))}
    await first.append([TokenSpan(STORED.request_id, 1, 10, range(2**32 - 20_000, 2**32))])
    assert (await claim(first)).token_ids[1] == tuple(range(2**32 - 20_000, 2**32))


async def test_reading_changes_nothing(first, second):
    await first.create(STORED)
    await first.append(spans(10))
    seen = await second.read(STORED.request_id)
    assert (seen.request, seen.token_ids, seen.is_ours, seen.is_aborted) == (STORED, {0: (10,)}, False, False)
    assert (await first.read(STORED.request_id)).is_ours
    assert not (await first.renew([STORED.request_id])).taken


async def test_a_claim_takes_a_request_from_its_owner(first, second):
    await first.create(STORED)
    assert (await claim(first)).is_ours
    answer = await claim(second)
    assert (answer.request, answer.is_ours) == (STORED, True)
    assert (await first.renew([STORED.request_id])).taken == {STORED.request_id}
    assert not (await first.read(STORED.request_id)).is_ours


async def test_renewing_keeps_a_request_beyond_its_window(stores, first, second):
    await first.create(STORED)
    await first.append(spans(10))
    for _ in range(8):
        await stores.advance(LEASE_SECONDS - MARGIN_SECONDS)
        renewal = await first.renew([STORED.request_id])
        assert not renewal.taken | renewal.missing | renewal.aborted
        assert (await second.read(STORED.request_id)).request == STORED
    assert (await claim(first)).token_ids == {0: (10,)}


async def test_what_nobody_renews_expires_after_lease_and_window(stores, first, second):
    await first.create(STORED)
    await first.append(spans(10))

    await stores.advance(LEASE_SECONDS + WINDOW_SECONDS - MARGIN_SECONDS)
    assert not await is_missing(second)
    await stores.advance(MARGIN_SECONDS)
    assert await is_missing(second)
    assert await claim(second) is None
    assert (await first.renew([STORED.request_id])).missing == {STORED.request_id}
    await first.append(spans(11))  # leaves nothing behind
    await first.create(STORED)
    assert (await claim(first)).token_ids == {}


async def test_a_finished_answer_is_kept_for_its_window_and_anybodys(stores, first, second):
    await first.create(STORED)
    await first.append(spans(10))
    await first.finish([STORED.request_id])
    assert not await second.request_abort(STORED.request_id)
    answer = await claim(second)
    assert answer.token_ids == {0: (10,)}
    assert await first.request_abort(STORED.request_id), "it runs again"
    await second.finish([STORED.request_id])

    await stores.advance(WINDOW_SECONDS - MARGIN_SECONDS)
    assert not await is_missing(first)
    await stores.advance(MARGIN_SECONDS)
    assert await is_missing(first)


async def test_a_router_that_lost_a_request_changes_nothing_of_it(first, second):
    await first.create(STORED)
    await first.append(spans(10))
    assert (await claim(second)).token_ids == {0: (10,)}
    await first.append(spans(11, 12))
    await first.finish([STORED.request_id])
    await first.delete([STORED.request_id])
    assert (await first.renew([STORED.request_id])).taken == {STORED.request_id}
    await second.append(spans(11))
    answer = await claim(second)
    assert answer.token_ids == {0: (10, 11)}


async def test_another_models_request_stays_with_its_owner(first, second):
    await first.create(STORED)
    with pytest.raises(MismatchError, match=f"{STORED.fingerprint}.*other"):
        await second.claim(STORED.request_id, fingerprint="other")
    assert not (await first.renew([STORED.request_id])).taken


async def test_an_abort_reaches_the_owner_and_whoever_claims_later(first, second):
    others = [replace(STORED, request_id=f"r{number}") for number in range(3)]
    for stored in (STORED, *others):
        await first.create(stored)
    assert await second.request_abort(STORED.request_id)
    assert not await second.request_abort(STORED.request_id)
    renewal = await first.renew([STORED.request_id, *(stored.request_id for stored in others), "nobody"])
    assert (renewal.aborted, renewal.missing, renewal.taken) == ({STORED.request_id}, {"nobody"}, set())
    assert (await claim(second)).is_aborted
    await second.delete([STORED.request_id])
    assert await claim(second) is None


@pytest.mark.parametrize("request_id", ["a", "}", "{}", "{x}y", "x" * 128, " ~!\"'\\\\:*"])
async def test_any_printable_id_is_taken_as_it_is(first, request_id):
    stored = replace(STORED, request_id=request_id, request=b"")
    await first.create(stored)
    await first.append(spans(10, request_id=request_id))
    answer = await claim(first, request_id)
    assert (answer.request, answer.token_ids) == (stored, {0: (10,)})
