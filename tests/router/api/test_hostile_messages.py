"""Hostile messages of a client get a status at once, and do not disturb other clients."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from outrider.v1 import router_pb2
from router.api import servicer
from router.api.request_parsing import MAX_DETOKENIZED
from router.scheduling import placement
from tests.router.conftest import PATIENCE_SECONDS, refused
from tests.router.threaded_router import SERVICE
from tests.support.loop_thread import Stalls

R = router_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_STALL_SECONDS = 0.25


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, body: bytes) -> bytes:
    """Returns an encoded length-delimited field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


MEGABYTES = 15_000_000
TINY_MESSAGES = field(1, b"\x0a\x03\x0a\x01u" * (MEGABYTES // 5))  # the messages of a Chat
EMPTY_MESSAGES = b"\x0a\x00" * (MEGABYTES // 2)


async def fail(cluster, method, data):
    """Sends encoded bytes, and returns the status with which the call fails, streamed or not."""
    return await refused(cluster.channel.unary_stream(SERVICE + method)(data, timeout=PATIENCE_SECONDS))


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("Tokenize", field(2, TINY_MESSAGES[:MEGABYTES])),
        ("Tokenize", field(2, EMPTY_MESSAGES)),
        ("Generate", field(5, EMPTY_MESSAGES)),
        ("Complete", field(7, EMPTY_MESSAGES)),  # stop strings
        ("Detokenize", field(1, b"\x01" * MEGABYTES)),
        ("Resume", b"\x12\x00" * (MEGABYTES // 2)),
    ],
)
async def test_a_message_of_tiny_parts_is_refused_before_it_is_parsed(serving, method, data):
    failure = await fail(serving, method, data)
    assert (failure.code, failure.reason) == (INVALID, "REQUEST_TOO_LARGE")


@pytest.mark.parametrize(
    ("method", "data", "where"),
    [
        ("Tokenize", field(2, b"\x0a\x03\x0a\x01u" * 400_000), "chat.messages"),
        ("Generate", field(5, b"\x0a\x00" * 1_000_000), "chat.messages"),
        ("Detokenize", field(1, b"\x01" * (MAX_DETOKENIZED + 1)), "token_ids"),
        ("Detokenize", field(1, b"\x01" * (MAX_DETOKENIZED - 1) + b"\x7f\xff\x7f"), "token_ids"),
        ("Generate", field(3, b"x") + field(6, field(16, b"\x0a\x01x" * 600_000)), "sampling.choice.options"),
        ("Resume", b"".join(b"\x12\x02\x08" + bytes([index]) for index in range(65)), "next_positions"),
    ],
)
async def test_what_may_be_parsed_never_stalls_the_loop(serving, method, data, where):
    stalls = Stalls()
    watching = asyncio.create_task(stalls.watch())
    failure = await fail(serving, method, data)
    watching.cancel()
    assert (failure.code, failure.field) == (INVALID, where)
    assert stalls.longest_stall_seconds < 4 * MAX_STALL_SECONDS  # the client runs on the same loop


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *((method.name, b"\xff" * 9) for method in R.DESCRIPTOR.services_by_name["RouterService"].methods),
        *itertools.product(("Generate", "Complete"), (field(1, b"\xff\xfe"), field(3, b"\xc3("))),
    ],
)
async def test_bytes_that_do_not_parse_are_the_clients_mistake(serving, method, data):
    assert (await fail(serving, method, data)).code is INVALID


@pytest.mark.parametrize("schema", ["[" * 200_000, "[" * 60_000, '{"a":' * 10_000])
async def test_a_deep_json_schema_is_the_clients_mistake(serving, schema):
    failure = await serving.fail(sampling=R.SamplingParams(json_schema=schema))
    assert (failure.code, failure.field) == (INVALID, "sampling.json_schema")


@pytest.mark.parametrize("name", ["m" * 9_000, "😀" * 9_000, "\0" * 9_000])
async def test_a_long_name_comes_back_cut(serving, name):
    failure = await serving.fail(model=name)
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert len(failure.message.encode()) <= 1024


@pytest.mark.parametrize("request_id", ["x" * 129, "é", "x" * 1_000_000])
async def test_names_of_requests_are_checked_wherever_they_come(serving, request_id):
    for call in (
        serving.stub.Abort(R.AbortRequest(request_id=request_id)),
        serving.channel.unary_unary(SERVICE + "Resume", request_serializer=R.ResumeRequest.SerializeToString)(
            R.ResumeRequest(request_id=request_id)
        ),
    ):
        assert (await refused(call)).field == "request_id"


async def test_an_answer_that_is_larger_than_a_message_ends_when_that_is_known(cluster, monkeypatch):
    monkeypatch.setattr(servicer, "DEFAULT_MAX_MESSAGE_BYTES", 65_536)
    cluster.decode.step_seconds = 0.005
    await cluster.serve()
    request = cluster.request(max_tokens=400, n=4, output=R.OutputOptions(top_logprobs=20))
    failure = await refused(cluster.stub.Complete(request, timeout=PATIENCE_SECONDS))
    assert (failure.code, failure.reason) == (INVALID, "ANSWER_TOO_LARGE"), "and not to be retried"
    assert cluster.decode.step < 400, "it was not computed to its end"
    await cluster.is_empty()
    labels = {"model_name": "fake-model", "reason": "ANSWER_TOO_LARGE"}
    counted = cluster.registry.get_sample_value("outrider:request_failures_total", labels)
    assert counted == 1, "and its client has not just left"
    small = cluster.request(max_tokens=4, n=4, output=R.OutputOptions(top_logprobs=20))
    assert len((await cluster.stub.Complete(small, timeout=20)).completions) == 4


async def test_a_prompt_is_hashed_once_however_long_it_waits(cluster, monkeypatch):
    """Placement tries the queue's head again at every report of every node."""
    hashed = []
    hash_prompt = placement.prefix_hashes
    monkeypatch.setattr(
        placement, "prefix_hashes", lambda ids, **salt: hashed.append(len(ids)) or hash_prompt(ids, **salt)
    )
    cluster.decode.max_running = 1
    cluster.decode.step_seconds = 0.1
    await cluster.serve()
    running = cluster.stub.Generate(cluster.request(max_tokens=400))
    await running.read()
    waiting = asyncio.ensure_future(cluster.generate(text="p" * 300, max_tokens=2))
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == 1)
    cluster.context.queue.pump()
    num_hashed = hashed.count(300)
    for _ in range(1000):
        cluster.context.queue.pump()
    assert hashed.count(300) == num_hashed
    running.cancel()
    await waiting
    assert hashed.count(300) <= 3, "when it came, in the queue, and for the attempt"


@pytest.mark.parametrize("kind", ["generate", "text", "chat"])
async def test_what_is_longer_than_the_window_for_certain_is_not_encoded(serving, kind):
    encoded = []
    serving.service.nodes.served.tokenizer.encode_now = lambda *args, **_: encoded.append(args)
    text = "x" * 1_000_000
    chat = R.Chat(messages=[R.ChatMessage(role="user", content=text)])
    calls = {
        "generate": lambda: serving.stub.Generate(serving.request(text=text)),
        "text": lambda: serving.stub.Tokenize(R.TokenizeRequest(text=text)),
        "chat": lambda: serving.stub.Tokenize(R.TokenizeRequest(chat=chat)),
    }
    failure = await refused(calls[kind]())
    field = "chat.messages" if kind == "chat" else "text"
    assert (failure.code, failure.field, failure.reason) == (INVALID, field, "PROMPT_TOO_LONG")
    assert encoded == []
