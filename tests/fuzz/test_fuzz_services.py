"""Any bytes to any service of a node give a meaningful status, and no other peer waits."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from outrider.kv_transfer.frames import METHOD_NAME
from outrider.kv_transfer.frames import SERVICE_NAME as KV_SERVICE
from outrider.kv_transfer.receiver import KvReceiver
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.speculation.prefix_hash import prefix_hash
from outrider.v1 import draft_pb2, node_pb2, prefill_pb2, router_pb2, session_pb2
from outrider.wire.node import FEATURES
from tests.fuzz.messages import fuzzed, messages, wire_bytes
from tests.fuzz.test_fuzz_kv import sender_messages
from tests.fuzz.threaded_services import ThreadedServices
from tests.kv_transfer.conftest import INCARNATION, Peers
from tests.support import fake_head
from tests.support.kv_messages import encode_hello

SESSION = "/outrider.v1.DecodeService/Session"
DRAFT = "/outrider.v1.DraftService/Draft"
PREFILL = "/outrider.v1.PrefillService/Prefill"
UNARY = {
    PREFILL: prefill_pb2.PrefillRequest,
    "/outrider.v1.NodeService/GetNode": node_pb2.GetNodeRequest,
    "/outrider.v1.NodeService/GetTokenizer": node_pb2.GetTokenizerRequest,
    "/outrider.v1.NodeService/Watch": node_pb2.WatchNodeRequest,
    "/outrider.v1.NodeService/Profile": node_pb2.ProfileRequest,
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ABORTED,
}
"""Statuses of a peer's own mistakes. UNKNOWN and INTERNAL would be failures of the node."""
MAX_STALL_SECONDS = 1.0
NEWEST = SUPPORTED_VERSIONS.newest
SESSION_HELLO = session_pb2.SessionCommand(
    hello=session_pb2.SessionHello(protocol_version=NEWEST, name="router", reached_at="127.0.0.1:1")
).SerializeToString()
DRAFT_HELLO = draft_pb2.DraftUpdate(
    hello=draft_pb2.DraftHello(
        protocol_version=NEWEST,
        incarnation=bytes(16),
        name="decode",
        vocab_size=100,
        max_model_len=512,
        features=FEATURES.to_proto(fake_head.FEATURES),
    )
).SerializeToString()

OPTIONS = node_pb2.RequestOptions(sampling=router_pb2.SamplingParams(max_tokens=100))


@pytest.fixture(scope="module")
def services():
    services = ThreadedServices()
    yield services
    services.stop()


@st.composite
def conversations(draw, hello, kind, likely):
    """Draws the messages of one stream: mostly after a valid hello, and mostly similar to a peer's."""
    any_bytes = wire_bytes(kind)
    first = [hello] if draw(st.integers(0, 4)) else [draw(any_bytes)]
    return first + draw(st.lists(any_bytes | likely.map(lambda message: message.SerializeToString()), max_size=5))


@st.composite
def likely_updates(draw):
    """Draws states as a decode node reports them, some with one wrong field."""
    token_ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    update = draft_pb2.SequenceUpdate(
        sequence_id=draw(st.integers(0, 3)),
        start=draft_pb2.SequenceStart(prompt_length=1, options=OPTIONS),
        token_ids=token_ids,
        length=len(token_ids),
        prefix_hash=prefix_hash(token_ids),
        num_wanted=draw(st.integers(0, 4)),
        feature_start=draw(st.integers(0, 3)),
        features=draw(st.just(b"") | st.integers(0, 12).map(lambda n: bytes(n * fake_head.FEATURES.bytes_per_token))),
    )
    if draw(st.booleans()):
        update.MergeFrom(draw(messages(draft_pb2.SequenceUpdate)))
    notices = draw(st.lists(messages(draft_pb2.StepNotice, sequence_id=update.sequence_id), max_size=2))
    return draft_pb2.DraftUpdate(
        sequences=[update], notices=notices, step_microseconds=draw(st.sampled_from([0, 10_000, 2**32 - 1]))
    )


def likely_commands():
    ids = {"sequence_group_id": bytes(16), "transfer_id": bytes(16)}
    return messages(session_pb2.OpenSequenceGroup, **ids).map(lambda opened: session_pb2.SessionCommand(open=opened))


def reflections():
    return st.lists(wire_bytes(reflection_pb2.ServerReflectionRequest), max_size=5)


STREAMS = {
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflections(),
    SESSION: conversations(SESSION_HELLO, session_pb2.SessionCommand, likely_commands()),
    DRAFT: conversations(DRAFT_HELLO, draft_pb2.DraftUpdate, likely_updates()),
}


ANY_PREFILL = messages(
    prefill_pb2.PrefillRequest,
    fingerprint="f",
    transfer_id=bytes(16),
    decode_incarnation=bytes(16),
    kv_address="h:1",
).map(lambda request: request.SerializeToString())


@pytest.mark.parametrize("method", UNARY)
def test_any_bytes_get_a_status_and_stall_nobody(services, method):
    @fuzzed(12)
    @given(data=wire_bytes(UNARY[method]) | (ANY_PREFILL if method == PREFILL else st.nothing()))
    def send(data):
        status, _ = services.call(method, [data], num_answers=1 if method.endswith("Watch") else None)
        assert status is grpc.StatusCode.OK or status in REFUSALS, (status, data)

    send()
    assert services.longest_stall_seconds < MAX_STALL_SECONDS
    assert_honest_peers_are_served(services)


@pytest.mark.parametrize("method", STREAMS)
def test_any_stream_gets_a_status_and_stalls_nobody(services, method):
    @fuzzed(20)
    @given(said=STREAMS[method])
    def send(said):
        status, _ = services.call(method, said)
        assert status is grpc.StatusCode.OK or status in REFUSALS, (status, said)

    send()
    assert services.longest_stall_seconds < MAX_STALL_SECONDS
    assert_honest_peers_are_served(services)


def assert_honest_peers_are_served(services):
    status, answers = services.call(SESSION, [SESSION_HELLO], num_answers=1)
    assert status is grpc.StatusCode.OK
    assert session_pb2.SessionReport.FromString(answers[0]).hello.name == "node"
    status, answers = services.call(DRAFT, [DRAFT_HELLO], num_answers=1)
    assert status is grpc.StatusCode.OK
    assert draft_pb2.DraftProposals.FromString(answers[0]).HasField("hello")
    request = prefill_pb2.PrefillRequest(
        fingerprint="f", transfer_id=bytes(16), decode_incarnation=bytes(16), kv_address="h:1", token_ids=[1]
    )
    status, answers = services.call(PREFILL, [request.SerializeToString()])
    assert (status, len(answers)) == (grpc.StatusCode.OK, 1)
    assert not services.failures


def test_any_messages_to_kv_ingest_get_a_status_and_the_next_sender_is_served(request):
    peers = Peers()
    spec = peers.spec(start=0, end=6)
    frames = peers.frames(spec)
    receiver = KvReceiver(
        incarnation=INCARNATION, host="127.0.0.1", on_complete=lambda *_: None, on_failed=lambda *_: None, max_senders=8
    )
    port = receiver.start()
    request.addfinalizer(receiver.stop)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        push = channel.stream_stream(f"/{KV_SERVICE}/{METHOD_NAME}")

        @fuzzed(12)
        @given(said=st.lists(sender_messages(spec, frames) | st.binary(max_size=64), max_size=6))
        def send(said):
            call = push(iter(said), timeout=60)
            try:
                list(call)
            except grpc.RpcError as error:
                assert error.code() in REFUSALS | {grpc.StatusCode.CANCELLED}, (error.code(), said)  # noqa: PT017

        send()
        receiver.inbox.open(spec, peers.sink())
        hello = encode_hello(spec.transfer_id, INCARNATION)
        assert next(push(iter([hello]), timeout=60))
