from __future__ import annotations

import pytest
import torch

from draft_node.held_sequences import HeldFeatures
from outrider.engine.kv_cache.tensor_planes import tensor_of
from outrider.node import FeatureFormat

WIDTH = 3


def rows_of(dtype: torch.dtype, num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens * WIDTH).view(num_tokens, WIDTH).to(dtype) / 7


def payload_of(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_comes_in_pieces_that_overlap_is_read_bit_by_bit(dtype):
    rows = rows_of(getattr(torch, dtype), 8)
    held = HeldFeatures(FeatureFormat(fingerprint="a", width=WIDTH, dtype=dtype))
    for start, end in ((0, 0), (0, 3), (2, 5), (1, 4), (5, 8)):
        held.extend(start, payload_of(rows[start:end]))
    assert len(held) == 8
    assert torch.equal(tensor_of(held.read(0, 8)), rows)
    assert torch.equal(tensor_of(held.read(3, 5)), rows[3:5])
    assert held.read(4, 4).shape == (0, WIDTH)
