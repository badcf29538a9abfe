"""Peers that are frozen (SIGSTOP), which TCP does not notice, or killed. Neither side may wait for ever."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import PeerLostError
from outrider.kv_transfer.base import DrainState, Region
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.cuda_ipc import DeviceArena
from tests.kv_transfer.peer_process import spec_of
from tests.support.waiting import wait_for

PROGRAM = Path(__file__).with_name("peer_process.py")
ROOT = PROGRAM.parents[2]
PROGRESS_SECONDS = 2.0
"""A receiver's progress deadline. Even on a busy machine, its senders' keep-alives, every 0.2 s, arrive in time."""


class Child:
    def __init__(self, *arguments, environ):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def line(self, timeout=60):
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout), "the child said nothing"
        return self.process.stdout.readline().split()

    def say(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        self.process.send_signal(number)

    def freeze(self):
        """Stops the process, and waits until it has stopped."""
        self.signal(signal.SIGSTOP)
        wait_for(lambda: os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG))

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def gpu_and_driver(monkeypatch, tmp_path):
    """A fake GPU and its driver, which all processes share."""
    pytest.importorskip("torch")
    from tests.support.fake_cuda_driver import fake_shared_gpu

    return fake_shared_gpu(monkeypatch, tmp_path)


@pytest.fixture
def gpu(request):
    """The fake GPU, or None for connectors that need none."""
    return request.getfixturevalue("gpu_and_driver")[0] if "cuda_ipc" in request.node.name else None


@pytest.fixture
def child(gpu, tmp_path):
    environ = {} if gpu is None else {"FAKE_GPU": str(tmp_path), "PYTHONPATH": str(ROOT)}
    children = []

    def start(*arguments):
        children.append(Child(*arguments, environ=environ))
        return children[-1]

    yield start
    for each in children:
        each.end()


@pytest.fixture(params=["grpc", "shared_memory", "cuda_ipc"])
def connector(request, gpu):
    made = Connector(
        KvTransferConfig(
            connector=request.param,
            frame_bytes=64 * 1024,
            device_frame_bytes=64 * 1024,
            arena_bytes=1 << 20,
            device_arena_bytes=1 << 20,
            window_bytes=1 << 18,
            progress_seconds=0.4,
        ),
        gpu=gpu,
    )
    yield made
    made.close()


@pytest.fixture
def receiving(child):
    """A receiver, its address, and a transfer that it expects."""
    spec = spec_of(os.urandom(16))
    receiver = child("receive", spec.transfer_id.hex())
    return receiver, f"127.0.0.1:{receiver.line()[1]}", spec


def put_until_it_blocks(sender, gpu):
    payload = bytes(64 * 1024)
    if gpu is not None:
        from tests.support.fake_cuda_driver import device_rows

        payload = device_rows(gpu, payload)
    for start in range(0, 4096 * 16, 1024):
        sender.put(Region("k", range(1), range(start, start + 1024), range(1)), payload)


def test_a_frozen_receiver_does_not_hold_the_sender(receiving, connector, gpu):
    receiver, *target = receiving
    sender = connector.connect(*target)
    receiver.freeze()
    with pytest.raises(PeerLostError):
        put_until_it_blocks(sender, gpu)
    assert sender.payload_bytes <= 1 << 20  # the size of an arena; a window is smaller
    assert sender.cancel() is DrainState.UNKNOWN


def test_a_frozen_receiver_is_not_connected_to(receiving, connector, gpu):
    receiver, *target = receiving
    receiver.freeze()
    quick = Connector(KvTransferConfig(connector=connector.name, connect_seconds=0.5), gpu=gpu)
    try:
        with pytest.raises(PeerLostError):
            quick.connect(*target)
    finally:
        quick.close()


def test_a_killed_receiver_ends_the_sender_at_once(receiving, connector, gpu):
    receiver, *target = receiving
    sender = connector.connect(*target)
    receiver.signal(signal.SIGKILL)
    receiver.process.wait(60)
    with pytest.raises(PeerLostError):
        put_until_it_blocks(sender, gpu)
    with pytest.raises(PeerLostError):
        sender.commit()
    assert sender.cancel() is DrainState.UNKNOWN


def test_cuda_ipc_lends_memory_again_once_a_lost_receiver_is_dead(child, gpu_and_driver):
    """Otherwise each decode node that dies during a push would cost the prefill node GPU memory until its own end."""
    gpu, driver = gpu_and_driver
    sizes = {
        "arena_bytes": 1 << 20,
        "device_arena_bytes": 1 << 20,
        "frame_bytes": 1 << 16,
        "device_frame_bytes": 1 << 16,
    }
    config = KvTransferConfig(connector="cuda_ipc", progress_seconds=0.4, **sizes)

    def lose():
        """Freezes a receiver during a push, and returns it after its sender has given up."""
        spec, connector = spec_of(os.urandom(16)), Connector(config, gpu=gpu)
        receiver = child("receive", spec.transfer_id.hex())
        sender = connector.connect(f"127.0.0.1:{receiver.line()[1]}", spec)
        receiver.freeze()
        with pytest.raises(PeerLostError):
            put_until_it_blocks(sender, gpu)
        assert sender.cancel() is DrainState.UNKNOWN
        connector.close()
        return receiver

    def wait_until_left(number):
        """Waits for the streams' threads to end, because they keep their arenas until then."""
        wait_for(lambda: gc.collect() >= 0 and len(gpu.left) == number)

    first = lose()
    wait_until_left(1)
    first.end()
    frozen = lose()
    wait_until_left(1)
    assert driver.num_allocated == 1
    second = lose()
    wait_until_left(2)
    assert driver.num_allocated == 2, "who is frozen may still read"
    second.end()
    frozen.end()
    arenas = [DeviceArena(gpu, config) for _ in range(2)]
    assert driver.num_allocated == 2
    for arena in arenas:
        arena.unlink()


@pytest.mark.parametrize("connector_name", ["grpc", "shared_memory", "cuda_ipc"])
def test_a_frozen_sender_fails_the_transfer_and_cannot_hurt_once_thawed(
    child, peers, receiver_factory, connector_name, gpu
):
    receiver, port = receiver_factory(progress_seconds=PROGRESS_SECONDS, gpu=gpu)
    transfer_id, sink = os.urandom(16), peers.sink()
    receiver.inbox.open(spec_of(transfer_id), sink)
    sender = child("send", transfer_id.hex(), f"127.0.0.1:{port}", connector_name)
    assert sender.line() == ["connected", connector_name]
    sender.say()
    assert sender.line() == ["put"]
    sender.freeze()
    assert peers.news.get(timeout=60) == ("failed", transfer_id)
    assert peers.failed[transfer_id] == "the sender made no progress"
    assert receiver.close(transfer_id) is DrainState.DRAINED
    num_writes = sink.num_writes
    sender.signal(signal.SIGCONT)
    words = []
    while "error" not in words:
        sender.say()
        words = sender.line()
    assert sink.num_writes == num_writes


def test_a_living_sender_with_nothing_to_send_is_not_failed(child, peers, receiver_factory):
    receiver, port = receiver_factory(progress_seconds=PROGRESS_SECONDS)
    transfer_id, sink = os.urandom(16), peers.sink()
    receiver.inbox.open(spec_of(transfer_id), sink)
    sender = child("send", transfer_id.hex(), f"127.0.0.1:{port}", "grpc")
    sender.line()
    with pytest.raises(queue.Empty):  # a deadline passes
        peers.news.get(timeout=1.25 * PROGRESS_SECONDS)
    sender.say()
    assert sender.line() == ["put"]
    assert not peers.failed


@pytest.mark.parametrize("connector_name", ["shared_memory", "cuda_ipc"])
def test_a_killed_sender_fails_the_transfer_at_once(child, peers, receiver_factory, connector_name, gpu):
    receiver, port = receiver_factory(gpu=gpu)
    transfer_id = os.urandom(16)
    receiver.inbox.open(spec_of(transfer_id), peers.sink())
    sender = child("send", transfer_id.hex(), f"127.0.0.1:{port}", connector_name)
    assert sender.line() == ["connected", connector_name]
    sender.signal(signal.SIGKILL)
    assert peers.news.get(timeout=60) == ("failed", transfer_id)
    assert "ended before the commit" in peers.failed[transfer_id]
