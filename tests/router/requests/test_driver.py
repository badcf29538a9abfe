"""The driver of a request's machine: cancelled calls, internal errors, records and receipts."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import grpc
import pytest
import structlog
from google.protobuf import duration_pb2

from outrider.errors import AbortedError, CapacityError, PeerLostError
from outrider.receipt import Receipt
from outrider.v1 import router_pb2
from router.api import registry
from router.api.request_parsing import read_request
from router.observe.spans import RequestState
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused, told
from tests.support.router_fakes import FakeDecodeNode

LABELS = {"model_name": "fake-model", "reason": "INTERNAL"}


def live(cluster, request_id="r"):
    return cluster.service.requests._by_key[request_id]


async def test_an_answer_that_waits_for_its_client_does_not_keep_the_request_as_it_was_sent(cluster):
    """The request may hold megabytes of text, which the memory budget of answers does not count."""
    await cluster.serve()
    await cluster.generate(cluster.resumable(max_tokens=3))
    assert live(cluster)._driver.encoded.proto is None


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.UsageError("Channel is closed.")])
async def test_a_prefill_call_that_ends_unexpectedly_is_a_failed_transfer(cluster, error):
    """For example, gRPC cancels all calls of a channel that is closed."""
    await cluster.serve()
    transport = cluster.service.nodes.prefill_nodes[0].transport
    prefill = transport.prefill

    async def fail_once(_call):
        transport.prefill = prefill
        raise error

    transport.prefill = fail_once
    with structlog.testing.capture_logs():  # formatting the traceback would block the loop, and nodes would look late
        answer = await asyncio.wait_for(cluster.generate(max_tokens=3), PATIENCE_SECONDS)
    assert len(answer.token_ids()) == 3
    assert answer.summary.metrics.attempts == 2
    await cluster.is_empty()


async def test_a_summary_that_cannot_be_made_fails_the_request_once_in_every_view(cluster, tmp_path):
    await cluster.serve(receipts=str(tmp_path / "kept"))

    def broken(_seconds):
        raise KeyError("a bug")

    cluster.context.queue.observe_service = broken
    failure = await cluster.fail(request_id="r", max_tokens=3)
    assert failure.reason == "INTERNAL"
    await cluster.is_empty()
    assert cluster.registry.get_sample_value("outrider:request_failures_total", LABELS) == 1
    (record,) = cluster.context.records
    assert record.outcome is RequestState.FAILED

    def lines():
        return [line for path in (tmp_path / "kept").glob("*.jsonl") for line in path.read_bytes().splitlines()]

    await cluster.eventually(lines)
    (receipt,) = map(Receipt.from_line, lines())
    assert (receipt.end, receipt.error) == ("failed", "INTERNAL")


async def test_a_prefill_call_that_is_over_is_not_watched_any_more(cluster):
    """Otherwise a node that becomes late afterwards would be counted as hedged."""
    cluster.prefill.fails_with = grpc.StatusCode.INTERNAL
    await cluster.serve()
    link = cluster.service.nodes.prefill_nodes[0]
    cluster.decode._retarget = lambda session, command: (
        cluster.decode.retargeted.append(command)
        if not command.transfer_id
        else FakeDecodeNode._retarget(cluster.decode, session, command)
    )
    call = cluster.stub.Generate(cluster.request(max_tokens=3), timeout=PATIENCE_SECONDS)
    await cluster.eventually(lambda: any(not command.transfer_id for command in cluster.decode.retargeted))
    assert not link._listeners
    call.cancel()
    await cluster.is_empty()


class Seen:
    """Counts of ended requests in metrics, receipts and records."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.kept = []
        receipts = SimpleNamespace(keep=self._keep)
        cluster.service.context = dataclasses.replace(cluster.context, receipts=receipts)

    def _keep(self, proto, answer, _record, _model):
        reason = answer.failure and answer.failure.reason
        self.kept.append((reason, answer.summary is not None, proto is not None))

    def failures(self):
        return {
            sample.labels["reason"]: sample.value
            for metric in self.cluster.registry.collect()
            for sample in metric.samples
            if sample.name == "outrider:request_failures_total" and sample.value
        }

    def outcomes(self):
        return [record.outcome for record in self.cluster.context.records]


async def end(cluster, call, how):
    match how:
        case "abort":
            await cluster.stub.Abort(router_pb2.AbortRequest(request_id="r"))
            await read_rest(call)
            return
        case "client leaves":
            call.cancel()
            return
        case "drain":
            cluster.service.requests.fail_all(PeerLostError("the router stops", reason="DRAINING"))
        case "eviction":
            await cluster.eventually(lambda: live(cluster).answer.num_generated_tokens > 5)
            (account,) = cluster.context.answers._accounts
            account.give_up(CapacityError("full", reason="JOURNAL_FULL"))
        case "close":
            cluster.service.requests.close_all(PeerLostError("the router stops", reason="DRAINING"))
        case "bug":
            live(cluster)._driver.feed("no event")
    await refused(call)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("abort", None),
        ("client leaves", "CLIENT_LEFT"),
        ("drain", "DRAINING"),
        ("eviction", "JOURNAL_FULL"),
        ("close", "DRAINING"),
        ("bug", "INTERNAL"),
    ],
)
async def test_however_a_request_ends_it_is_counted_once(cluster, how, reason, window):
    cluster.decode.step_seconds = 0.01
    await cluster.serve()
    seen = Seen(cluster)
    fields = {} if window is None else {"resume_window": duration_pb2.Duration(seconds=window)}
    call = cluster.stub.Generate(cluster.request(request_id="r", max_tokens=300, **fields), timeout=PATIENCE_SECONDS)
    await call.read()
    await end(cluster, call, how)
    if window is not None:
        if how == "client leaves":
            await cluster.eventually(lambda: not live(cluster)._request.has_reader)
            reason = "ABORTED"
        cluster.service.requests.close_all(AbortedError("over"))
    await cluster.is_empty()
    assert seen.failures() == ({} if reason is None else {reason: 1})
    told = None if reason in {None, "CLIENT_LEFT"} else reason
    assert seen.kept == [(told, reason is None, True)]
    failed = told is not None
    assert seen.outcomes() == [RequestState.FAILED if failed else RequestState.ABORTED]
    admitted = cluster.registry.get_sample_value("vllm:request_queue_time_seconds_count", {"model_name": "fake-model"})
    assert admitted in (None, 1)


# ---------------------------------------------------------------- while a request is being encoded


@pytest.fixture
async def encoding(cluster, monkeypatch):
    """Starts a call for request "r", whose encoding waits for `cluster.encoded`."""
    await cluster.serve()
    cluster.encoded = asyncio.Event()

    async def slow(*arguments, **fields):
        await cluster.encoded.wait()
        return await read_request(*arguments, **fields)

    monkeypatch.setattr(registry, "read_request", slow)
    call = cluster.stub.Generate(cluster.resumable(max_tokens=3), timeout=PATIENCE_SECONDS)
    await cluster.eventually(lambda: "r" in cluster.service.requests)
    yield call
    call.cancel()


async def test_a_name_is_taken_while_its_request_is_encoded_and_cannot_be_read_or_aborted(cluster, encoding):
    assert (await cluster.fail(cluster.resumable(max_tokens=3))).reason == "DUPLICATE_REQUEST_ID"
    assert (await refused(cluster.resume_call())).reason == "NOT_RESUMABLE"
    assert not (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="r"))).aborted
    cluster.service.requests.fail_all(PeerLostError("a drain's deadline", reason="DRAINING"))
    assert not cluster.service.requests.is_idle
    cluster.encoded.set()
    assert (await read_rest(encoding))[-1].HasField("summary")


@pytest.mark.parametrize("end", ["its client leaves", "the router stops"])
async def test_a_request_that_ends_while_it_is_encoded_frees_all(cluster, encoding, end):
    seen = Seen(cluster)
    if end == "its client leaves":
        encoding.cancel()
    else:
        cluster.service.requests.is_draining = True
        cluster.service.requests.close_all(PeerLostError("the router stops", reason="DRAINING"))
        cluster.encoded.set()
        assert (await refused(encoding)).reason == "DRAINING"
    await cluster.is_empty()
    await cluster.eventually(seen.failures)
    assert seen.failures() == {"CLIENT_LEFT" if end == "its client leaves" else "DRAINING": 1}
    assert seen.kept == []
    assert None not in seen.outcomes()


# ---------------------------------------------------------------- readers


async def test_a_stream_that_another_one_took_over_does_not_begin_the_window_when_it_ends(cluster):
    cluster.decode.step_seconds = 0.01
    await cluster.serve()
    first = cluster.stub.Generate(cluster.resumable(max_tokens=60, seconds=0.2), timeout=PATIENCE_SECONDS)
    await first.read()
    second = cluster.resume_call()
    await second.read()
    assert (await refused(first)).reason == "RESUMED_ELSEWHERE"
    assert len(told(await read_rest(second))) == 60
    await cluster.is_empty()


async def test_what_grows_beyond_the_memory_ends_the_newest_in_the_middle_of_the_others_step(cluster):
    cluster.decode.step_seconds = 0.01
    await cluster.serve()
    seen = Seen(cluster)
    budget = cluster.context.answers
    tasks = [asyncio.ensure_future(cluster.generate(request_id="old", max_tokens=400))]
    await cluster.eventually(lambda: len(cluster.decode.groups) == 1)
    newest = asyncio.ensure_future(cluster.fail(request_id="new", max_tokens=400))
    await cluster.eventually(lambda: len(cluster.decode.groups) == 2)  # the new request has been encoded, too
    await cluster.eventually(lambda: live(cluster, "new").answer.num_generated_tokens > 3)
    budget._limit_bytes = budget.reserved_bytes
    assert (await newest).reason == "JOURNAL_FULL"
    budget._limit_bytes = 1 << 30
    cluster.decode.step_seconds = 0.0
    assert len((await tasks[0]).token_ids()) == 400
    assert seen.failures() == {"JOURNAL_FULL": 1}
    assert sorted(seen.kept, key=str) == [("JOURNAL_FULL", False, True), (None, True, True)]
    await cluster.is_empty()
