"""Peers that flood, lie, stall and never read: clients, routers, senders of KV, draft nodes.

python -m tests.support.hostile_peers "router floods" --decode 127.0.0.1:50052   # until its standard input ends
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from outrider.kv_transfer.frames import METHOD as KV_METHOD
from outrider.kv_transfer.frames import Hello, encode_hello
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.v1 import draft_pb2, draft_pb2_grpc, node_pb2, router_pb2, session_pb2, session_pb2_grpc

S, R = session_pb2, router_pb2
ROUTER_SERVICE = "/outrider.v1.RouterService/"
PROMPT = list(range(20, 60))
LONG_PROMPT = [20 + (i * 7) % 200 for i in range(200)]
PATIENCE_SECONDS = 20.0
NUM_PEERS = 4
"""Sessions, or senders, at a time."""


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
    """Groups that are opened and given up, as fast as the stream takes them."""
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
                *([opening(transfer_id=b"short"), hello()] if chance.random() < 0.01 else []),  # end the session
            ]
        )
        stopping.wait(0.001)


def stalls(stopping):
    """Takes room, then falls silent."""
    yield opening(LONG_PROMPT)
    yield opening(max_tokens=400)
    stopping.wait()


def never_reads(stopping):
    while not stopping.is_set():
        yield opening(max_tokens=400)
        yield heartbeat()
        stopping.wait(0.05)


class Peers:
    """Threads that are hostile until `stop`. `num_acts` says that they came to it."""

    def __init__(self, act):
        self.num_acts = 0
        self.stopping = threading.Event()
        self._act = act
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_PEERS)]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _run(self):
        while not self.stopping.is_set():
            with contextlib.suppress(grpc.RpcError):
                self._act(self.stopping, self)


def routers(decode_address, behave, *, reads=True):
    """Sessions with a decode node, again and again."""

    def act(stopping, peers):
        def commands():
            yield hello()
            for command in behave(stopping):
                peers.num_acts += 1
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
    """Of the node's ingest: a router is told it with a grant."""
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
    """Streams to KV ingest: these messages each, and nothing after them."""
    address = kv_address(decode_address)

    def act(stopping, peers):
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            push = channel.stream_stream(KV_METHOD)
            while not stopping.is_set():
                calls = [push(said(messages), timeout=1.0) for _ in range(16)]
                peers.num_acts += len(calls)
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
    """Hellos of transfers that nobody expects."""
    return [encode_hello(Hello(transfer_id=os.urandom(16), incarnation=os.urandom(16))) for _ in range(50)]


KINDS = {
    "router floods": lambda decode: routers(decode, floods),
    "router lies": lambda decode: routers(decode, lies),
    "router stalls": lambda decode: routers(decode, stalls),
    "router never reads": lambda decode: routers(decode, never_reads, reads=False),
    "sender sends garbage": lambda decode: senders(decode, garbage),
    "sender is a stranger": lambda decode: senders(decode, strangers),
    "sender says nothing": lambda decode: senders(decode, list, reads=False),
}
"""By what is hostile: starts it against a decode node's address."""
DRAFTERS = {f"drafter {behaviour}": behaviour for behaviour in ("floods", "lies", "stalls", "never reads")}


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
"""(method, request) by what is hostile in it."""


class HostileClient:
    """Calls again and again, in threads, until it is stopped."""

    def __init__(self, address, method, data, *, num_threads=3, num_unread=12):
        self.num_calls = 0
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call = self._channel.unary_stream(ROUTER_SERVICE + method)
        self._data = data
        self._is_unread = method in ("WatchCluster", "Generate")
        self._num_unread = num_unread
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._flood) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _flood(self):
        unread = []
        while not self._stopping.is_set():
            call = self._call(self._data, timeout=20, metadata=[("client_id", "hostile")])
            self.num_calls += 1
            if self._is_unread:
                unread.append(call)
                if len(unread) >= self._num_unread:
                    unread.pop(0).cancel()
                self._stopping.wait(0.005)
            else:
                with contextlib.suppress(grpc.RpcError):
                    list(call)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
        self._channel.close()


class HostileDrafter(draft_pb2_grpc.DraftServiceServicer):
    """A draft node that `floods` with branches of everything, `lies` about prefixes, `stalls`, or `never reads`."""

    def __init__(self, behaviour, port=0):
        self.behaviour = behaviour
        self.num_acts = 0
        self._server = grpc.server(ThreadPoolExecutor(8))
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self):
        self._server.stop(0)

    def Draft(self, request_iterator, context):
        next(request_iterator)
        if self.behaviour == "stalls":
            while context.is_active():
                time.sleep(0.05)
        versions = SUPPORTED_VERSIONS
        info = node_pb2.NodeInfo(
            protocol_version=versions.newest,
            oldest_protocol_version=versions.oldest,
            incarnation=bytes(16),
            name="hostile",
            role=node_pb2.NODE_ROLE_DRAFT,
            state=node_pb2.NODE_STATE_SERVING,
        )
        info.model.name = "hostile"
        yield draft_pb2.DraftProposals(hello=info)
        while self.behaviour == "never reads" and context.is_active():
            time.sleep(0.05)
        for message in request_iterator:
            for update in message.sequences:
                self.num_acts += 1
                yield from self._answers(update)

    def _answers(self, update):
        branches = [
            draft_pb2.Branch(
                length=update.length + shift,
                prefix_hash=update.prefix_hash,
                token_ids=[30 + shift] * 16,
                probability=1.0,
            )
            for shift in range(32)
        ]
        for _ in range(20 if self.behaviour == "floods" else 1):
            yield draft_pb2.DraftProposals(
                sequences=[
                    draft_pb2.SequenceProposals(
                        sequence_id=update.sequence_id, acked_length=update.length, branches=branches
                    )
                ]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="A hostile peer.")
    parser.add_argument("kind", choices=[*CLIENTS, *DRAFTERS, *KINDS])
    parser.add_argument("--router", metavar="HOST:PORT", help="for clients")
    parser.add_argument("--decode", metavar="HOST:PORT", help="for routers and senders")
    parser.add_argument("--draft-port", type=int, default=0, help="where a decode node looks for its draft node")
    arguments = parser.parse_args()
    kind = arguments.kind
    if kind in CLIENTS:
        method, make = CLIENTS[kind]
        peers = HostileClient(arguments.router, method, make())
    elif kind in DRAFTERS:
        peers = HostileDrafter(DRAFTERS[kind], arguments.draft_port)
    else:
        peers = KINDS[kind](arguments.decode)
    print("begun", flush=True)
    sys.stdin.read()
    num_acts = peers.num_calls if kind in CLIENTS else peers.num_acts
    print(num_acts, flush=True)
    peers.stop()


if __name__ == "__main__":
    main()
