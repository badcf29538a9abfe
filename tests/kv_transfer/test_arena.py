from __future__ import annotations

import errno
import os
import stat
import threading
import time

import pytest

from outrider.errors import PeerLostError
from outrider.kv_transfer import arena as arena_module
from outrider.kv_transfer import shared_memory
from outrider.kv_transfer.arena import HEAD_BYTES, IDLE_SECONDS, MAX_IDLE, Arena, ArenaReader, arena_path
from outrider.kv_transfer.base import CommitState, DrainState
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.inbox import Disposition
from outrider.kv_transfer.receiver_stream import ReceiverStream
from tests.support.kv_messages import decode_receiver_message, encode_slot_frame
from tests.support.waiting import wait_for


@pytest.fixture
def new_arena(tmp_path):
    arenas = []

    def make(**options):
        arenas.append(Arena(**{"directory": str(tmp_path), "num_bytes": 4 << 14, "slot_bytes": 1 << 14, **options}))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.retire()


def take(arena, owner="a sender"):
    """Takes a slot and returns its offset; None if none is free or there is no memory for one."""

    def wake():
        """Is never called."""

    has_one = arena.free_slots.take(1, wake)
    arena.free_slots.leave(wake)
    return arena.take(owner) if has_one else None


def test_what_the_sender_writes_the_receiver_reads_and_cannot_change(new_arena, tmp_path):
    arena, reader = new_arena(), ArenaReader(str(tmp_path))
    mapping = reader.attach(arena.arena_id, arena.num_bytes)
    assert mapping.nonce == arena.nonce
    arena.unlink()
    offset = take(arena)
    arena.write(offset, memoryview(b"hello"))
    view = mapping.copy(offset, 5)
    assert bytes(view) == b"hello"
    assert view.readonly
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_for_its_owner_only(new_arena, tmp_path):
    arena = new_arena()
    assert stat.S_IMODE(arena_path(str(tmp_path), arena.arena_id).stat().st_mode) == 0o600


def test_slots_are_bounded_and_come_back(new_arena):
    arena = new_arena()
    taken = [take(arena) for _ in range(4)]
    assert sorted(taken) == [HEAD_BYTES + n * (1 << 14) for n in range(4)]
    assert take(arena) is None
    before = time.monotonic()
    arena.release(taken[2])
    assert arena.free_slots.last_heard >= before, "the receiver lives"
    assert take(arena) == taken[2]


def test_memory_is_reserved_only_as_slots_are_needed(new_arena, tmp_path):
    arena = new_arena(num_bytes=64 << 20, slot_bytes=1 << 20)
    path = arena_path(str(tmp_path), arena.arena_id)
    for num_slots in (1, 2):
        take(arena)
        assert num_slots << 20 <= path.stat().st_blocks * 512 < (num_slots + 1) << 20


def test_a_full_file_system_leaves_the_slots_there_are(new_arena, monkeypatch):
    arena = new_arena(num_bytes=8 << 14)
    assert take(arena) is not None

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    assert [take(arena) for _ in range(8)] == [None] * 8
    arena.release(HEAD_BYTES)
    assert take(arena, "lost") == HEAD_BYTES
    assert take(arena) is None
    arena.quarantine("lost")
    assert arena.should_be_replaced, "there are no others"
    with pytest.raises(OSError, match="no space"):
        new_arena()


def test_no_slot_of_a_retired_arena_is_ever_given_out_again(new_arena):
    arena = new_arena()
    taken, told = [take(arena) for _ in range(arena.num_slots)], threading.Event()
    assert not arena.free_slots.take(1, told.set)
    arena.retire()
    assert told.is_set()
    arena.release(taken[0])
    with pytest.raises(PeerLostError, match="stopping"):
        arena.free_slots.take(1, told.set)


def test_the_receiver_maps_only_what_cannot_shrink_under_it(new_arena, tmp_path):
    reader = ArenaReader(str(tmp_path))
    arena = new_arena()
    assert reader.attach(arena.arena_id, arena.num_bytes - 1) is None
    assert reader.attach(arena.arena_id, 1 << 62) is None
    assert reader.attach(os.urandom(16), arena.num_bytes) is None
    linked = os.urandom(16)
    arena_path(str(tmp_path), linked).symlink_to(arena_path(str(tmp_path), arena.arena_id))
    assert reader.attach(linked, arena.num_bytes) is None
    pipe = os.urandom(16)
    os.mkfifo(arena_path(str(tmp_path), pipe))
    assert reader.attach(pipe, arena.num_bytes) is None
    assert reader.attach(arena.arena_id, arena.num_bytes) is not None


def test_a_file_of_another_user_is_not_mapped(new_arena, tmp_path, monkeypatch):
    arena, reader = new_arena(), ArenaReader(str(tmp_path))
    monkeypatch.setattr(arena_module.os, "geteuid", lambda: os.getuid() + 1)
    assert reader.attach(arena.arena_id, arena.num_bytes) is None


def test_idle_mappings_are_kept_for_the_next_transfer_but_not_too_many(new_arena, tmp_path):
    reader = ArenaReader(str(tmp_path))
    arenas = [new_arena() for _ in range(MAX_IDLE + 3)]
    for arena in arenas:
        reader.release(reader.attach(arena.arena_id, arena.num_bytes))
        arena.unlink()
    found = [reader.attach(arena.arena_id, arena.num_bytes) for arena in arenas]
    assert [mapping is not None for mapping in found] == [False] * 3 + [True] * MAX_IDLE


@pytest.fixture
def offered(monkeypatch):
    """The ids of the arenas that senders of this process have made."""
    arena_ids = []

    def make(**options):
        arena = Arena(**options)
        arena_ids.append(arena.arena_id)
        return arena

    monkeypatch.setattr(shared_memory, "Arena", make)
    return arena_ids


def test_one_arena_serves_all_transfers_to_a_process_and_a_forgotten_one_is_replaced(peers, receiver_factory, offered):
    receiver, port = receiver_factory()
    connector = Connector(KvTransferConfig(connector="shared_memory", arena_bytes=1 << 20, frame_bytes=1 << 16))

    def transfer():
        spec, sink = peers.spec(), peers.sink()
        receiver.inbox.open(spec, sink)
        sender = connector.connect(f"127.0.0.1:{port}", spec)
        for header, payload in peers.frames(spec):
            sender.put(header.region, payload)
        assert sender.connector == "shared_memory"
        sender.commit()
        assert sink.cells == peers.expected_cells(spec)

    transfer()
    transfer()
    assert len(offered) == 1
    let_a_minute_pass(receiver._readers["shared_memory"])
    transfer()
    assert len(offered) == 2
    transfer()
    assert len(offered) == 2
    connector.close()


def let_a_minute_pass(reader):
    """Makes the mapping idle for IDLE_SECONDS, after the receiver's thread has finished the last transfer."""
    (mapping,) = reader._mappings.values()

    def is_idle():
        with reader._lock:
            return mapping.num_users == 0

    wait_for(is_idle)
    mapping.idle_since -= IDLE_SECONDS


def test_a_receiver_that_could_not_be_drained_never_sees_its_slots_written_again(peers, receiver_factory, offered):
    receiver, port = receiver_factory()
    connector = Connector(
        KvTransferConfig(connector="shared_memory", arena_bytes=1 << 20, frame_bytes=1 << 16, progress_seconds=2.0)
    )
    spec, sink = peers.spec(), peers.sink()
    receiver.inbox.open(spec, sink)
    sink.gate.clear()
    sender = connector.connect(f"127.0.0.1:{port}", spec)
    region = next(peers.regions(spec))
    _, payload = peers.frame(spec, region, salt=1)  # differs from all payloads of the other transfer
    sender.put(region, payload)
    assert sink.is_writing.wait(60)
    other_spec, other_sink = peers.spec(), peers.sink()
    receiver.inbox.open(other_spec, other_sink)
    other = connector.connect(f"127.0.0.1:{port}", other_spec)
    assert sender.cancel() is DrainState.UNKNOWN  # the receiver still uses the slot
    for other_header, other_payload in peers.frames(other_spec):
        other.put(other_header.region, other_payload)  # another transfer in the arena goes on
    assert other.commit().state is CommitState.COMMITTED
    assert other_sink.cells == peers.expected_cells(other_spec)
    assert len(offered) == 1
    sink.gate.set()  # only now does the receiver read the slot
    wait_for(lambda: sink.num_writes == 1)
    sent = peers.sink()
    sent.write(region, payload)
    assert sink.cells == sent.cells
    connector.close()


def test_an_arena_with_many_quarantined_slots_is_replaced(new_arena):
    arena = new_arena()
    slots = [take(arena, owner) for owner in ("lost", "other")]
    assert not arena.should_be_replaced
    arena.quarantine("lost")
    assert arena.should_be_replaced
    arena.release(slots[0])  # the receiver answers late, but before the replacement
    assert not arena.should_be_replaced


class Breaking(ReceiverStream):
    """A stream whose arena is gone after one look, as if `break_off` had reset it in another thread."""

    _looks = 0

    @property
    def _arena(self):
        self._looks += 1
        return self.mapping if self._looks == 1 else None

    @_arena.setter
    def _arena(self, mapping):
        self.mapping, self._looks = mapping, 0


def test_a_slot_that_is_taken_while_the_stream_breaks_off_is_no_error(new_arena, tmp_path, peers, inbox):
    arena, reader, spec = new_arena(), ArenaReader(str(tmp_path)), peers.spec()
    inbox.open(spec, peers.sink())
    stream = Breaking(inbox=inbox, readers={"shared_memory": reader}, cancel=lambda: None)
    hello = peers.hello(spec, arena_id=arena.arena_id, arena_bytes=arena.num_bytes)
    welcome = decode_receiver_message(stream.handle(hello))
    assert welcome.nonce == arena.nonce
    stream._looks = 0
    (header, payload), *_ = peers.frames(spec)
    offset = take(arena)
    arena.write(offset, payload)
    ack = decode_receiver_message(stream.handle(encode_slot_frame(1, header, offset)))
    assert ack.disposition is Disposition.WRITTEN
