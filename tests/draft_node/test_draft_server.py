"""The draft node's gRPC service, called with bare stubs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from draft_node.config import DraftNodeConfig
from draft_node.draft_loop import DraftLoop
from draft_node.draft_peer import DraftPeer
from draft_node.node import DraftNode
from draft_node.servicer import UPDATES_AT_ONCE
from outrider.errors import CapacityError
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.speculation.draft_stream import (
    MAX_FEATURE_BYTES_PER_MESSAGE,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
)
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.v1 import draft_pb2, draft_pb2_grpc, node_pb2, node_pb2_grpc, router_pb2
from outrider.wire.draft import hello_from_proto
from tests.support.waiting import PATIENCE_SECONDS, until, within

HELLO = draft_pb2.DraftHello(
    protocol_version=SUPPORTED_VERSIONS.newest, incarnation=bytes(16), name="decode", vocab_size=100, max_model_len=512
)
UNKNOWN_PREFIX = draft_pb2.DRAFT_STATUS_UNKNOWN_PREFIX
NO_ROOM = draft_pb2.DRAFT_STATUS_NO_ROOM

OPTIONS = node_pb2.RequestOptions(sampling=router_pb2.SamplingParams(max_tokens=100))


def node_of(*, registry=None, **options):
    registry = registry or CollectorRegistry()
    return DraftNode(DraftNodeConfig(), NgramProposer, name="draft@test", registry=registry, **options)


@contextlib.asynccontextmanager
async def running(*, starts=True, registry=None):
    service = node_of(registry=registry)
    server = grpc.aio.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if starts:
        await service.start(f"127.0.0.1:{port}")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, channel
    await server.stop(0)
    await service.stop()


async def status_of(call) -> tuple[grpc.StatusCode, str]:
    return await within(call.code()), await within(call.details())


async def connect(channel, hello=HELLO):
    call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
    await call.write(draft_pb2.DraftUpdate(hello=hello))
    first = None
    with contextlib.suppress(grpc.aio.AioRpcError):  # the caller checks for a refusal
        first = await within(call.read())
    return call, first


def update_of(text, **changes) -> draft_pb2.SequenceUpdate:
    values = {
        "sequence_id": 1,
        "start": draft_pb2.SequenceStart(prompt_length=1, options=OPTIONS),
        "token_ids": text,
        "length": len(text),
        "prefix_hash": prefix_hash(text),
        "num_wanted": 2,
        **changes,
    }
    return draft_pb2.SequenceUpdate(**values)


async def test_the_first_answer_is_the_nodes_hello_and_then_proposals_come():
    async with running() as (_, channel):
        call, first = await connect(channel)
        assert first.hello.name == "draft@test"
        assert first.hello.model.proposer == "ngram"
        assert not first.sequences
        await call.write(draft_pb2.DraftUpdate(sequences=[update_of([1, 2, 3, 1, 2])]))
        answer = await within(call.read())
        assert not answer.HasField("hello")
        assert list(answer.sequences[0].branches[0].token_ids[:2]) == [3, 1]
        call.cancel()


async def test_garbage_in_one_sequence_disturbs_no_other():
    async with running() as (_, channel):
        call, _ = await connect(channel)
        garbage = [
            update_of([1, 2], sequence_id=2, prefix_hash=9),
            update_of([1, 2], sequence_id=3, length=77),
            update_of([100], sequence_id=4),
            update_of([1], sequence_id=5, start_length=12, length=13),
            draft_pb2.SequenceUpdate(sequence_id=6),
            draft_pb2.SequenceUpdate(sequence_id=7, closed=True),
        ]
        await call.write(draft_pb2.DraftUpdate(sequences=[*garbage, update_of([1, 2, 3, 1, 2])]))
        answers = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(answers) < 6:
                answers |= {answer.sequence_id: answer for answer in (await call.read()).sequences}
        assert answers[1].branches
        assert [key for key, answer in sorted(answers.items()) if answer.status == UNKNOWN_PREFIX] == [2, 5]
        assert [key for key, answer in sorted(answers.items()) if answer.status == NO_ROOM] == [3, 4, 6]
        call.cancel()


@pytest.mark.parametrize("says_anything", [True, False])
async def test_a_stream_without_a_hello_is_refused(monkeypatch, says_anything):
    monkeypatch.setattr("draft_node.servicer.HELLO_TIMEOUT_SECONDS", PATIENCE_SECONDS if says_anything else 0.05)
    async with running() as (_, channel):
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        if says_anything:
            await call.write(draft_pb2.DraftUpdate(sequences=[update_of([1])]))
        why = "the first message must carry the hello" if says_anything else "no hello within 0.05 s"
        assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, why)


async def test_another_protocol_version_is_refused_and_both_sides_are_named():
    async with running() as (_, channel):
        hello = draft_pb2.DraftHello(protocol_version=99, incarnation=bytes(16), name="decode@new")
        call, _ = await connect(channel, hello)
        code, details = await status_of(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "decode@new" in details
        assert "draft@test" in details


async def test_it_is_unavailable_before_it_serves_and_when_it_drains_which_ends_the_streams_at_once():
    async with running(starts=False) as (service, channel):
        early, _ = await connect(channel)
        assert (await status_of(early))[0] is grpc.StatusCode.UNAVAILABLE
        await service.start("127.0.0.1:1")
        call, _ = await connect(channel)
        await within(service.drain(30.0))
        assert (await status_of(call))[0] is grpc.StatusCode.OK
        refused, _ = await connect(channel)
        assert (await status_of(refused))[0] is grpc.StatusCode.UNAVAILABLE


async def test_it_reports_its_load_and_has_no_tokenizer():
    registry = CollectorRegistry()
    async with running(registry=registry) as (_, channel):
        call, _ = await connect(channel)
        await call.write(draft_pb2.DraftUpdate(sequences=[update_of([1, 2, 3, 1, 2])]))
        await within(call.read())
        labels = {"model_name": "ngram"}
        # Tokens are counted after the answer is sent, so the count may be late.
        await until(lambda: registry.get_sample_value("vllm:generation_tokens_total", labels) >= 2)
        assert registry.get_sample_value("vllm:num_requests_running", labels) == 1
        stub = node_pb2_grpc.NodeServiceStub(channel)
        watch = stub.Watch(node_pb2.WatchNodeRequest())
        report = await within(watch.read())
        watch.cancel()
        assert report.load.num_running == 1
        assert report.num_steps == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetTokenizer(node_pb2.GetTokenizerRequest()).read()
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        call.cancel()


async def test_a_loop_that_fails_ends_the_process(monkeypatch):
    """A node that no longer drafts must not look alive. When it ends, the supervisor starts another process."""
    event_loop = asyncio.get_running_loop()
    ended = event_loop.create_future()
    monkeypatch.setattr("os._exit", lambda status: event_loop.call_soon_threadsafe(ended.set_result, status))
    service = node_of()
    await service.start("127.0.0.1:1")
    service.draft_loop().step = lambda: 1 // 0
    service.draft_loop().submit(service.draft_loop().connect(hello_from_proto(HELLO), lambda: None), [])
    assert await within(ended) == 70
    await service.stop()


async def test_a_stop_before_the_loops_thread_has_looked_is_no_failure(monkeypatch):
    """After `start`, the thread may first check for work only when the node is already draining."""
    may_look = threading.Event()
    run = DraftLoop.run

    def run_late(loop):
        assert may_look.wait(PATIENCE_SECONDS)
        run(loop)

    monkeypatch.setattr(DraftLoop, "run", run_late)
    failures = []
    service = node_of(on_loop_failure=failures.append)
    await service.start("127.0.0.1:1")
    await service.drain(1.0)
    may_look.set()
    await service.stop()  # waits for the thread
    assert failures == []


async def test_a_step_that_catches_up_after_short_ones_is_given_time():
    async with running() as (service, _):
        loop = service.draft_loop()
        loop.last_step_seconds = 0.0001
        loop.step_started_at = time.monotonic()
        assert service.report().expected_step_seconds >= 1.0
        loop.step_started_at = None
        assert service.report().expected_step_seconds == 0.0


async def test_a_stream_is_ended_when_too_much_waits_for_it(monkeypatch):
    monkeypatch.setattr("draft_node.draft_peer.MAX_WAITING", 10)
    async with running() as (_, channel):
        call, _ = await connect(channel)
        await call.write(draft_pb2.DraftUpdate(sequences=[update_of([1, 2], sequence_id=i) for i in range(11)]))
        code, details = await status_of(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "decode does not read" in details


def test_answers_that_are_not_read_count_against_what_may_wait(monkeypatch):
    monkeypatch.setattr("draft_node.draft_peer.MAX_WAITING", 10)
    peer = DraftPeer(0, hello_from_proto(HELLO), lambda: None)
    for sequence_id in range(10):
        peer.submit([SequenceUpdate(sequence_id=sequence_id)], look_ahead_deadline=0.0)
        peer.take_updates()
        peer.answer([SequenceProposals(sequence_id=sequence_id, status=DraftStatus.NOTHING)])
    with pytest.raises(CapacityError):
        peer.submit([SequenceUpdate(sequence_id=10)], look_ahead_deadline=0.0)
    peer.take_answers()
    peer.submit([SequenceUpdate(sequence_id=10)], look_ahead_deadline=0.0)


async def test_a_message_with_many_notices_keeps_no_other_stream_waiting(monkeypatch):
    sizes, submit = [], DraftLoop.submit

    def recorded(self, peer, updates, **values):
        sizes.append(len(updates))
        submit(self, peer, updates, **values)

    monkeypatch.setattr(DraftLoop, "submit", recorded)
    async with running() as (_, channel):
        call, _ = await connect(channel)
        await call.write(draft_pb2.DraftUpdate(notices=[draft_pb2.StepNotice()] * (3 * UPDATES_AT_ONCE)))
        await call.write(draft_pb2.DraftUpdate(sequences=[update_of([1, 2])]))
        await call.read()
    assert sum(sizes) == 3 * UPDATES_AT_ONCE + 1
    assert max(sizes) <= UPDATES_AT_ONCE


async def test_a_message_with_too_many_features_ends_its_stream():
    async with running() as (_, channel):
        call, _ = await connect(channel)
        updates = [
            update_of([1, 2], sequence_id=i, features=bytes(MAX_FEATURE_BYTES_PER_MESSAGE // 2)) for i in range(3)
        ]
        await call.write(draft_pb2.DraftUpdate(sequences=updates))
        code, details = await status_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "features" in details
