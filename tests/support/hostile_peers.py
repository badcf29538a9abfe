"""Peers that flood, lie, stall and never read: clients, routers, senders of KV."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time

import grpc

from outrider.kv_transfer.frames import METHOD as KV_METHOD
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.v1 import node_pb2, router_pb2, session_pb2, session_pb2_grpc
from tests.support.kv_messages import encode_hello

S, R = session_pb2, router_pb2
ROUTER_SERVICE = "/outrider.v1.RouterService/"
PROMPT = list(range(20, 60))
LONG_PROMPT = [20 + (i * 7) % 200 for i in range(200)]
PATIENCE_SECONDS = 20.0
NUM_PEERS = 4
"""Number of concurrent sessions, senders or client threads."""
NUM_UNREAD = 12


def hello():
    versions = SUPPORTED_VERSIONS
    return S.SessionCommand(
        hello=S.SessionHello(
            protocol_version=versions.newest,
            oldest_protocol_version=versions.oldest,
            incarnation=os.urandom(16),
            name="hostile",
            reached_at="127.0.0.1:1",
        )
    )


def opening(prompt=PROMPT, *, max_tokens=4, options=None, **fields):
    sampling = router_pb2.SamplingParams(max_tokens=max_tokens, seed=1, temperature=1.0)
    given = {"sequence_group_id": os.urandom(16), "transfer_id": os.urandom(16), "request_id": "hostile"}
    opened = S.OpenSequenceGroup(**given | {"samples": [S.SampleStart()]} | fields)
    opened.options.MergeFrom(options or node_pb2.RequestOptions(sampling=sampling))
    opened.prompt_token_ids.extend(prompt)
    return S.SessionCommand(open=opened)


def heartbeat():
    return S.SessionCommand(heartbeat=S.SessionHeartbeat())


def floods(stopping):
    """Opens and aborts groups as fast as the stream takes them."""
    while not stopping.is_set():
        opened = opening()
        yield opened
        yield S.SessionCommand(cancel=S.CancelSequenceGroup(sequence_group_id=opened.open.sequence_group_id))


def lies(stopping):
    chance = random.Random(0)
    nan = node_pb2.RequestOptions(sampling=router_pb2.SamplingParams(temperature=float("nan"), max_tokens=4))
    too_much = node_pb2.RequestOptions(
        sampling=router_pb2.SamplingParams(max_tokens=2**31 - 1, seed=1, temperature=1.0),
        stop_token_ids=[2**31 - 1],
        num_speculative_tokens=2**31 - 1,
        cache_salt=bytes(65),
    )
    while not stopping.is_set():
        group = os.urandom(16)
        yield chance.choice(
            [
                S.SessionCommand(cancel=S.CancelSequenceGroup(sequence_group_id=group, samples=[7])),
                S.SessionCommand(retarget=S.RetargetSequenceGroup(sequence_group_id=group, transfer_id=group)),
                opening([2**31 - 1] * 8),
                opening(samples=[]),
                opening(samples=[S.SampleStart(sample=2**31 - 1, generated_token_ids=[2**31 - 1])]),
                opening(options=nan),
                opening(options=too_much),
                opening([20] * 100_000),
                *([opening(transfer_id=b"short"), hello()] if chance.random() < 0.01 else []),  # these end the session
            ]
        )
        stopping.wait(0.001)


def stalls(stopping):
    """Takes room, then stays silent."""
    yield opening(LONG_PROMPT)
    yield opening(max_tokens=400)
    stopping.wait()


def never_reads(stopping):
    while not stopping.is_set():
        yield opening(max_tokens=400)
        yield heartbeat()
        stopping.wait(0.05)


class Peers:
    """Threads that are hostile until `stop`. `num_hostile_acts` counts their hostile acts."""

    def __init__(self, act):
        self.num_hostile_acts = 0
        self.stopping = threading.Event()
        self._act = act
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_PEERS)]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_SECONDS)

    def _run(self):
        while not self.stopping.is_set():
            with contextlib.suppress(grpc.RpcError):
                self._act(self.stopping, self)


def routers(decode_address, behave, *, reads=True):
    """Opens sessions with a decode node, again and again."""

    def act(stopping, peers):
        def commands():
            yield hello()
            for command in behave(stopping):
                peers.num_hostile_acts += 1
                yield command

        with grpc.insecure_channel(decode_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = session_pb2_grpc.DecodeServiceStub(channel).Session(commands())
            if reads:
                for _ in call:
                    if stopping.is_set():
                        call.cancel()
            else:
                while call.is_active() and not stopping.wait(0.05):
                    pass
                call.cancel()

    return Peers(act)


def kv_address(decode_address):
    """Returns the address of the node's KV ingest, which a router learns with a grant."""
    with grpc.insecure_channel(decode_address) as channel:
        call = session_pb2_grpc.DecodeServiceStub(channel).Session(
            itertools.chain([hello(), opening(LONG_PROMPT)], waiting()), timeout=PATIENCE_SECONDS
        )
        for report in call:
            for event in report.events:
                if event.HasField("granted"):
                    call.cancel()
                    return event.granted.kv_address
    raise AssertionError("nothing was granted")


def waiting():
    while True:
        time.sleep(0.2)
        yield heartbeat()


def senders(decode_address, messages, *, reads=True):
    """Opens streams to KV ingest that send these messages and nothing after them."""
    address = kv_address(decode_address)

    def act(stopping, peers):
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            push = channel.stream_stream(KV_METHOD)
            while not stopping.is_set():
                calls = [push(said(messages), timeout=1.0) for _ in range(16)]
                peers.num_hostile_acts += len(calls)
                for call in calls:
                    with contextlib.suppress(grpc.RpcError):
                        if reads:
                            list(call)
                if not reads:
                    stopping.wait(0.5)

    return Peers(act)


def said(messages):
    yield from messages()
    time.sleep(0.2)


def garbage():
    return [os.urandom(1000) for _ in range(100)]


def strangers():
    """Returns hellos of transfers that nobody expects."""
    return [encode_hello(os.urandom(16), os.urandom(16)) for _ in range(50)]


KINDS = {
    "router floods": lambda decode: routers(decode, floods),
    "router lies": lambda decode: routers(decode, lies),
    "router stalls": lambda decode: routers(decode, stalls),
    "router never reads": lambda decode: routers(decode, never_reads, reads=False),
    "sender sends garbage": lambda decode: senders(decode, garbage),
    "sender is a stranger": lambda decode: senders(decode, strangers),
    "sender says nothing": lambda decode: senders(decode, list, reads=False),
}
"""Functions that start a hostile peer against a decode node's address, by what the peer does."""


def wire_chat(num_messages):
    chat = R.Chat()
    message = R.ChatMessage(role="u")
    chat.messages.extend([message] * num_messages)
    return R.TokenizeRequest(chat=chat).SerializeToString()


CLIENTS = {
    "client: tiny parts": ("Tokenize", lambda: wire_chat(300_000)),
    "client: too many parts": ("Tokenize", lambda: wire_chat(1_000_000)),
    "client: many ids": ("Detokenize", lambda: R.DetokenizeRequest(token_ids=[1] * 1_900_000).SerializeToString()),
    "client: long texts": ("Tokenize", lambda: R.TokenizeRequest(text="word " * 300_000).SerializeToString()),
    "client: deep schemas": (
        "Generate",
        lambda: R.GenerateRequest(text="x", sampling=R.SamplingParams(json_schema="[" * 60_000)).SerializeToString(),
    ),
    "client: watches": ("WatchCluster", lambda: b""),
    "client: streams that are not read": (
        "Generate",
        lambda: R.GenerateRequest(
            text="x" * 100, sampling=R.SamplingParams(seed=1, max_tokens=400)
        ).SerializeToString(),
    ),
    "client: garbage": ("Complete", lambda: b"\xff" * 100_000),
}
"""(method, request) by what is hostile in the request."""


def clients(address, method, data):
    """Calls the method again and again. Each thread leaves a dozen streams unread at a time."""
    is_unread = method in ("WatchCluster", "Generate")

    def act(stopping, peers):
        unread = []
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_stream(ROUTER_SERVICE + method)
            while not stopping.is_set():
                answer = call(data, timeout=PATIENCE_SECONDS, metadata=[("client_id", "hostile")])
                peers.num_hostile_acts += 1
                if is_unread:
                    unread.append(answer)
                    if len(unread) >= NUM_UNREAD:
                        unread.pop(0).cancel()
                    stopping.wait(0.005)
                else:
                    with contextlib.suppress(grpc.RpcError):
                        list(answer)

    return Peers(act)
