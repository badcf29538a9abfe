"""In which order a GPU's streams copy blocks to and from main memory. Here, all values are on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.device_copies import NUM_STAGED, DeviceBlockCopies
from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec

PLANES = (PlaneSpec("k", 2, 1, 4, "bfloat16"), PlaneSpec("feature-x", 1, 1, 4, "bfloat16"))
BLOCK, NUM_BLOCKS = 4, 5


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        if event.place:
            self.log.append(f"{self.name} waits for {event.place}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")


class Event:
    """An event whose work has ended. Each timer lasts until a millisecond after the one before."""

    num_made = 0

    def __init__(self, *, enable_timing=False):
        self.is_timer, self.place = enable_timing, ""
        Event.num_made += enable_timing
        self.number = Event.num_made

    def record(self, stream):
        assert not self.is_timer or stream.name == "copies"
        stream.log.extend([] if self.is_timer else [f"used on {stream.name}"])
        self.place = f"use on {stream.name}"

    def query(self):
        return True

    def elapsed_time(self, other):
        return float(other.number - self.number)


@pytest.fixture
def log(monkeypatch):
    log = []
    default = Stream(log, "forwards")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(log, "copies"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: default)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    class InStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(f"on {self.stream.name}:")

        def __exit__(self, *_error):
            log.append("end")

    monkeypatch.setattr(torch.cuda, "stream", InStream)
    register = SimpleNamespace(cudaHostRegister=lambda _address, num_bytes, _flags: log.append(num_bytes) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: register)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None if code == 0 else pytest.fail("not registered"))
    return log


@pytest.fixture
def cache():
    tensors = {plane.name: torch.randn((plane.num_layers, NUM_BLOCKS, BLOCK, 1, 4)).bfloat16() for plane in PLANES}
    return SimpleNamespace(
        planes=PLANES,
        layer_groups=(LayerGroup((0, 1)),),
        num_blocks=NUM_BLOCKS,
        window_blocks=(),
        block_size=BLOCK,
        device="cpu",
        block=lambda plane, block_id: tensors[plane][:, block_id],
        tensors=tensors,
    )


def test_blocks_come_back_in_all_planes_and_layers(log, cache):
    copies = DeviceBlockCopies(cache, 1000, CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64))
    assert log == [rows.nbytes for rows in copies.rows]
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    copies.save(0, 1, 0)
    copies.save(0, 2, 3)
    for tensor in cache.tensors.values():
        tensor.zero_()
    copies.load(0, 4, 0)
    copies.load(0, 0, 3)
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor[:, [4, 0]], before[name][:, [1, 2]])
        assert not tensor[:, 1:4].any()
    copies.measure(0, 4)
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor[:, 4], before[name][:, 1])


def test_a_block_leaves_after_what_wrote_it_and_arrives_before_what_reads_it(log, cache):
    copies = DeviceBlockCopies(cache, 1000, CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64))
    log.clear()
    copies.save(0, 1, 0)
    assert log == ["copies waits for forwards", "on copies:", "end", "used on copies"]
    log.clear()
    copies.load(0, 1, 0)
    assert log == ["on copies:", "end", "forwards waits for copies", "used on forwards"]


def test_work_that_is_queued_later_does_not_change_what_was_saved(log, cache, monkeypatch):
    """The gathered values are copies, also of a plane of one layer, whose blocks are contiguous."""
    copies = DeviceBlockCopies(cache, 1000, CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64))
    late = []
    real = torch.Tensor.copy_

    def later(*args, **options):
        return late.append((args, options)) if options else real(*args)

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    copies.save(0, 1, 0)
    monkeypatch.setattr(torch.Tensor, "copy_", real)
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    for tensor in cache.tensors.values():
        tensor.zero_()
    for args, options in late:
        assert options == {"non_blocking": True}
        real(*args)
    copies.load(0, 2, 0)
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor[:, 2], before[name][:, 1])


def test_copies_are_timed_by_the_device(log, cache):
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64)
    copies = DeviceBlockCopies(cache, 1000, price)
    copies.measure(0, 0)
    assert "host waits for copies" not in log  # a price may be measured while forwards are queued
    copies.finish()
    assert str(price) == "save 1.000 ms, load 1.000 ms, compute inf ms"
    assert log[-1] == "host waits for copies"


def test_gpu_memory_for_copies_is_bounded(log, cache, monkeypatch):
    """However many copies wait behind a forward: the device waits until a part of it has been used."""
    copies = DeviceBlockCopies(cache, 10_000, CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64))
    for name in ("clone", "to"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_args, **_options: pytest.fail("allocates"))
    for slot in range(NUM_STAGED):
        copies.save(0, 1, slot)
    log.clear()
    copies.load(0, 1, 0)
    copies.save(0, 1, 0)
    assert log[0] == "copies waits for use on copies"
    assert "forwards waits for use on copies" in log
    for _ in range(NUM_STAGED - 2):
        copies.load(0, 1, 0)
    log.clear()
    copies.load(0, 1, 0)
    assert log[0] == "copies waits for use on forwards"


def test_a_group_without_layers_takes_no_memory(log, cache):
    """As the first group of a model whose layers all have a sliding window."""
    cache.planes = tuple(replace(plane, window=8) for plane in PLANES)
    cache.layer_groups, cache.window_blocks = (LayerGroup(()), LayerGroup((0, 1), window=8)), (NUM_BLOCKS,)
    price = CopyPrice(block_size=BLOCK, num_groups=2, max_rows=64)
    copies = DeviceBlockCopies(cache, 1000, price)
    assert log == [copies.rows[1].nbytes]
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    for group in range(2):
        copies.measure(group, 1)
    copies.finish()
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors.items())
    assert "inf" not in str(price).partition(", compute")[0]
