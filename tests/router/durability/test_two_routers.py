"""Routers that share a store: one continues the requests of another."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.client import AsyncClient
from outrider.request import Adapter
from outrider.v1 import router_pb2
from tests.router.conftest import RouterPair, read_rest, refused, told
from tests.support.adapters import ScriptedAdapters
from tests.support.router_fakes import fake_model_info
from tests.support.router_fakes.decode_node import letters

NUM_TOKENS = RouterPair.num_tokens


@pytest.fixture
def pair(router_pair):
    return router_pair


@pytest.mark.parametrize("kind", ["one sample", "three samples", "logprobs"])
async def test_an_answer_goes_on_at_another_router_when_its_own_is_gone(pair, kind):
    await pair.serve()
    n = 3 if kind == "three samples" else 1
    fields = {"output": router_pb2.OutputOptions(top_logprobs=1)} if kind == "logprobs" else {}
    _, started, deltas = await pair.begin(num_deltas=30, n=n, **fields)
    seen = {sample: [t for d in deltas if d.sample == sample for t in d.token_ids] for sample in range(n)}
    await pair.kill_first()
    start = started.num_prompt_tokens
    messages = await pair.resume({sample: start + len(ids) for sample, ids in seen.items()})
    again = messages[0].started
    assert (again.seed, again.num_prompt_tokens) == (started.seed, started.num_prompt_tokens)
    for sample, ids in seen.items():
        assert ids + told(messages, sample) == letters(pair.first.decode.opened[0], sample)
    assert messages[-1].HasField("summary")
    known = pair.first.decode.opened[-1].samples[0].generated_token_ids
    assert (len(known) > 0) == (kind != "logprobs"), "tokens are read from the store, logprobs are not there"


async def test_a_resume_elsewhere_ends_the_stream_of_the_owner(pair):
    await pair.serve()
    call, _, _ = await pair.begin()
    messages = asyncio.ensure_future(pair.resume())
    failure = await refused(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "RESUMED_ELSEWHERE")
    assert told(await messages) == letters(pair.first.decode.opened[0], 0)
    await pair.first.eventually(lambda: "r" not in pair.first.service.requests)


async def test_an_abort_reaches_the_owner_from_any_router(pair):
    await pair.serve()
    task = asyncio.ensure_future(pair.first.generate(pair.request(max_tokens=400)))
    await pair.first.eventually(lambda: pair.first.decode.groups)
    assert (await pair.second.stub.Abort(router_pb2.AbortRequest(request_id="r"))).aborted
    answer = await task
    assert answer.finished[0].reason == router_pb2.FINISH_REASON_ABORTED
    assert not (await pair.second.stub.Abort(router_pb2.AbortRequest(request_id="nobody"))).aborted


async def test_an_id_that_another_router_has_is_taken(pair):
    await pair.serve()
    await pair.begin()
    assert (await pair.second.fail(pair.request())).code is grpc.StatusCode.ALREADY_EXISTS
    await pair.second.eventually(lambda: len(pair.second.service.requests) == 0)


async def test_a_request_that_cannot_go_on_elsewhere_stays_with_its_owner(pair):
    for node in (pair.first.decode, pair.first.prefill):
        node.model = fake_model_info(numerics="batch-dependent (torch bfloat16)")
    await pair.serve(store_append_seconds=30.0)
    pair.first.decode.step_seconds = 0.05
    call, _, deltas = await pair.begin(num_deltas=5)
    failure = await refused(pair.second.resume_call({0: deltas[-1].start_position}))
    assert failure.reason == "NOT_REPRODUCIBLE"
    pair.first.decode.step_seconds = 0.0
    assert (await read_rest(call))[-1].HasField("summary")


async def test_a_finished_answer_can_be_read_at_another_router(pair):
    await pair.serve()
    answer = await pair.first.generate(pair.request(max_tokens=20))
    await pair.first.eventually(lambda: pair.records.get("r").is_finished)
    await pair.kill_first()
    assert told(await pair.resume()) == answer.token_ids()


@pytest.mark.parametrize("store_lost", ["refuse", "serve"])
async def test_without_the_store_running_answers_go_on_and_new_ones_get_what_is_configured(pair, store_lost):
    await pair.serve(store_lost=store_lost)
    call, _, _ = await pair.begin()
    for store in pair.stores:
        store.is_lost = True
    other = pair.request()
    other.request_id = "other"
    if store_lost == "refuse":
        failure = await pair.first.fail(other)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_LOST")
    else:
        second = pair.first.stub.Generate(other)
        assert told(await read_rest(second)) == letters(pair.first.decode.opened[1], 0)
        assert ("outrider-store", "lost") in tuple(await second.trailing_metadata())
    plain = pair.first.request(max_tokens=5)
    assert len((await pair.first.generate(plain)).token_ids()) == 5
    assert (await read_rest(call))[-1].summary.usage.num_generated_tokens == NUM_TOKENS


CUT_OFF = {"seed": 4, "strike": "a drain that was cut off"}


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"top_logprobs": 2}, {"echo": True, "stop": ["nothing"]}, CUT_OFF])
async def test_a_program_that_streams_does_not_notice(pair, options):
    await pair.serve()
    options = {"seed": 4, "max_tokens": 80, **options}
    end_first = pair.kill_first if options.pop("strike", None) is None else pair.first.service.stop

    async def run(targets, strike=None):
        logprobs = []
        async with AsyncClient(targets) as client, client.generate("a prompt", **options) as stream:
            num_deltas = 0
            async for delta in stream:
                logprobs += [(delta.sample, entry) for entry in delta.logprobs]
                num_deltas += 1
                if strike is not None and num_deltas == 20:
                    await strike()
        samples = range(options.get("n", 1))
        return [(stream.text(k), stream.token_ids(k), stream.finished[k]) for k in samples], logprobs, stream

    undisturbed, logprobs, whole = await run(pair.second.address)
    answer, logprobs_again, stream = await run([pair.first.address, pair.second.address], end_first)
    assert answer == undisturbed
    assert logprobs_again == logprobs
    assert stream.summary.usage.num_generated_tokens == whole.summary.usage.num_generated_tokens


async def test_an_answer_that_a_client_leaves_is_stopped_on_whichever_router_has_it(pair):
    await pair.serve()
    async with AsyncClient([pair.first.address, pair.second.address]) as client:
        async with client.generate("a prompt", seed=4, max_tokens=500) as stream:
            num_deltas = 0
            async for _ in stream:
                num_deltas += 1
                if num_deltas == 5:
                    await pair.kill_first()
                if num_deltas == 30:
                    break
        await pair.second.eventually(lambda: pair.first.decode.num_blocks_used == 0, what="blocks on the decode node")


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_an_answer_goes_on_with_its_adapter_or_not_at_all(pair, is_replaced):
    sql = Adapter("sql", "a1" * 32)
    for node in (pair.first.decode, pair.first.prefill):
        node.adapters = ScriptedAdapters(sql)
    await pair.serve()
    _, started, deltas = await pair.begin(num_deltas=30, model="sql")
    seen = [token_id for delta in deltas for token_id in delta.token_ids]
    await pair.kill_first()
    if is_replaced:
        other = Adapter("sql", "b2" * 32)
        pair.first.decode.adapters = ScriptedAdapters(other)
        await pair.second.eventually(lambda: pair.second.service.nodes.adapters.by_name == {"sql": other})
        failure = await refused(pair.second.resume_call({0: started.num_prompt_tokens + len(seen)}))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_MISMATCH")
        return
    messages = await pair.resume({0: started.num_prompt_tokens + len(seen)})
    assert seen + told(messages, 0) == letters(pair.first.decode.opened[0], 0)
    assert messages[0].started.model == "sql"
    assert messages[0].started.adapter_fingerprint == started.adapter_fingerprint == sql.fingerprint
    assert {opened.options.adapter for opened in pair.first.decode.opened} == {sql}
