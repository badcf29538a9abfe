"""Frames of a cache on a simulated GPU: on which device they are, and where the host waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from outrider.engine.kv_cache import tensor_planes
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import InternalError
from tests.support.fake_gpu import GPU, OneDevice, fake_gpu, fake_streams

OWN_WAITS = ["host waits for default", "host waits for copies"]
"""What the host waits for when it copies: the copy's fence, then the copy's end."""


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch):
        yield


def test_a_frame_of_the_hand_off_waits_for_its_own_fence_and_copy_only(gpu, monkeypatch):
    def page_locked(shape, dtype):
        with unset_fake_temporarily():  # a real tensor, since numpy reads and writes it
            return torch.empty(tuple(shape), dtype=dtype).pin_memory()

    monkeypatch.setattr(tensor_planes, "empty_page_locked", page_locked)
    log = fake_streams(monkeypatch)
    planes = [PlaneSpec(name, 3, 2, 16, "bfloat16") for name in ("k", "v")]
    cache = PagedKVCache(planes, num_blocks=6, block_size=16, device=str(GPU))
    with unset_fake_temporarily():
        slots = np.arange(5, 60)
    with OneDevice(takes_frames=True):
        plane = cache._planes["k"]
        frame = plane._copies.gather(plane.rows(range(1, 3), range(2)), slots, cache.fence())
        assert (frame.shape, frame.device.type) == ((2, 55, 2 * 16), "cpu")
        cache.write("v", range(1, 3), slots, bytes(2 * 55 * 2 * 16 * 2))
    assert [line for line in log if line.startswith("host")] == OWN_WAITS * 2


def test_a_frame_that_stays_on_the_gpu_never_comes_to_the_host(gpu, monkeypatch):
    log = fake_streams(monkeypatch)
    planes = [PlaneSpec(name, 3, 2, 16, "bfloat16") for name in ("k", "v")]
    cache = PagedKVCache(planes, num_blocks=6, block_size=16, device=str(GPU))
    with unset_fake_temporarily():
        slots = np.arange(5, 60)
    with OneDevice():
        frame = cache.take("k", range(1, 3), slots, cache.fence(), heads=range(1, 2))
        assert (frame.tensor.shape, frame.tensor.dtype) == ((2 * 55 * 16 * 2,), torch.uint8)
        assert [line for line in log if line.startswith("host")] == OWN_WAITS[:1]
        cache.write("v", range(1, 3), slots, frame, heads=range(1))
        with pytest.raises(InternalError, match="3520 bytes instead of 7040"):
            cache.write("v", range(1, 3), slots, frame)
    assert [line for line in log if line.startswith("host")] == OWN_WAITS[:1] + OWN_WAITS
