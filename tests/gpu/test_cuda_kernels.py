"""Our Triton kernels on a GPU, and the hand-off to and from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from tests.oracle.random_steps import Pair, random_known

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("vocab_size", [1, 64, 65, 5000, 49_152, 151_936])
def test_decisions_are_those_of_the_oracle(vocab_size):
    """Tests edits, filters and the race with parameters, histories, drafts and logits of every shape."""
    rng = np.random.default_rng(vocab_size)
    for _ in range(20 if vocab_size <= 5000 else 2):
        Pair(vocab_size, random_known(rng, vocab_size), device="cuda").check_random_step(rng, num_sequences=8)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(dtype):
    from outrider.engine.gpu_kernels.decoder import Norm, rms_norm
    from outrider.engine.gpu_kernels.layers import linear

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((300, 4096), generator=generator).to("cuda", dtype)
    weight = torch.randn((1000, 4096), generator=generator).to("cuda", dtype)
    norm = Norm(torch.ones(4096, device="cuda"), 1e-5)
    product, normed = linear(rows, weight, None), rms_norm(rows, norm)
    expected = rows.double() @ weight.double().T
    assert float((product.double() - expected).abs().max() / expected.abs().max()) < (
        1e-5 if dtype.itemsize == 4 else 8e-3
    )
    for part in (slice(0, 1), slice(7, 12), slice(200, 265)):
        assert torch.equal(linear(rows[part].contiguous(), weight, None), product[part])
        assert torch.equal(rms_norm(rows[part].contiguous(), norm), normed[part])


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("cpu", "cpu"),
        *(pytest.param(*pair, marks=on_gpu) for pair in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda"))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frames_arrive_as_they_were(sender, receiver, dtype):
    planes = [PlaneSpec(name, 3, 2, 16, dtype) for name in ("k", "v")]
    caches = [PagedKVCache(planes, num_blocks=6, block_size=16, device=device) for device in (sender, receiver)]
    generator = torch.Generator().manual_seed(1)
    for layer in (*caches[0].keys, *caches[0].values):
        layer.normal_() if sender == "cuda" else layer.normal_(generator=generator)
    slots, others = np.arange(5, 60), np.arange(30, 85)
    for plane in ("k", "v"):
        frame = caches[0].read(plane, range(1, 3), slots)
        caches[1].write(plane, range(1, 3), others, memoryview(frame))
        assert caches[1].read(plane, range(1, 3), others).tobytes() == frame.tobytes()
    assert not caches[1].keys[0].any()
