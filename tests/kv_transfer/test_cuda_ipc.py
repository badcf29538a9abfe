"""KV by CUDA IPC, with a fake driver: which memory is shared, for how long, and what happens if that fails."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from outrider.errors import ConfigError, NotSupportedError
from outrider.kv_transfer.arena import HEAD_BYTES, IDLE_SECONDS, ArenaReader, arena_path
from outrider.kv_transfer.base import CommitState, FrameHeader
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.cuda_ipc import (
    LAZY_ENABLE_PEER_ACCESS,
    DeviceArena,
    DeviceArenaReader,
    SharedGpu,
    open_shared_gpu,
)
from outrider.kv_transfer.inbox import Disposition
from outrider.kv_transfer.receiver_stream import ReceiverStream
from tests.kv_transfer.conftest import Peers
from tests.support.kv_messages import decode_receiver_message, encode_slot_frame
from tests.support.waiting import wait_for

torch = pytest.importorskip("torch")
tensor_planes = pytest.importorskip("outrider.engine.kv_cache.tensor_planes")
fake_cuda_driver = pytest.importorskip("tests.support.fake_cuda_driver")

SIZES = {"arena_bytes": 1 << 20, "device_arena_bytes": 1 << 20, "frame_bytes": 1 << 16, "device_frame_bytes": 1 << 16}


@pytest.fixture
def gpu_and_driver(monkeypatch, tmp_path):
    return fake_cuda_driver.fake_shared_gpu(monkeypatch, tmp_path)


@pytest.fixture
def gpu(gpu_and_driver):
    return gpu_and_driver[0]


@pytest.fixture
def driver(gpu_and_driver):
    return gpu_and_driver[1]


@dataclass
class Pair:
    peers: Peers
    receiver: Any
    port: int
    connector: Connector

    def transfer(self):
        """Pushes a whole transfer, and returns the name of the connector that carried it."""
        spec, sink = self.peers.spec(), self.peers.sink()
        self.receiver.inbox.open(spec, sink)
        sender = self.connector.connect(f"127.0.0.1:{self.port}", spec)
        for header, payload in self.peers.frames(spec):
            sender.put(
                header.region,
                fake_cuda_driver.device_rows(self.connector.gpu, payload)
                if sender.connector == "cuda_ipc"
                else payload,
            )
        assert sender.commit().state is CommitState.COMMITTED
        assert sink.cells == self.peers.expected_cells(spec)
        assert self.peers.completed[spec.transfer_id].connector == sender.connector
        return sender.connector

    def reader(self):
        return self.receiver._readers["cuda_ipc"]


@pytest.fixture
def pair(peers, receiver_factory, gpu):
    connectors = []

    def make(sender_gpu=gpu, receiver_gpu=gpu, **options):
        receiver, port = receiver_factory(gpu=receiver_gpu)
        connector = Connector(KvTransferConfig(**SIZES, **options), gpu=sender_gpu)
        connector.gpu = sender_gpu
        connectors.append(connector)
        return Pair(peers, receiver, port, connector)

    yield make
    for connector in connectors:
        connector.close()


def test_auto_uses_cuda_ipc_where_both_caches_are_on_a_gpu_and_shared_memory_where_one_is_not(pair, gpu):
    assert pair().transfer() == "cuda_ipc"
    assert pair(sender_gpu=None).transfer() == "shared_memory"
    assert pair(receiver_gpu=None).transfer() == "shared_memory"
    with pytest.raises(NotSupportedError, match="cannot attach by cuda_ipc"):
        pair(receiver_gpu=None, connector="cuda_ipc").transfer()


def test_one_arena_serves_all_transfers_and_is_unmapped_when_it_has_been_idle(pair, driver):
    transfers = pair()
    assert [transfers.transfer() for _ in range(3)] == ["cuda_ipc"] * 3
    assert (driver.num_allocated, driver.num_mapped) == (1, 1)
    reader = transfers.reader()
    (mapping,) = reader._mappings.values()
    wait_for(lambda: not mapping.num_users)
    mapping.idle_since -= IDLE_SECONDS
    mapping = None
    reader.attach(b"n" * 16, 1 << 20)  # another transfer begins
    gc.collect()
    assert driver.num_mapped == 0


@pytest.mark.parametrize("failing", ["cuMemAlloc", "cuIpcOpenMemHandle"])
def test_memory_that_cannot_be_had_or_mapped_leaves_shared_memory_with_a_warning(pair, driver, failing):
    driver.fails.add(failing)
    transfers = pair()
    with capture_logs() as logs:
        assert [transfers.transfer() for _ in range(3)] == ["shared_memory"] * 3
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert failing in warning["error"]


def test_a_receiver_warns_once_of_memory_that_it_cannot_map(gpu, driver, tmp_path):
    driver.fails.add("cuIpcOpenMemHandle")
    reader = DeviceArenaReader(gpu, str(tmp_path))
    with capture_logs() as logs:
        for _ in range(3):
            arena = new_arena(gpu, tmp_path)
            assert reader.attach(arena.arena_id, arena.num_bytes) is None
    assert [line["log_level"] for line in logs] == ["warning"]


def test_a_gpu_that_reads_other_bytes_than_were_written_is_not_used(pair, monkeypatch, driver):
    """This happens between GPUs of a machine whose IOMMU redirects transfers between them."""
    monkeypatch.setattr(driver, "cuIpcOpenMemHandle", lambda *_: driver.cuMemAlloc(2 << 20))
    with capture_logs() as logs:
        assert pair().transfer() == "shared_memory"
    assert "not the one that was written" in logs[0]["error"]


def new_arena(gpu, directory):
    return DeviceArena(gpu, KvTransferConfig(arena_directory=str(directory), **SIZES))


def test_the_file_names_the_memory_and_holds_no_slots(gpu, tmp_path):
    arena = new_arena(gpu, tmp_path)
    path = arena_path(str(tmp_path), arena.arena_id)
    assert (path.stat().st_blocks * 512, path.stat().st_mode & 0o777) == (HEAD_BYTES, 0o600)
    assert arena.num_bytes == HEAD_BYTES + 16 * (1 << 16)
    reader = DeviceArenaReader(gpu, str(tmp_path))
    assert reader.attach(arena.arena_id, arena.num_bytes - 1) is None
    mapping = reader.attach(arena.arena_id, arena.num_bytes)
    assert mapping.nonce == arena.nonce
    payload = bytes(range(256)) * 8
    offset = arena.take("owner")
    written = arena.write(offset, fake_cuda_driver.device_rows(gpu, payload))
    assert written.tensor.numpy().tobytes() == payload
    assert mapping.copy(offset, len(payload)).tensor.numpy().tobytes() == payload
    for lie in (0, HEAD_BYTES - 1, arena.num_bytes - len(payload) + 1):
        assert mapping.copy(lie, len(payload)) is None
    arena_path(str(tmp_path), b"s" * 16).write_bytes(b"short")
    assert reader.attach(b"s" * 16, arena.num_bytes) is None


def test_a_frame_is_gathered_in_its_slot_without_another_copy_or_wait(gpu, driver, monkeypatch, tmp_path):
    arena = new_arena(gpu, tmp_path)
    driver.fails.add("cuMemcpyDtoDAsync")
    monkeypatch.setattr(tensor_planes.CopyStream, "wait", lambda _: pytest.fail("a second wait"))
    offset = arena.take("owner")
    written = arena.write(offset, fake_cuda_driver.device_rows(gpu, bytes(range(64))))
    assert written.tensor.data_ptr() == arena._memory.data_ptr() + offset
    assert written.checksum() == fake_cuda_driver.device_bytes(gpu, bytes(range(64))).checksum()


def test_a_receiver_of_an_older_version_does_not_take_it_for_shared_memory(gpu, tmp_path):
    """Older versions do not read `arena_is_on_device`."""
    arena = new_arena(gpu, tmp_path)
    found = ArenaReader(str(tmp_path)).attach(arena.arena_id, arena.num_bytes)
    assert found is None or found.nonce != arena.nonce


def test_memory_is_lent_again_unless_a_receiver_may_still_read_of_it(gpu, driver, tmp_path):
    """The memory is never freed, because the driver does not allow that while another process may have it mapped."""
    first = new_arena(gpu, tmp_path)
    first.release(first.take("done"))
    del first
    second = new_arena(gpu, tmp_path)
    assert driver.num_allocated == 1
    reader = DeviceArenaReader(gpu, str(tmp_path))
    assert reader.attach(second.arena_id, second.num_bytes) is not None
    second.take("lost")
    second.quarantine("lost")
    del second
    gc.collect()
    third = new_arena(gpu, tmp_path)
    assert driver.num_allocated == 2
    reader.close()  # the receiver has unmapped the memory, so it reads no more
    gc.collect()
    fourth = new_arena(gpu, tmp_path)
    assert driver.num_allocated == 2
    for arena in (third, fourth):
        arena.unlink()


def test_memory_that_torch_does_not_see_is_not_used_and_kept_for_once(pair, driver, monkeypatch):
    """A tensor that was a copy of the memory would get the frames in place of the memory that receivers read."""
    tensor_at = tensor_planes.CopyStream.tensor_at
    transfers = pair()
    monkeypatch.setattr(tensor_planes.CopyStream, "tensor_at", lambda *arguments: tensor_at(*arguments).clone())
    with capture_logs() as logs:
        assert transfers.transfer() == "shared_memory"
    assert "not the one that was written" in logs[0]["error"]
    gc.collect()

    def refuse(*_arguments):
        raise RuntimeError("torch refuses")

    monkeypatch.setattr(tensor_planes.CopyStream, "tensor_at", refuse)
    others = pair()
    with capture_logs() as logs:
        assert others.transfer() == "shared_memory"
    assert [line["error"] for line in logs] == ["torch refuses"]
    assert driver.num_allocated == 1


def test_memory_without_a_handle_is_freed(gpu, driver):
    """No process can have mapped it. Kept memory would add up, since receivers are offered an arena every minute."""
    driver.fails.add("cuIpcGetMemHandle")
    with pytest.raises(OSError, match="cuIpcGetMemHandle"):
        gpu.allocate(1 << 20)
    assert (driver.num_allocated, driver.num_freed) == (1, 1)


def test_what_was_altered_in_a_slot_is_not_written(peers, inbox, gpu, tmp_path):
    """The same holds for a slot that is read before it was written."""
    spec, sink = peers.spec(), peers.sink()
    inbox.open(spec, sink)
    arena = new_arena(gpu, tmp_path)
    readers = {"cuda_ipc": DeviceArenaReader(gpu, str(tmp_path))}
    stream = ReceiverStream(inbox=inbox, readers=readers, cancel=lambda: None)
    offer = {"arena_id": arena.arena_id, "arena_bytes": arena.num_bytes, "arena_is_on_device": True}
    assert decode_receiver_message(stream.handle(peers.hello(spec, **offer))).nonce == arena.nonce
    (header, payload), *_ = peers.frames(spec)
    taken = fake_cuda_driver.device_bytes(gpu, payload)
    header = FrameHeader.of(spec, header.region, taken)
    offset = arena.take(spec)
    message = encode_slot_frame(1, header, offset)
    assert decode_receiver_message(stream.handle(message)).disposition is Disposition.CORRUPT
    arena.write(offset, fake_cuda_driver.device_rows(gpu, payload))
    assert decode_receiver_message(stream.handle(message)).disposition is Disposition.WRITTEN
    assert sink.num_writes == 1


def test_the_checksum_is_a_sum_in_any_order_and_changes_with_each_byte(gpu):
    payload = torch.randint(0, 256, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    checksum = tensor_planes.DeviceBytes(payload, gpu.copies).checksum()
    words = [int.from_bytes(bytes(payload[at : at + 8].tolist()).ljust(8, b"\0"), "little") for at in range(0, 1003, 8)]
    assert checksum == sum(word * (2 * at + 1) for at, word in enumerate(words)) % 2**64
    for at in range(0, 1003, 59):
        other = payload.clone()
        other[at] += 1
        assert tensor_planes.DeviceBytes(other, gpu.copies).checksum() != checksum
    exchanged = torch.cat([payload[8:16], payload[:8], payload[16:]])
    assert tensor_planes.DeviceBytes(exchanged, gpu.copies).checksum() != checksum
    assert tensor_planes.DeviceBytes(payload[:0], gpu.copies).checksum() == 0


@pytest.mark.parametrize(("connector", "is_wanted"), [("auto", False), ("grpc", False), ("cuda_ipc", True)])
def test_caches_that_are_not_on_one_gpu_share_none_of_its_memory(connector, is_wanted):
    config = KvTransferConfig(connector=connector)
    if is_wanted:
        with pytest.raises(ConfigError, match=r"kv_transfer.connector is cuda_ipc, but the KV cache is not on a GPU"):
            open_shared_gpu(None, config)
    else:
        assert open_shared_gpu(None, config) is None


@pytest.fixture
def bindings(monkeypatch):
    """Returns a function that replaces the module `cuda.bindings`."""

    def put(driver):
        package, module = ModuleType("cuda"), ModuleType("cuda.bindings")
        monkeypatch.setitem(sys.modules, "cuda", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings", module)
        if driver is not None:
            module.driver = driver

    return put


def test_a_cache_on_a_gpu_opens_the_driver_that_torch_brings(gpu, driver, bindings):
    bindings(driver)
    opened = open_shared_gpu(gpu.copies, KvTransferConfig())
    assert isinstance(opened, SharedGpu)


def test_without_the_drivers_bindings_there_is_one_warning_and_another_connector(gpu, bindings):
    bindings(None)
    with capture_logs() as logs:
        assert open_shared_gpu(gpu.copies, KvTransferConfig()) is None
    assert [line["event"] for line in logs] == ["no CUDA IPC"]
    with pytest.raises(ConfigError, match=r"cuda_ipc, but .*: choose auto"):
        open_shared_gpu(gpu.copies, KvTransferConfig(connector="cuda_ipc"))


def test_the_fake_driver_has_what_the_real_one_has():
    real = pytest.importorskip("cuda.bindings.driver", reason="comes with torch for CUDA")
    functions = [name for name in vars(fake_cuda_driver.FakeCudaDriver) if name.startswith("cu")]
    assert len(functions) == 9
    assert all(callable(getattr(real, name)) for name in functions)
    handle = real.CUipcMemHandle()
    handle.reserved = bytes(range(64))
    assert bytes(handle.reserved) == bytes(range(64))
    assert real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == LAZY_ENABLE_PEER_ACCESS
    assert int(real.CUresult.CUDA_SUCCESS) == 0
    assert real.CUresult.CUDA_ERROR_INVALID_HANDLE.name == "CUDA_ERROR_INVALID_HANDLE"
