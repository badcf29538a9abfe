"""Rotary embedding in place, and the copies of keys and values into the cache."""

from __future__ import annotations

import pytest
import torch

from tests.engine.cpu_kernels.operations import bits, differing_rows, rope, rounding_of, write_cache

DTYPES = [torch.float32, torch.bfloat16]
HEAD_DIMS = [16, 32, 48, 64, 80, 96, 128]


def tables(head_dim, num_positions=3000):
    """Cosines and sines, each [num_positions, head_dim / 2] float32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(num_positions).double().unsqueeze(1) * frequencies
    return angles.cos().float(), angles.sin().float()


def rows(dtype, num_rows, num_heads, head_dim):
    return torch.randn((num_rows, num_heads, head_dim), generator=torch.Generator().manual_seed(head_dim)).to(dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_the_first_heads_are_rotated_by_the_position(kernels, dtype, head_dim):
    x = rows(dtype, 5, 7, head_dim)
    positions = torch.tensor([0, 1, 2, 777, 2999])
    cosines, sines = tables(head_dim)
    actual = rope(kernels, x, 4, positions, cosines, sines)
    assert torch.equal(bits(actual[:, 4:]), bits(x[:, 4:]))  # values, which keep where they are
    low, high = x[:, :4].double().chunk(2, dim=-1)
    cosine, sine = (table[positions].double().unsqueeze(1) for table in (cosines, sines))
    expected = torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
    magnitude = torch.cat([(low * cosine).abs() + (high * sine).abs(), (high * cosine).abs() + (low * sine).abs()], -1)
    allowed = rounding_of(dtype) * expected.abs() + 4 * 2.0**-24 * magnitude
    assert bool(((actual[:, :4].double() - expected).abs() <= allowed * 1.01).all())


def test_a_rotation_by_another_position_would_be_noticed(kernels):
    x = rows(torch.float32, 1, 1, 64)
    cosines, sines = tables(64)
    first, second = (rope(kernels, x, 1, torch.tensor([position]), cosines, sines) for position in (10, 11))
    assert float((first - second).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kernels, dtype):
    x, positions, (cosines, sines) = rows(dtype, 40, 3, 48), torch.arange(100, 140), tables(48)
    alone = [rope(kernels, x[[row]], 3, positions[[row]], cosines, sines) for row in range(40)]
    assert differing_rows(rope(kernels, x, 3, positions, cosines, sines), torch.cat(alone)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_go_to_their_slots_and_nothing_else_is_touched(kernels, dtype):
    projected = rows(dtype, 6, 9, 32)  # 3 query heads, 3 key heads, 3 value heads
    slots = torch.tensor([40, 3, 0, 17, 18, 63])
    keys, values = (torch.full((64, 3, 32), float("nan"), dtype=dtype) for _ in range(2))
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[slots], expected_values[slots] = projected[:, 3:6], projected[:, 6:9]
    write_cache(kernels, projected, 3, slots, keys, values)
    assert torch.equal(bits(keys), bits(expected_keys))
    assert torch.equal(bits(values), bits(expected_values))
    assert bool(keys[untouched].isnan().all())
