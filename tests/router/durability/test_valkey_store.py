"""A store whose server dies, freezes, loses its data, or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys

import pytest
from valkey.asyncio import Valkey
from valkey.crc import key_slot

from outrider.config.resolve import load_config
from outrider.errors import ConfigError, StoreError
from router.config import RouterConfig
from router.durability.store.base import SpansRefusedError, StoredRequest, TokenSpan
from router.durability.store.valkey import ValkeyAnswerStore
from router.store_address import store_address
from tests.support.store_server import StoreServer, tls_in_front_of

PATIENCE_SECONDS = 30.0
TIMEOUT_SECONDS = 0.4  # timeout of calls to a server that does not answer
NAP_SECONDS = 0.02
STORED = StoredRequest(
    request_id="r1", fingerprint="f", resume_window_seconds=30.0, start_position=3, request=b"request"
)


def open_store(url, *, lease_seconds=30.0, timeout_seconds=PATIENCE_SECONDS, environ=None, owner=b"me"):
    address = store_address(url, environ or {})
    return ValkeyAnswerStore(address, owner=owner, timeout_seconds=timeout_seconds, lease_seconds=lease_seconds)


@pytest.fixture
async def store(store_server):
    store = open_store(store_server.url)
    yield store
    await store.close()


@pytest.fixture
async def server_keys(store_server):
    """A plain Valkey client of the server, like an operator's."""
    client = Valkey(host="127.0.0.1", port=store_server.port)
    yield client
    await client.aclose()


def all_calls(store):
    return {
        "create": lambda: store.create(STORED),
        "append": lambda: store.append([TokenSpan("r1", 0, 3, [7])]),
        "renew": lambda: store.renew(["r1"]),
        "finish": lambda: store.finish(["r1"]),
        "delete": lambda: store.delete(["r1"]),
        "claim": lambda: store.claim("r1", fingerprint="f"),
        "read": lambda: store.read("r1"),
        "request_abort": lambda: store.request_abort("r1"),
    }


async def end_in_time(work):
    """Returns the result of `work`, which must end within twice the store's timeout.

    The time is counted in naps of the event loop. On a busy machine, each nap takes longer, so `work` gets more time.
    """
    task = asyncio.ensure_future(work)
    for _ in range(round(2 * TIMEOUT_SECONDS / NAP_SECONDS)):
        await asyncio.wait((task,), timeout=NAP_SECONDS)
        if task.done():
            return await task
    task.cancel()
    raise AssertionError("it takes longer than the store's timeout")


@contextlib.contextmanager
def impatient(store):
    """Sets the timeout of the store's calls to `TIMEOUT_SECONDS` within the block."""
    store._timeout_seconds = TIMEOUT_SECONDS
    yield
    store._timeout_seconds = PATIENCE_SECONDS


async def assert_every_call_fails_in_time(store):
    for call in all_calls(store).values():
        with pytest.raises(StoreError) as failed:
            await end_in_time(call())
        assert failed.value.message.startswith(f"{store.name}")


async def test_a_killed_server_is_an_error_and_a_restarted_one_is_used_again(store, store_server):
    await store.create(STORED)
    store_server.kill()
    with impatient(store):
        await assert_every_call_fails_in_time(store)
    store_server.start()
    assert (await store.renew(["r1"])).missing == {"r1"}
    await store.create(STORED)
    await store.append([TokenSpan("r1", 0, 3, [7])])
    assert (await store.claim("r1", fingerprint="f")).token_ids == {0: (7,)}


async def test_a_frozen_server_holds_no_call_beyond_its_timeout(store, store_server):
    await store.create(STORED)
    store_server.freeze()
    try:
        with impatient(store):
            await assert_every_call_fails_in_time(store)
            calls = [call() for call in all_calls(store).values()] + [store.renew(["r1"]) for _ in range(100)]
            results = await end_in_time(asyncio.gather(*calls, return_exceptions=True))
            assert {type(result) for result in results} == {StoreError}
    finally:
        store_server.thaw()
    # Earlier calls may have taken effect. Their responses must not be mistaken for those of later calls.
    await store.create(STORED)
    await store.append([TokenSpan("r1", 0, 3, [7, 8])])
    for _ in range(40):
        assert (await store.claim("r1", fingerprint="f")).token_ids == {0: (7, 8)}
        assert not (await store.renew(["r1"])).missing


async def test_a_server_that_was_emptied_says_what_is_missing(store, server_keys):
    await store.create(STORED)
    await server_keys.flushall()
    await server_keys.script_flush()
    await store.append([TokenSpan("r1", 0, 3, [7])])
    assert (await store.renew(["r1", "r2"])).missing == {"r1", "r2"}
    assert await server_keys.keys() == []


async def test_spans_that_are_repeated_as_they_were_or_with_more_are_stored_once(store, server_keys):
    await store.create(STORED)
    for number in range(98):  # repeats, as if every response had come too late
        await store.append([TokenSpan("r1", 0, 3, range(1 + number // 2))])
    (tokens,) = [key for key in await server_keys.keys() if key.endswith(b":tokens")]
    entries = await server_keys.lrange(tokens, 0, -1)
    assert sum(len(entry) // 4 - 2 for entry in entries) == len(entries) == 49
    assert (await store.read("r1")).token_ids == {0: tuple(range(49))}


async def test_what_the_server_refuses_of_one_request_is_stored_of_the_others(store, server_keys):
    others = [dataclasses.replace(STORED, request_id=name) for name in ("r2", "r3")]
    for stored in (STORED, *others):
        await store.create(stored)
    await server_keys.set("outrider:{r:r1}:tokens", "no list")
    with pytest.raises(SpansRefusedError) as refused:
        await store.append([TokenSpan(name, 0, 3, [7, 8]) for name in ("r2", "r1", "r3")])
    assert refused.value.request_ids == {"r1"}
    assert [(await store.read(stored.request_id)).token_ids for stored in others] == [{0: (7, 8)}] * 2


async def test_calls_at_once_have_connections_of_their_own(store, server_keys):
    await asyncio.gather(*(store.read("r1") for _ in range(50)))
    assert len(await server_keys.client_list()) > 4


async def test_a_cancelled_call_leaves_no_answer_behind_for_the_next(store, store_server):
    await store.create(STORED)
    for attempt in range(20):
        store_server.freeze()
        call = asyncio.create_task(store.claim("r1", fingerprint="f"))
        await asyncio.sleep(0)  # let it send
        await asyncio.sleep(0.001 * (attempt % 3))
        call.cancel()
        store_server.thaw()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not (await store.renew(["r1"])).missing


async def test_a_server_that_has_no_memory_left_refuses_and_nothing_of_a_request_is_quoted(store, server_keys):
    await store.create(STORED)
    await server_keys.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="maxmemory") as refused:
        await store.create(dataclasses.replace(STORED, request_id="r2", request=b"SECRET"))
    assert "SECRET" not in refused.value.message
    with pytest.raises(StoreError, match="maxmemory") as refused:
        await store.append([TokenSpan("r1", 0, 3, [0x41424344])])
    assert "DCBA" not in refused.value.message


async def test_every_key_expires_and_a_requests_keys_share_a_slot(store, server_keys):
    ids = ["a", "}", "{}x", "b}c", "{"]

    async def keys_of(request_id):
        found = {key for key in await server_keys.keys() if key.startswith(f"outrider:{{r:{request_id}}}:".encode())}
        assert len({key_slot(key) for key in found}) == 1
        return {key.rpartition(b":")[2].decode(): await server_keys.pttl(key) for key in found}

    for request_id in ids:
        await store.create(dataclasses.replace(STORED, request_id=request_id))
        await store.append([TokenSpan(request_id, 0, 3, [7])])
    assert len(await server_keys.keys()) == 2 * len(ids)
    for _ in range(2):
        for request_id in ids:
            expiries = await keys_of(request_id)
            assert expiries.keys() == {"request", "tokens"}
            assert all(30_000 < expiry <= 60_000 for expiry in expiries.values())
        await store.renew(ids)
    for request_id in ids:
        await store.finish([request_id])
        await store.append([TokenSpan(request_id, 0, 4, [8])])
        expiries = await keys_of(request_id)
        assert expiries.keys() == {"request", "tokens"}
        assert all(0 < expiry <= 30_000 for expiry in expiries.values())
        await store.delete([request_id])
    assert await server_keys.keys() == []


async def test_the_password_comes_from_the_environment_or_the_url_and_is_never_shown(tmp_path, store_server):
    with StoreServer(tmp_path, "--requirepass", "s3cret@") as guarded:
        address = f"127.0.0.1:{guarded.port}"
        for url, environ in (
            (f"valkey://{address}/1", {"OUTRIDER_STORE_PASSWORD": "s3cret@"}),
            (f"valkey://:s3cret%40@{address}/1", {}),
            (f"valkey://:stale@{address}/1", {"OUTRIDER_STORE_PASSWORD": "s3cret@"}),
        ):
            store = open_store(url, environ=environ)
            await store.create(STORED)
            assert store.name == f"valkey://{address}/1"
            await store.close()
        for url in (f"valkey://{address}", f"valkey://:wr0ng@{address}"):
            store = open_store(url)
            with pytest.raises(StoreError) as refused:
                await store.create(STORED)
            assert "wr0ng" not in refused.value.message
            await store.close()


async def test_tls_trusts_the_systems_authorities_and_checks_the_name(
    store_server, tls_folder, certificate, monkeypatch
):
    async with tls_in_front_of(store_server.port, certificate, "127.0.0.1", "127.0.0.2") as port:
        url = f"valkeys://127.0.0.1:{port}"
        store = open_store(url)
        with pytest.raises(StoreError, match="certificate verify failed"):
            await store.create(STORED)
        await store.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(tls_folder / "ca.pem"))
        store = open_store(url)
        await store.create(STORED)
        await store.close()
        store = open_store(url.replace("127.0.0.1", "127.0.0.2"))
        with pytest.raises(StoreError, match=r"not valid for '127\.0\.0\.2'"):
            await store.create(STORED)
        await store.close()


@pytest.mark.parametrize(
    "url",
    ["redis://h", "valkey://", "valkey://h:x", "valkey://h/a", "valkey://h?x=1", "disk", "", "valkey://:s3cret@:1"],
)
def test_what_is_no_store_is_refused_without_its_password(url):
    with pytest.raises(ConfigError, match="store") as refused:
        load_config({"router": RouterConfig}, file=None, environ={}, overrides=[f"router.store={url}"])
    assert "s3cret" not in str(refused.value)


def test_without_the_client_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "router.durability.store.valkey", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "valkey"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[store\]'"):
        open_store("valkey://127.0.0.1:1")
