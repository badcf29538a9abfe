"""The arenas that a sender keeps: those of living receivers that can attach."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest

from outrider.errors import PeerLostError
from outrider.kv_transfer import arena as arena_module
from outrider.kv_transfer.arena import IDLE_SECONDS, Arena, ArenaReader, arena_path, sweep
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.shared_memory import ArenaSource

OLD = time.time() - 3600


class Receiver:
    """A receiving process, as seen through a stream to it."""

    def __init__(self, directory, address="127.0.0.1:1"):
        self.address = address
        self.incarnation = os.urandom(16)
        self.reader = ArenaReader(str(directory))
        self.can_attach = True
        self.is_lost = False

    def hello(self, _spec, *, arena_id, arena_bytes, arena_is_on_device):
        if self.is_lost:
            raise PeerLostError("gone", node=self.address)
        found = self.reader.attach(arena_id, arena_bytes) if self.can_attach else None
        return b"" if found is None else found.nonce

    @property
    def spec(self):
        return TransferSpec(
            transfer_id=os.urandom(16), incarnation=self.incarnation, start_token=0, end_token=1, planes=()
        )


class Sender:
    """An `ArenaSource` with its own clock."""

    def __init__(self, directory):
        self.now = 0.0
        config = KvTransferConfig(
            arena_directory=str(directory), arena_bytes=1 << 20, frame_bytes=1 << 18, progress_seconds=0.4
        )
        self.source = ArenaSource(config, clock=lambda: self.now)

    def offer(self, receiver):
        return self.source.offer(receiver, receiver.spec)

    @property
    def num_arenas(self):
        return len(self.source._offered)


@pytest.fixture
def sender(tmp_path):
    sender = Sender(tmp_path)
    yield sender
    sender.source.close()


def test_a_receiver_that_could_not_attach_is_asked_again_after_a_while(sender, tmp_path):
    receiver = Receiver(tmp_path)
    receiver.can_attach = False
    assert sender.offer(receiver) is None
    receiver.can_attach = True
    sender.now += IDLE_SECONDS - 1
    assert sender.offer(receiver) is None
    sender.now += 2
    assert sender.offer(receiver) is not None


def test_the_arena_of_a_lost_receiver_is_dropped(sender, tmp_path):
    receiver = Receiver(tmp_path)
    arena = weakref.ref(sender.offer(receiver))
    assert sender.num_arenas == 1
    receiver.is_lost = True
    with pytest.raises(PeerLostError):
        sender.offer(receiver)
    gc.collect()
    assert (sender.num_arenas, arena()) == (0, None)


def test_a_restarted_receivers_arena_takes_the_place_of_the_old_one(sender, tmp_path):
    for _ in range(5):
        assert sender.offer(Receiver(tmp_path)) is not None
    assert sender.num_arenas == 1
    assert sender.offer(Receiver(tmp_path, address="127.0.0.1:2")) is not None
    assert sender.num_arenas == 2


def test_arenas_that_nothing_was_sent_to_are_dropped(sender, tmp_path):
    receivers = [Receiver(tmp_path, address=f"127.0.0.1:{number}") for number in range(4)]
    for receiver in receivers:
        sender.offer(receiver)
    sender.now += IDLE_SECONDS / 2
    sender.offer(receivers[0])
    sender.now += IDLE_SECONDS / 2
    sender.offer(receivers[0])
    assert sender.num_arenas == 1


def test_a_receiver_with_two_addresses_keeps_no_idle_arena_of_another(sender, tmp_path):
    receiver, idle = Receiver(tmp_path), Receiver(tmp_path, address="127.0.0.1:2")
    sender.offer(receiver)
    sender.offer(idle)
    sender.now += IDLE_SECONDS / 2
    receiver.address = "127.0.0.1:3"  # another router reaches it there
    sender.offer(receiver)
    sender.now += IDLE_SECONDS / 2
    sender.offer(receiver)
    assert sender.num_arenas == 1


KILLED = """
import signal, sys
from outrider.kv_transfer.arena import Arena
arena = Arena(directory=sys.argv[1], num_bytes=1 << 20, slot_bytes=1 << 18)
print(arena.arena_id.hex(), flush=True)
signal.pause()
"""


def test_files_of_killed_senders_are_swept_away_and_no_others(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        left = arena_path(str(tmp_path), bytes.fromhex(process.stdout.readline().strip()))
        os.utime(left, (OLD, OLD))
        assert sweep(str(tmp_path)) == 0, "its sender lives"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
    own = Arena(directory=str(tmp_path), num_bytes=1 << 20, slot_bytes=1 << 18)
    young, other = arena_path(str(tmp_path), b"y" * 16), tmp_path / "something-else"
    for path in (young, other):
        path.touch()
    os.utime(arena_path(str(tmp_path), own.arena_id), (OLD, OLD))
    os.utime(other, (OLD, OLD))
    Sender(tmp_path)  # a starting node sweeps
    assert not left.exists()
    assert young.exists()
    assert other.exists()
    assert arena_path(str(tmp_path), own.arena_id).exists()


def test_another_users_files_are_left_alone(tmp_path, monkeypatch):
    path = arena_path(str(tmp_path), b"o" * 16)
    path.touch()
    os.utime(path, (OLD, OLD))
    monkeypatch.setattr(arena_module.os, "geteuid", lambda: os.getuid() + 1)
    assert sweep(str(tmp_path)) == 0
    assert path.exists()
