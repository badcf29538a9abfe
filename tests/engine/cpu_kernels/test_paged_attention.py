"""The native kernel on every path: borders of spans and panels, head sizes, and equal bits of a row in any batch.

Tests for all backends are in tests/contract/test_attention_backends.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.planes import stored_vectors
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS, REAL_PATHS, with_few_for_tests
from tests.engine.cpu_kernels.operations import assert_within, differing_rows, paged_attention, rounding_of

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = 2.0**-24
HEAD_DIMS = [16, 32, 48, 64, 80, 96, 128]
BORDERS = [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 2000]


@dataclass(frozen=True)
class Heads:
    head_dim: int = 32
    num_kv_heads: int = 2
    group: int = 2
    latent_dim: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class Cache:
    """Keys and values of some sequences, scattered over blocks; NaN in slots without a token."""

    def __init__(
        self, lengths: Sequence[int], heads: Heads, dtype: torch.dtype, *, block_size: int = 16, seed: int = 0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.keys, self.values = [], []
        tables = [-(-length // block_size) for length in lengths]
        shuffled = torch.randperm(sum(tables) + 3, generator=torch.Generator().manual_seed(block_size + seed)).tolist()
        self.tables = [[shuffled.pop() for _ in range(count)] for count in tables]
        shape = (sum(tables) + 3, block_size, heads.num_kv_heads)
        self.key_cache, self.value_cache = (
            torch.full((*shape, width), float("nan"), dtype=dtype)
            for _, width in stored_vectors(heads.head_dim, heads.latent_dim)
        )
        self.queries = []
        for length, table in zip(lengths, self.tables, strict=True):
            for tokens, cache in ((self.keys, self.key_cache), (self.values, self.value_cache)):
                own = torch.randn((length, *cache.shape[2:]), generator=generator).to(dtype)
                tokens.append(own)
                for index, block in enumerate(table):
                    part = own[index * block_size : (index + 1) * block_size]
                    cache[block, : len(part)] = part
            self.queries.append(torch.randn((length, heads.num_heads, heads.head_dim), generator=generator).to(dtype))
        if heads.latent_dim:
            self.keys = [torch.cat(each, -1) for each in zip(self.values, self.keys, strict=True)]

    def attend(self, kernels, parts, options, *, workspace=None) -> Tensor:
        """Returns a batch's output: [num_rows, num_heads, head_dim]. `parts`: (sequence, rows, tokens before them)."""
        batch = build_input_batch(
            [SequenceRows([0] * rows, before, self.tables[seq], 1) for seq, rows, before in parts], self.block_size
        )
        query = torch.cat([self.queries[seq][before : before + rows] for seq, rows, before in parts])
        return paged_attention(kernels, query, self.key_cache, self.value_cache, batch, options, workspace=workspace)


def reference(query: Tensor, keys: Tensor, values: Tensor, before: int, options: AttentionOptions):
    """Returns (the output, the largest error by rounding), both [rows, num_heads, head_dim] float64."""
    group, dtype = query.shape[1] // keys.shape[1], query.dtype
    query, keys, values = (tensor.double() for tensor in (query, keys, values))
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", query, keys) * options.scaling
    magnitude = torch.einsum("rhd,thd->hrt", query.abs(), keys.abs()) * options.scaling
    score_error = (query.shape[2] + 4) * ROUNDING * magnitude
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
        score_error = score_error + 16 * ROUNDING * options.softcap
    positions = before + torch.arange(len(query)).unsqueeze(1)
    seen = torch.arange(len(keys)) <= positions
    if options.sliding_window is not None:
        seen &= torch.arange(len(keys)) > positions - options.sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
    output = torch.einsum("hrt,thd->rhd", weights, values)
    # A weight has the errors of its score, of the exponential and of rounding to the values' type. So has each weight
    # in the sum by which it is divided, and that sum is rounded, too.
    rounded = 2 * rounding_of(dtype) if dtype == torch.bfloat16 else 0.0
    weight_error = 2 * score_error.masked_fill(~seen, 0.0).amax(dim=-1) + (len(keys) + 32) * ROUNDING + rounded
    weight_error = weight_error.T.unsqueeze(-1)
    return output, weight_error * torch.einsum("hrt,thd->rhd", weights, values.abs())


def assert_is_attention(cache: Cache, actual: Tensor, parts, options) -> None:
    first = 0
    for seq, rows, before in parts:
        end = before + rows
        expected, allowed = reference(
            cache.queries[seq][before:end], cache.keys[seq][:end], cache.values[seq][:end], before, options
        )
        own = actual[first : first + rows]
        assert_within(own, expected, allowed + rounding_of(actual.dtype) * (expected.abs() + allowed) + 1e-36)
        first += rows


def check(kernels, sequences, *, dtype=torch.float32, heads=None, options=None, block_size=16):
    heads = heads or Heads()
    options = options or AttentionOptions(heads.head_dim**-0.5, latent_dim=heads.latent_dim)
    cache = Cache([rows + before for rows, before in sequences], heads, dtype, block_size=block_size)
    parts = [(seq, rows, before) for seq, (rows, before) in enumerate(sequences)]
    assert_is_attention(cache, cache.attend(kernels, parts, options), parts, options)


@pytest.mark.pairwise
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_any_multiple_of_16(kernels, dtype, head_dim):
    check(kernels, [(5, 260), (20, 3)], dtype=dtype, heads=Heads(head_dim))


@pytest.mark.pairwise
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_rows_of_few_query_heads(kernels, dtype, group, head_dim):
    """The kernel multiplies a few query rows with several panels of keys or columns at once: with four, two or one."""
    check(kernels, [(1, 300), (1, 16), (1, 0)], dtype=dtype, heads=Heads(head_dim, 2, group))


@pytest.mark.pairwise
@pytest.mark.parametrize("block_size", [5, 16, 32])
@pytest.mark.parametrize("widths", [(32, 16), (48, 16), (64, 48), (144, 128)], ids=str)
@pytest.mark.parametrize("group", [1, 4, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention(kernels, dtype, group, widths, block_size):
    """Keys are the latents, which are the values as well, and the rotated dimensions."""
    head_dim, latent_dim = widths
    check(
        kernels,
        [(5, 260), (20, 3), (1, 300), (1, 0)],
        dtype=dtype,
        heads=Heads(head_dim, 1, group, latent_dim),
        block_size=block_size,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_latents_have_equal_bits_in_any_batch(library, teams, dtype):
    heads = Heads(48, 1, 8, 32)
    options = AttentionOptions(0.25, latent_dim=32)
    cache = Cache([700, 40], heads, dtype, block_size=8)
    alone = cache.attend(teams(library, 1), [(0, 1, 690)], options)
    for threads in (1, 3):
        together = cache.attend(teams(library, threads), [(0, 10, 685), (1, 30, 10)], options)
        assert torch.equal(together[5:6], alone)


def test_more_query_heads_to_a_key_value_head_than_rows_are_taken_together(kernels):
    check(kernels, [(3, 100)], heads=Heads(16, 1, 40))


@pytest.mark.pairwise
@pytest.mark.parametrize("length", BORDERS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_contexts_that_end_at_a_border(library, teams, num_threads, length):
    kernels = teams(library, num_threads)
    check(kernels, [(1, length - 1)])
    check(kernels, [(min(7, length), length - min(7, length))], heads=Heads(16, 1, 3), block_size=64)


SPANS = [(5, 254), (1, 600), (30, 500), (3, 0)]
NAMES = ("dtype", "heads", "sequences", "block_size", "window", "softcap", "sink", "num_threads")


def _case(*values):
    return example(**dict(zip(NAMES, values, strict=True)))


@_case(torch.float32, Heads(), SPANS, 16, 255, None, None, 1)
@_case(torch.bfloat16, Heads(), SPANS, 16, 256, None, None, 2)
@_case(torch.float32, Heads(), SPANS, 16, 257, None, 1.0, 2)
@_case(torch.bfloat16, Heads(16, 3, 8), [(33, 270), (5, 254), (1, 511)], 256, None, 0.5, 3.0, 3)
@_case(torch.float32, Heads(16, 1, 7), [(5, 300), (1, 511), (33, 0)], 5, 30, 50.0, -2.0, 1)
@_case(torch.bfloat16, Heads(48, 2, 3), [(5, 300), (33, 7), (1, 260)], 24, None, None, None, 2)
@_case(torch.bfloat16, Heads(48, 1, 12, 32), [(5, 300), (33, 7), (1, 511)], 16, 255, None, 0.5, 2)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.builds(Heads, st.sampled_from([16, 48, 80]), st.integers(1, 3), st.integers(1, 9))
    | st.builds(Heads, st.sampled_from([48, 80]), st.just(1), st.integers(1, 40), st.sampled_from([16, 32])),
    sequences=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=4),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 700),
    softcap=st.none() | st.floats(1.0, 30.0),
    sink=st.none() | st.floats(-100.0, 100.0, width=32),
    num_threads=st.integers(1, 3),
)
def test_any_batch(library, teams, dtype, heads, sequences, block_size, window, softcap, sink, num_threads):
    sinks = None if sink is None else torch.linspace(sink, -1.0, heads.num_heads)
    options = AttentionOptions(0.3, sliding_window=window, softcap=softcap, sinks=sinks, latent_dim=heads.latent_dim)
    check(teams(library, num_threads), sequences, dtype=dtype, heads=heads, options=options, block_size=block_size)


def test_a_wrong_mask_would_be_noticed(kernels):
    """Negative control: one key too many changes the output by far more than the bounds."""
    cache, parts = Cache([42], Heads(), torch.float32), [(0, 5, 37)]
    actual = cache.attend(kernels, parts, AttentionOptions(0.25, sliding_window=10))
    with pytest.raises(AssertionError, match="more than rounding explains"):
        assert_is_attention(cache, actual, parts, AttentionOptions(0.25, sliding_window=9))


# ---- bits

ROWS_ALONE = (0, 1, 15, 16, 17, 100, 254, 255, 256, 257, 258, 400, 511, 512, 513, 514, 529)
COMPANIES = {
    "verify_pass": [[(0, 5, 0)], [(0, 5, 14)], [(0, 5, 98)], [(0, 5, 254)], [(0, 5, 510)]],
    "whole_prompt": [[(0, 530, 0)]],
    "chunks": [[(0, 100, 0)], [(0, 157, 100)], [(0, 256, 257)], [(0, 17, 513)]],
    "mixed_batch": [[(1, 1, 300), (0, 30, 0), (2, 5, 20), (0, 3, 99), (1, 64, 0), (0, 9, 250), (0, 20, 510)]],
}
OPTIONS = {
    "full": AttentionOptions(0.2),
    "window_of_1": AttentionOptions(0.2, sliding_window=1),
    "window_of_40": AttentionOptions(0.2, sliding_window=40),
    "window_of_300": AttentionOptions(0.2, sliding_window=300),
    "softcap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=torch.linspace(-2.0, 8.0, 6)),
}


def rows_that_differ(kernels_alone, kernels, cache: Cache, batches, options) -> list[int]:
    """Returns the positions of sequence 0 whose output bits in one of `batches` differ from those computed alone."""
    differing = []
    workspace = Workspace(kernels.library)
    for parts in batches:
        together = cache.attend(kernels, parts, options, workspace=workspace)
        first = 0
        for seq, rows, before in parts:
            for position in ROWS_ALONE if seq == 0 else ():
                if before <= position < before + rows:
                    alone = cache.attend(kernels_alone, [(0, 1, position)], options)
                    row = first + position - before
                    differing += [position] * len(differing_rows(together[row : row + 1], alone))
            first += rows
    return differing


@pytest.mark.parametrize(
    ("library", "company", "option", "dtype"),
    with_few_for_tests(
        {
            f"{company}-{option}-{dtype}": (company, option, dtype)
            for company in COMPANIES
            for option in OPTIONS
            for dtype in DTYPES
        },
        few=(
            "verify_pass-full-torch.bfloat16",
            "chunks-window_of_300-torch.bfloat16",
            "mixed_batch-full-torch.float32",
            "mixed_batch-window_of_40-torch.bfloat16",
            "whole_prompt-softcap-torch.bfloat16",
            "verify_pass-sinks-torch.bfloat16",
            "mixed_batch-sinks-torch.float32",
        ),
    ),
    indirect=["library"],
)
def test_a_rows_bits_do_not_depend_on_its_company_or_on_who_shares_the_work(library, teams, company, option, dtype):
    cache = Cache([530, 301, 25], Heads(16, 2, 3), dtype, block_size=32)
    for num_threads in (1, 2, 3):
        kernels = teams(library, 1), teams(library, num_threads)
        assert rows_that_differ(*kernels, cache, COMPANIES[company], OPTIONS[option]) == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_of_heads_of_any_size(library, teams, head_dim):
    cache = Cache([530, 301, 25], Heads(head_dim, 1, 2), torch.bfloat16)
    for num_threads in (1, 2):
        kernels = teams(library, 1), teams(library, num_threads)
        assert rows_that_differ(*kernels, cache, COMPANIES["mixed_batch"], OPTIONS["full"]) == []


SCATTERED = (1, 3, 8, 24, 40)  # block sizes that are no multiples of a panel, which has 16 slots


def test_bits_do_not_depend_on_where_the_blocks_lie(kernels):
    outputs = [
        Cache([530], Heads(), torch.bfloat16, block_size=block_size).attend(kernels, [(0, 30, 500)], OPTIONS["full"])
        for block_size in (16, 32, 64, 256, *SCATTERED)
    ]
    for output in outputs[1:]:
        assert differing_rows(output, outputs[0]) == []


def test_a_sum_that_vanishes_is_the_same_zero_in_any_company(library, teams):
    """A weight times a subnormal value may round to -0, and a masked key's +0 is added only if there are other rows."""
    cache = Cache([20], Heads(16, 1, 1), torch.float32)
    query, key, value = cache.queries[0], cache.keys[0], cache.values[0]
    query[:], key[:], value[:] = 1.0, 0.0, 1.0
    key[0] = 1.0  # the largest score, whose value is zero
    value[0], value[1:11] = 0.0, -1e-45
    for index, block in enumerate(cache.tables[0]):
        part = slice(index * 16, index * 16 + 16)
        cache.key_cache[block, : len(key[part])], cache.value_cache[block, : len(key[part])] = key[part], value[part]
    options = AttentionOptions(0.1)
    alone = cache.attend(teams(library, 1), [(0, 1, 10)], options)
    in_company = cache.attend(teams(library, 1), [(0, 20, 0)], options)[10:11]
    assert not alone.any()
    assert differing_rows(alone, in_company) == []


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
def test_a_kernel_that_breaks_the_rule_is_caught(rule_breaking_library, teams):
    """Negative control of this file's checks, in float32, because rounding to bfloat16 would hide most differences."""
    cache = Cache([530, 301, 25], Heads(16, 2, 3), torch.float32, block_size=32)
    kernels = teams(rule_breaking_library, 1)
    batches = [batch for of_company in COMPANIES.values() for batch in of_company]
    assert rows_that_differ(kernels, kernels, cache, batches, OPTIONS["full"])


class Allocated(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes():
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Allocated
    found = read()
    return found.hblkhd + found.uordblks


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library does not say what it has given")
@pytest.mark.parametrize("library", REAL_PATHS, indirect=True)
@pytest.mark.parametrize(("num_sequences", "num_rows"), [(32, 1), (9, 24)], ids=["decode", "prompts"])
def test_scratch_of_long_contexts_and_many_members_stays_small(library, teams, num_sequences, num_rows):
    """If partial results of all spans were kept, the rows of one task would take 32 MB, and these prompts 75 MB."""
    heads, num_tokens = Heads(head_dim=128, num_kv_heads=2, group=8), 10_000
    cache = Cache([num_tokens], heads, torch.float32, block_size=256)
    parts = [(0, num_rows, num_tokens - num_rows)] * num_sequences
    options = AttentionOptions(heads.head_dim**-0.5)
    kernels = teams(library, 32)
    workspace = Workspace(kernels.library)
    before = allocated_bytes()
    together = cache.attend(kernels, parts, options, workspace=workspace)
    assert allocated_bytes() - before < 24 << 20
    alone = cache.attend(teams(library, 1), parts[:1], options)
    assert torch.equal(together, alone.repeat(num_sequences, 1, 1))
