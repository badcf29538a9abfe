"""Blocks of a GPU's cache go to page-locked memory and come back, in the order of the work that is queued."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.device_copies import DeviceBlockCopies
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec

pytestmark = pytest.mark.gpu

PLANES = (*(PlaneSpec(name, 8, 4, 64, "bfloat16") for name in ("k", "v")), PlaneSpec("feature-x", 1, 1, 64, "bfloat16"))
BLOCK, NUM_BLOCKS, NUM_SLOTS = 16, 32, 40


def test_blocks_keep_what_was_queued_before_and_after():
    cache = PagedKVCache(PLANES, num_blocks=NUM_BLOCKS, block_size=BLOCK, device="cuda:0")
    block_bytes = BLOCK * sum(plane.bytes_per_token for plane in PLANES)
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=64)
    copies = DeviceBlockCopies(cache, (NUM_SLOTS + 1) * block_bytes, price)
    square = torch.randn((4096, 4096), device="cuda:0")
    tensors = [layer for plane in PLANES for layer in cache.layers(plane.name)]
    for number in range(3 * NUM_SLOTS):
        slot, block_id = number % NUM_SLOTS, number % NUM_BLOCKS
        torch.mm(square, square)  # the device is behind the host
        for tensor in tensors:
            tensor[block_id].fill_(number)
        copies.save(0, block_id, slot)
        for tensor in tensors:
            tensor[block_id].zero_()
        copies.load(0, (block_id + 1) % NUM_BLOCKS, slot)
        found = [tensor[(block_id + 1) % NUM_BLOCKS].clone() for tensor in tensors]
        for tensor in tensors:
            tensor[(block_id + 1) % NUM_BLOCKS].zero_()
        if number % 10 == 0:
            assert all(bool((each == number).all()) for each in found)
    copies.measure(0, 0)
    copies.finish()
    assert "inf" not in str(price).partition(", compute")[0]
