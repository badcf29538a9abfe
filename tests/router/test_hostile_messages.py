"""Single messages that a client may send: each gets a status at once, and nobody else notices."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from outrider.v1 import router_pb2
from router import placement, servicer
from router.validation import MAX_DETOKENIZED

R = router_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_STALL_SECONDS = 0.25
SERVICE = "/outrider.v1.RouterService/"


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, body: bytes) -> bytes:
    """A length-delimited field on the wire."""
    return varint(number << 3 | 2) + varint(len(body)) + body


MEGABYTES = 15_000_000
TINY_MESSAGES = field(1, b"\x0a\x03\x0a\x01u" * (MEGABYTES // 5))  # of a Chat
EMPTY_MESSAGES = b"\x0a\x00" * (MEGABYTES // 2)


class Raw:
    """Calls with bytes as they are on the wire."""

    def __init__(self, cluster):
        self._cluster = cluster

    async def fail(self, method, data):
        """The status of a call, whether it streams or not."""
        call = self._cluster.channel.unary_stream(SERVICE + method)(data, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return self._cluster.failure_of(caught.value)


@pytest.fixture
def raw(serving):
    return Raw(serving)


class Stalls:
    """The longest that the event loop's thread computed before it came back to a task that asked for it every 5 ms.

    Its processor time: a busy machine adds nothing to it.
    """

    def __init__(self):
        self.longest_seconds = 0.0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_):
        self._task.cancel()

    async def _watch(self):
        while True:
            asked_at = time.thread_time()
            await asyncio.sleep(0.005)
            self.longest_seconds = max(self.longest_seconds, time.thread_time() - asked_at)


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
async def test_a_message_of_tiny_parts_is_refused_before_it_is_parsed(raw, method, data):
    failure = await raw.fail(method, data)
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
async def test_what_may_be_parsed_never_stalls_the_loop(raw, method, data, where):
    async with Stalls() as stalls:
        failure = await raw.fail(method, data)
    assert (failure.code, failure.field) == (INVALID, where)
    assert stalls.longest_seconds < 4 * MAX_STALL_SECONDS  # the client is in this process, too


@pytest.mark.parametrize("data", [field(1, b"\xff\xfe"), field(3, b"\xc3("), b"\xff" * 9])
@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_bytes_that_do_not_parse_are_the_clients_mistake(raw, method, data):
    assert (await raw.fail(method, data)).code is INVALID


@pytest.mark.parametrize("method", ["Tokenize", "Abort", "Resume", "Detokenize", "GetModel", "WatchCluster"])
async def test_no_method_takes_bytes_that_do_not_parse(raw, method):
    assert (await raw.fail(method, b"\xff" * 9)).code is INVALID


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert serving.failure_of(caught.value).field == "request_id"


async def test_an_answer_that_is_larger_than_a_message_ends_when_that_is_known(cluster, monkeypatch):
    monkeypatch.setattr(servicer, "DEFAULT_MAX_MESSAGE_BYTES", 65_536)
    cluster.decode.step_seconds = 0.005
    await cluster.serve()
    request = cluster.request(sampling=cluster.sampling(max_tokens=400, n=4), output=R.OutputOptions(top_logprobs=20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Complete(request, timeout=20)
    failure = cluster.failure_of(caught.value)
    assert (failure.code, failure.reason) == (INVALID, "ANSWER_TOO_LARGE"), "and not to be retried"
    assert cluster.decode.step < 400, "it was not computed to its end"
    await cluster.is_empty()
    small = cluster.request(sampling=cluster.sampling(max_tokens=4, n=4), output=R.OutputOptions(top_logprobs=20))
    assert len((await cluster.stub.Complete(small, timeout=20)).completions) == 4


async def test_a_prompt_is_hashed_once_however_long_it_waits(cluster, monkeypatch):
    """The queue's head is offered to placement at every report of every node."""
    hashed = []
    hash_prompt = placement.prefix_hashes
    monkeypatch.setattr(
        placement, "prefix_hashes", lambda ids, **salt: hashed.append(len(ids)) or hash_prompt(ids, **salt)
    )
    cluster.decode.max_running = 1
    cluster.decode.step_seconds = 0.1
    await cluster.serve()
    running = cluster.stub.Generate(cluster.request(sampling=cluster.sampling(max_tokens=400)))
    await running.read()
    waiting = asyncio.ensure_future(cluster.generate(text="p" * 300, sampling=cluster.sampling(max_tokens=2)))
    await cluster.eventually(lambda: cluster.services.queue.num_waiting == 1)
    cluster.services.queue.pump()
    num_hashed = hashed.count(300)
    for _ in range(1000):
        cluster.services.queue.pump()
    assert hashed.count(300) == num_hashed
    running.cancel()
    await waiting
    assert hashed.count(300) <= 3, "when it came, in the queue, and for the attempt"


async def test_readiness_follows_the_nodes(cluster):
    await cluster.serve()
    told = []
    cluster.service.follow_readiness(told.append)
    assert told == [True]
    await cluster.decode.stop()
    await cluster.eventually(lambda: told[-1] is False)
    await cluster.decode.start(int(cluster.decode.address.rpartition(":")[2]))
    await cluster.eventually(lambda: told[-1] is True)


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_what_is_longer_than_the_window_for_certain_is_not_encoded(serving, kind):
    encoded = []
    serving.service.nodes.served.tokenizer._encode = lambda *args, **_: encoded.append(args)
    text = "x" * 1_000_000
    chat = R.Chat(messages=[R.ChatMessage(role="user", content=text)])
    request = R.TokenizeRequest(text=text) if kind == "text" else R.TokenizeRequest(chat=chat)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await serving.stub.Tokenize(request, timeout=20)
    failure = serving.failure_of(caught.value)
    assert (failure.code, failure.reason) == (INVALID, "PROMPT_TOO_LONG")
    assert encoded == []
