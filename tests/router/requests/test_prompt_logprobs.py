"""Logprobs of a prompt's tokens: Started has them, whichever node computes the prompt and whatever node is lost."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from outrider.prefill import MAX_SCORED_ROWS
from outrider.v1 import router_pb2
from outrider.wire.answer import logprobs_from_proto, max_logprobs_bytes, pack_logprobs
from tests.router.conftest import PATIENCE_SECONDS, told
from tests.support.router_fakes.decode_node import fake_logprobs, letters

TEXT = "a prompt"
OUTPUT = router_pb2.OutputOptions(prompt_logprobs=2)
FOREVER_SECONDS = 300.0


def assert_complete(started, text=TEXT, num_top=2):
    first, *others = logprobs_from_proto(started.prompt_logprobs)
    token_ids = list(text.encode())
    assert (first.token_id, first.rank, first.top) == (token_ids[0], 0, ())
    assert math.isnan(first.logprob)
    assert not started.prompt_logprobs[0].HasField("logprob")
    assert tuple(others) == fake_logprobs(token_ids[1:], num_top)


async def test_the_prefill_node_that_computes_the_prompt_computes_them(serving):
    answer = await serving.generate(max_tokens=8, output=OUTPUT)
    assert_complete(answer.started)
    (request,) = serving.prefill.requests
    assert list(request.scored_token_ids) == list(TEXT.encode())[1:]
    assert answer.token_ids() == (await serving.generate(max_tokens=8)).token_ids()
    assert not serving.prefill.requests[1].scored_token_ids
    assert serving.decode.opened[1].options.prompt_logprobs is None
    await serving.is_empty()


async def test_a_decode_node_that_computes_the_prompt_computes_them(serving):
    serving.decode.max_local_prefill_tokens = 100
    assert_complete((await serving.generate(max_tokens=8, output=OUTPUT)).started)
    assert serving.prefill.requests == []


async def test_complete_has_them(serving):
    response = await serving.stub.Complete(serving.request(max_tokens=8, output=OUTPUT))
    assert_complete(response.started)
    assert len(response.completions[0].token_ids) == 8


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_zero_alternatives_and_several_samples(serving, num_samples):
    answer = await serving.generate(output=router_pb2.OutputOptions(prompt_logprobs=0), n=num_samples)
    assert_complete(answer.started, num_top=0)
    assert len(answer.finished) == num_samples


async def test_a_prompt_of_one_token_has_nothing_to_compute(serving):
    answer = await serving.generate(text="a", max_tokens=8, output=OUTPUT)
    assert_complete(answer.started, "a")
    assert serving.decode.opened[0].options.prompt_logprobs is None


async def test_resume_tells_them_again(serving):
    await serving.generate(serving.resumable(max_tokens=8, output=OUTPUT))
    call = serving.resume_call()
    assert_complete((await call.read()).started)
    call.cancel()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_another_router_that_takes_the_answer_over_has_them_computed_again(router_pair, has_ended):
    """This includes an answer whose tokens are all in the store."""
    pair = await router_pair.serve(store_append_seconds=0.01)
    num_tokens = 20 if has_ended else pair.num_tokens
    pair.first.decode.step_seconds = 0.0 if has_ended else 0.01
    call = pair.first.stub.Generate(pair.request(max_tokens=num_tokens, output=OUTPUT))
    assert_complete((await call.read()).started)
    if has_ended:
        record = pair.records.get("r")
        await pair.first.eventually(lambda: len(record.tokens.token_ids().get(0, ())) == num_tokens)
    else:
        await call.read()
    await pair.kill_first()
    messages = await pair.resume()
    assert_complete(messages[0].started)
    assert told(messages) == letters(pair.first.decode.opened[0], 0)
    assert messages[-1].HasField("summary")
    assert pair.first.decode.opened[-1].options.prompt_logprobs == 2


@pytest.mark.parametrize("how", ["dies", "sends nonsense"])
async def test_what_is_lost_with_its_prefill_node_is_computed_again(node_pair, how):
    """The logprobs are lost after the KV was complete and the answer's tokens were computed."""
    pair = await node_pair.serve()
    for node in pair.prefills:
        node.answer_gate = asyncio.Event()
    task = asyncio.ensure_future(pair.generate(max_tokens=8, output=OUTPUT))
    await pair.eventually(lambda: any(node.num_active for node in pair.prefills))
    busy, free = sorted(pair.prefills, key=lambda node: -node.num_active)
    await pair.eventually(lambda: pair.num_opened == 1 and not any(node.groups for node in pair.decodes))
    free.answer_gate.set()
    if how == "dies":
        await busy.stop()
    else:
        busy._logprobs = lambda _request: b"\xff"
    busy.answer_gate.set()
    answer = await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert_complete(answer.started)
    assert len(answer.token_ids()) == 8
    assert answer.summary.metrics.attempts == 2
    assert [len(node.requests) for node in (busy, free)] == [1, 1]


async def test_prompts_that_are_scored_keep_no_others_in_the_queue(serving):
    """A step has room for one scored prompt only. More of them at a node would only hold places and reserved blocks."""
    serving.prefill.max_rows_per_step = 64
    await serving.eventually(lambda: serving.service.nodes.prefill_nodes[0].report.load.max_rows_per_step == 64)
    gate = serving.prefill.answer_gate = asyncio.Event()
    text = "long" * 100
    tasks = [asyncio.ensure_future(serving.generate(text=text, max_tokens=8, output=OUTPUT)) for _ in range(20)]
    await serving.eventually(lambda: serving.context.queue.num_waiting == 19)
    assert len(serving.prefill.requests) == 1
    serving.prefill.answer_gate = None
    await asyncio.wait_for(serving.generate(max_tokens=8), PATIENCE_SECONDS)
    assert len(serving.prefill.requests) == 2
    gate.set()
    for answer in await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS):
        assert_complete(answer.started, text)


async def test_where_prefill_nodes_fail_before_the_kv_is_there_the_decode_node_computes_both(serving):
    serving.prefill.fails_with = grpc.StatusCode.UNAVAILABLE
    assert_complete((await serving.generate(max_tokens=8, output=OUTPUT)).started)
    assert not any(retarget.keeps_received for retarget in serving.decode.retargeted)


async def test_a_continuation_has_them(serving):
    whole = await serving.generate(max_tokens=8, output=OUTPUT)
    answer = await serving.generate(max_tokens=8, output=OUTPUT, generated_token_ids=whole.token_ids()[:3])
    assert_complete(answer.started)
    assert answer.token_ids() == whole.token_ids()[3:]


async def test_a_continuation_that_has_ended_already_has_them(serving):
    whole = await serving.generate(max_tokens=8)
    answer = await serving.generate(max_tokens=8, output=OUTPUT, generated_token_ids=whole.token_ids())
    assert_complete(answer.started)
    assert answer.token_ids() == []
    assert answer.finished[0].reason == router_pb2.FINISH_REASON_LENGTH
    await serving.is_empty()


@pytest.mark.parametrize(("num_counted", "waits"), [(MAX_SCORED_ROWS, False), (10_000, True)])
async def test_other_prompts_are_computed_beside_one_that_is_scored(serving, monkeypatch, num_counted, waits):
    """A scored prompt counts as MAX_SCORED_ROWS tokens. If all of it counted, it would keep others in the queue."""
    monkeypatch.setattr("router.scheduling.placement.MAX_SCORED_ROWS", num_counted)
    serving.prefill.max_rows_per_step = 64
    await serving.eventually(lambda: serving.service.nodes.prefill_nodes[0].report.load.max_rows_per_step == 64)
    serving.prefill.answer_gate = asyncio.Event()
    text = "long" * 100
    tasks = [asyncio.ensure_future(serving.generate(text=text, max_tokens=8, output=OUTPUT))]
    await serving.eventually(lambda: len(serving.prefill.requests) == 1)
    tasks.append(asyncio.ensure_future(serving.generate(max_tokens=8)))
    await serving.eventually(
        lambda: (serving.context.queue.num_waiting, len(serving.prefill.requests)) == (waits, 2 - waits)
    )
    serving.prefill.answer_gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)


async def test_an_abort_does_not_wait_for_them(serving):
    serving.prefill.answer_gate = asyncio.Event()
    call = serving.stub.Generate(serving.request(request_id="r", max_tokens=8, output=OUTPUT))
    await serving.eventually(lambda: bool(serving.decode.opened) and not serving.decode.groups)
    assert (await serving.stub.Abort(router_pb2.AbortRequest(request_id="r"))).aborted
    started = (await call.read()).started
    assert not started.prompt_logprobs
    assert (await call.read()).finished.reason == router_pb2.FINISH_REASON_ABORTED
    assert (await call.read()).HasField("summary")
    await serving.is_empty()


async def test_what_does_not_fit_a_message_is_refused(serving, monkeypatch):
    monkeypatch.setattr("router.api.request_parsing.DEFAULT_MAX_MESSAGE_BYTES", max_logprobs_bytes(len(TEXT), 2))
    assert_complete((await serving.generate(max_tokens=8, output=OUTPUT)).started)
    failure = await serving.fail(text=TEXT + "!", max_tokens=8, output=OUTPUT)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "output.prompt_logprobs")
    assert failure.reason == "ANSWER_TOO_LARGE"
    assert f"{len(TEXT) + 1} prompt tokens" in failure.message


def test_the_bound_of_their_size_holds():
    num_top, token_id = 20, (1 << 32) - 1
    entry = fake_logprobs([token_id - 1], num_top)[0]
    entry = type(entry)(token_id, -1.5, token_id, tuple((token_id, -1.5) for _ in range(num_top)))
    assert len(pack_logprobs([entry] * 100)) <= max_logprobs_bytes(100, num_top)
