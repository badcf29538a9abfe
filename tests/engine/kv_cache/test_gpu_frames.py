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
from tests.support.fake_cuda_driver import fake_shared_gpu, put_caches_on_gpu
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
        rows = cache.take("k", range(1, 3), slots, cache.fence(), heads=range(1, 2))
        frame = rows.gather(cache.copies.empty(len(rows)).tensor)
        assert (frame.tensor.shape, frame.tensor.dtype) == ((2 * 55 * 16 * 2,), torch.uint8)
        assert [line for line in log if line.startswith("host")] == OWN_WAITS[:1]
        cache.write("v", range(1, 3), slots, frame, heads=range(1))
        with pytest.raises(InternalError, match="3520 bytes instead of 7040"):
            cache.write("v", range(1, 3), slots, frame)
    assert [line for line in log if line.startswith("host")] == OWN_WAITS[:1] + OWN_WAITS


@pytest.mark.parametrize("heads", [range(3), range(1, 3), range(2, 3)])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frames_are_the_same_whether_or_not_rows_divide_into_words(monkeypatch, tmp_path, dtype, head_dim, heads):
    planes = [PlaneSpec(name, 3, 3, head_dim, dtype) for name in ("k", "v")]
    simple = PagedKVCache(planes, num_blocks=4, block_size=16)
    put_caches_on_gpu(fake_shared_gpu(monkeypatch, tmp_path)[0], monkeypatch)
    cache = PagedKVCache(planes, num_blocks=4, block_size=16)
    layers, slots = range(1, 3), np.array([5, 40, 6, 63])
    payload = np.random.default_rng(1).integers(0, 256, 2 * 4 * len(heads) * planes[0].bytes_per_head, dtype=np.uint8)
    for each in (simple, cache):
        each.write("k", layers, slots, payload.data, heads=heads)
    assert all(
        torch.equal(*(layer.view(torch.uint8) for layer in pair)) for pair in zip(simple.keys, cache.keys, strict=True)
    )
    rows = cache.take("k", layers, slots, cache.fence(), heads=heads)
    taken = rows.gather(cache.copies.empty(len(rows)).tensor)
    assert taken.to_host() == cache.read("k", layers, slots, heads=heads).tobytes() == payload.tobytes()
