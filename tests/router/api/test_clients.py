"""A router that requires secret tokens from its clients."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from outrider.v1 import router_pb2
from router.api.clients import TokenFile, host_of_peer
from tests.router.api.test_token_file import line, shown
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused, told

ALICE, BOB = shown("a-secret"), shown("b-secret")


@pytest.fixture
def clients(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{line('alice', 'a-secret')}\n{line('bob', 'b-secret', 'rate=3')}\n", encoding="utf-8")
    return TokenFile(path)


def calls(cluster, metadata):
    """Calls every method of the service once."""
    stub, options = cluster.stub, {"metadata": metadata, "timeout": 10}
    return {
        "Generate": stub.Generate(cluster.request(), **options),
        "Complete": stub.Complete(cluster.request(), **options),
        "Resume": stub.Resume(router_pb2.ResumeRequest(request_id="r"), **options),
        "Abort": stub.Abort(router_pb2.AbortRequest(request_id="r"), **options),
        "Tokenize": stub.Tokenize(router_pb2.TokenizeRequest(text="a"), **options),
        "Detokenize": stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=[1]), **options),
        "GetModel": stub.GetModel(router_pb2.GetModelRequest(), **options),
        "WatchCluster": stub.WatchCluster(router_pb2.WatchClusterRequest(), **options),
        "LoadAdapter": stub.LoadAdapter(router_pb2.LoadAdapterRequest(name="a"), **options),
        "UnloadAdapter": stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(name="a"), **options),
    }


async def test_no_method_answers_strangers(cluster, clients):
    await cluster.serve(clients=clients)
    methods = router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods_by_name
    for metadata, reason in (((), "NO_TOKEN"), (shown("guessed"), "UNKNOWN_TOKEN")):
        asked = calls(cluster, metadata)
        assert set(asked) == set(methods.keys())
        for name, call in asked.items():
            failure = await refused(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason), name
    assert not cluster.decode.opened


async def test_a_strangers_message_is_not_even_read(cluster, clients):
    await cluster.serve(clients=clients)
    raw = cluster.channel.unary_unary("/outrider.v1.RouterService/Complete")
    assert (await refused(raw(b"\xff not a message", timeout=PATIENCE_SECONDS))).code is grpc.StatusCode.UNAUTHENTICATED


async def test_requests_belong_to_who_made_them(cluster, clients):
    cluster.decode.step_seconds = 0.1  # all 400 tokens would take 40 s
    await cluster.serve(clients=clients)
    request = cluster.request(request_id="r", max_tokens=400, resume_window={"seconds": 30})
    own = cluster.stub.Generate(request, metadata=ALICE, timeout=2 * PATIENCE_SECONDS)
    started = await own.read()
    assert started.request_id == "r"
    await cluster.eventually(lambda: cluster.decode.opened and cluster.decode.opened[0].request_id == "r")
    abort, resume = router_pb2.AbortRequest(request_id="r"), router_pb2.ResumeRequest(request_id="r")
    assert not (await cluster.stub.Abort(abort, metadata=BOB)).aborted
    failure = await refused(cluster.stub.Resume(resume, metadata=BOB, timeout=PATIENCE_SECONDS))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    # The id is free for another client, but in use for this one.
    others = cluster.stub.Generate(
        cluster.request(request_id="r", max_tokens=2),
        metadata=BOB,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert (await read_rest(others))[-1].HasField("summary")
    assert (await refused(cluster.stub.Generate(request, metadata=ALICE))).reason == "DUPLICATE_REQUEST_ID"
    assert (await cluster.stub.Abort(abort, metadata=ALICE)).aborted
    while not (message := await own.read()).HasField("finished"):
        pass
    assert message.finished.reason == router_pb2.FINISH_REASON_ABORTED


async def test_another_router_goes_on_for_the_same_client_only(router_pair, clients):
    await router_pair.serve(clients=clients)
    call = router_pair.first.stub.Generate(router_pair.request(), metadata=ALICE)
    start = (await call.read()).started.num_prompt_tokens
    assert (await call.read()).HasField("delta")
    await router_pair.first.eventually(lambda: len(router_pair.records) == 1)
    await router_pair.kill_first()
    stub, resume = router_pair.second.stub, router_pb2.ResumeRequest(request_id="r", next_positions={0: start})
    failure = await refused(stub.Resume(resume, metadata=BOB, timeout=PATIENCE_SECONDS))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    messages = await read_rest(stub.Resume(resume, metadata=ALICE))
    assert len(told(messages)) == router_pair.num_tokens
    assert router_pair.first.decode.opened[-1].options.cache_salt == b"alice"


async def test_prefixes_are_cached_for_each_tenant(cluster, clients):
    await cluster.serve(clients=clients)
    for metadata in (ALICE, BOB):
        await read_rest(cluster.stub.Generate(cluster.request(), metadata=metadata, timeout=PATIENCE_SECONDS))
    assert [opened.options.cache_salt for opened in cluster.decode.opened] == [b"alice", b"bob"]
    assert [call.options.cache_salt for call in cluster.prefill.requests] == [b"alice", b"bob"]


async def test_aborting_what_runs_is_never_refused_and_guessing_is_charged(cluster, clients):
    cluster.decode.step_seconds = 0.1  # all 400 tokens would take 40 s
    await cluster.serve(clients=clients)
    request = cluster.request(request_id="r", max_tokens=400)
    call = cluster.stub.Generate(request, metadata=BOB, timeout=2 * PATIENCE_SECONDS)
    await call.read()
    for _ in range(2):
        assert not (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="guess"), metadata=BOB)).aborted
    guess = cluster.stub.Abort(router_pb2.AbortRequest(request_id="guess"), metadata=BOB, timeout=PATIENCE_SECONDS)
    assert (await refused(guess)).reason == "RATE_LIMIT"
    assert (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="r"), metadata=BOB)).aborted
    call.cancel()


@pytest.mark.parametrize("of_one_name", [True, False])
async def test_one_client_cannot_take_all_watches(cluster, clients, monkeypatch, of_one_name):
    """Clients are identified by name, or, without a token file, by address."""
    monkeypatch.setattr("router.api.servicer.MAX_WATCHES_PER_CLIENT", 2)
    await cluster.serve(clients=clients if of_one_name else None)

    def watch(metadata):
        return cluster.stub.WatchCluster(
            router_pb2.WatchClusterRequest(), metadata=metadata, timeout=2 * PATIENCE_SECONDS
        )

    watches = [watch(ALICE), watch(ALICE)]
    for call in watches:
        assert (await call.read()).nodes
    assert (await refused(watch(ALICE))).reason == "TOO_MANY_WATCHES"
    if of_one_name:
        watches.append(watch(BOB))
        assert (await watches[-1].read()).nodes
    for call in watches:
        call.cancel()

    async def may_watch_again():
        call = watch(ALICE)
        try:
            return bool((await call.read()).nodes)
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await may_watch_again():
            await asyncio.sleep(0.01)


def test_the_host_of_a_peer():
    assert host_of_peer("ipv4:192.0.2.1:5000") == host_of_peer("ipv4:192.0.2.1:5001")
    assert host_of_peer("ipv4:192.0.2.1:5000") != host_of_peer("ipv4:192.0.2.2:5000")
    assert host_of_peer("ipv6:%5B::1%5D:5000") == "ipv6:%5B::1%5D"
    assert host_of_peer("unix:") == "unix"


async def test_priorities_and_rates_are_limited(cluster, clients):
    await cluster.serve(clients=clients)
    failure = await refused(
        cluster.stub.Generate(cluster.request(priority=1), metadata=ALICE, timeout=PATIENCE_SECONDS)
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PRIORITY")
    for _ in range(3):
        await cluster.stub.Tokenize(router_pb2.TokenizeRequest(text="a"), metadata=BOB)
    failure = await refused(cluster.stub.Generate(cluster.request(), metadata=BOB, timeout=PATIENCE_SECONDS))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMIT")
    assert failure.retry_seconds > 10
    await cluster.stub.GetModel(router_pb2.GetModelRequest(), metadata=BOB)
