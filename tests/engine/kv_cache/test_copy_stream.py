"""What the host waits for in copies that run concurrently with a GPU's forwards. Here, all values are on the CPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from outrider.engine.kv_cache import tensor_planes
from outrider.engine.kv_cache.tensor_planes import CopyStream
from tests.support.fake_gpu import fake_streams


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(tensor_planes, "empty_page_locked", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    return fake_streams(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_are_gathered_and_scattered(log, dtype):
    copies = CopyStream(torch.device("cpu"))
    rows, others = torch.randn((3, 20, 8)).to(dtype), torch.zeros((3, 20, 8), dtype=dtype)
    taken, placed = torch.tensor([3, 17, 4]), torch.tensor([9, 0, 10])
    frame = copies.gather(rows, taken, copies.fence())
    assert torch.equal(frame, rows[:, taken])
    payload = frame.view(torch.uint8).reshape(-1).numpy()
    payload.flags.writeable = False  # read-only, like a received message
    copies.scatter(others, placed, payload, copies.fence())
    assert torch.equal(others[:, placed], frame)
    assert int(others.count_nonzero()) <= frame.numel()


def test_a_frame_is_read_after_its_layers_and_beside_the_next(log):
    copies = CopyStream(torch.device("cpu"))
    written = copies.fence()
    log.append("later layers are queued")
    copies.gather(torch.zeros((1, 4, 2)), torch.tensor([1]), written)
    assert log == [
        "event in default",
        "later layers are queued",
        "host waits for default",
        "event in copies",
        "host waits for copies",
    ]


def test_frames_are_written_behind_what_was_queued_when_their_blocks_were_reserved(log):
    """Frames do not wait for steps that were queued after the reservation."""
    copies = CopyStream(torch.device("cpu"))
    reserved = copies.fence()
    log.append("a step is queued")
    for slot in (1, 2):
        copies.scatter(torch.zeros((1, 4, 2)), torch.tensor([slot]), np.zeros(8, dtype=np.uint8), reserved)
    written = ["host waits for default", "event in copies", "host waits for copies"]
    assert log == ["event in default", "a step is queued", *written, *written]


def test_a_copy_that_waits_for_a_running_step_holds_up_no_other(log):
    """A read of features waits for the running step, while the KV of other prompts arrives."""
    copies, is_over = CopyStream(torch.device("cpu")), threading.Event()
    reserved, now = copies.fence(), copies.fence()
    now.synchronize = is_over.wait
    rows = torch.zeros((1, 4, 2))
    reader = threading.Thread(target=copies.gather, args=(rows, torch.tensor([1]), now))
    reader.start()
    copies.scatter(rows, torch.tensor([2]), np.full(8, 64, dtype=np.uint8), reserved)
    assert reader.is_alive()
    assert int(rows.count_nonzero()) == 2
    is_over.set()
    reader.join()
    assert log[-2:] == ["event in copies", "host waits for copies"]
