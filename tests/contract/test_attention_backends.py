"""Every attention backend against plain causal attention, written out in float64."""

from __future__ import annotations

import importlib.util
import itertools
import sys

import pytest
import torch

from outrider.engine.attention import AttentionOptions, make_attention_backend
from outrider.engine.attention.native import NativeAttention
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import start_kernels
from tests.contract import stand_in_flash_attn
from tests.interpreted_triton import interpreted_attention
from tests.speculation.draft_trees import path_to

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

HAS_CUDA = torch.cuda.is_available()
HAS_FLASH_ATTN = HAS_CUDA and importlib.util.find_spec("flash_attn") is not None

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = pytest.mark.skipif(not HAS_TRITON or HAS_CUDA, reason="needs triton, and no CUDA device to run it on")

KERNELS = choose_kernels()

BACKENDS = [
    pytest.param(("torch_sdpa", "cpu", torch.float32), id="torch_sdpa-cpu-float32"),
    pytest.param(("torch_sdpa", "cpu", torch.bfloat16), id="torch_sdpa-cpu-bfloat16"),
    *(
        pytest.param(
            ("native", "cpu", dtype),
            id=f"native-cpu-{str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.skipif(KERNELS.library is None, reason=str(KERNELS)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    pytest.param(("stand-in", "cpu", torch.bfloat16), id="flash_attn-stand-in-bfloat16"),
    pytest.param(("stand-in", "cpu", torch.float16), id="flash_attn-stand-in-float16"),
    pytest.param(  # triton's interpreter has no products of bfloat16
        ("interpreted", "cpu", torch.float32), id="triton-interpreted-float32", marks=[pytest.mark.full, INTERPRETED]
    ),
    *(
        pytest.param(
            ("triton", "cuda", dtype),
            id=f"triton-cuda-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")],
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    pytest.param(
        ("torch_sdpa", "cuda", torch.float32),
        id="torch_sdpa-cuda-float32",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")],
    ),
    pytest.param(
        ("flash_attn", "cuda", torch.bfloat16),
        id="flash_attn-cuda-bfloat16",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_FLASH_ATTN, reason="needs a CUDA device and flash-attn")],
    ),
]

# (rows, tokens before them) of each sequence in one batch
BATCHES = {
    "one_row": [(1, 40)],
    "a_first_token": [(1, 0)],
    "verification_of_four_drafts": [(5, 37)],
    "a_whole_prompt": [(50, 0)],
    "a_later_chunk": [(33, 70)],
    "a_short_prompt": [(7, 0)],
    "many_of_equal_length": [(1, 30)] * 6,
    "lengths_far_apart": [(1, 0), (1, 3), (1, 250), (1, 700), (1, 17), (1, 16), (1, 15)],
    "row_counts_mixed": [(5, 100), (1, 20), (40, 0), (5, 3), (1, 64), (25, 31), (2, 8)],
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    torch.set_num_threads(1)
    return request.param


def make_backend(name, device, dtype):
    if name == "native":  # comes with the kernels that a model was loaded with
        return NativeAttention(start_kernels(KERNELS, ModelConfig(num_threads=2)))
    if name == "interpreted":
        return interpreted_attention()
    if name == "stand-in":
        return flash_attention_over(stand_in_flash_attn, device)
    return make_attention_backend(name, device, str(dtype).removeprefix("torch."))


def flash_attention_over(package, device):
    """FlashAttention as it is where `package` is what is installed as flash_attn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", package)
        patch.delitem(sys.modules, "outrider.engine.attention.flash_attn", raising=False)
        return importlib.import_module("outrider.engine.attention.flash_attn").FlashAttention(device)


def run(backend, sequences, *, block_size, options, num_heads=6, num_kv_heads=2, head_dim=16, seed=0):
    """(the backend's output, the reference's), both [num_rows, num_heads, head_dim] float64."""
    name, device, dtype = backend
    attention = make_backend(name, device, dtype)
    if name in ("flash_attn", "stand-in"):
        block_size = attention.block_size(None)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(before + rows) // block_size) for rows, before in sequences]
    shuffled = torch.randperm(sum(num_blocks) + 5, generator=generator).tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in num_blocks]
    shape = (sum(num_blocks) + 5, block_size, num_kv_heads, head_dim)
    keys = torch.full(shape, float("nan"), dtype=dtype)  # what no sequence wrote must never count
    values = torch.full(shape, float("nan"), dtype=dtype)
    for (rows, before), table in zip(sequences, tables, strict=True):
        for cache in (keys, values):
            tokens = torch.randn((len(table) * block_size, num_kv_heads, head_dim), generator=generator).to(dtype)
            tokens[before + rows :] = float("nan")  # whatever the block's earlier owner left
            cache[table] = tokens.unflatten(0, (len(table), block_size))
    query = torch.randn((sum(rows for rows, _ in sequences), num_heads, head_dim), generator=generator).to(dtype)

    batch = build_input_batch(
        [SequenceRows([0] * rows, before, table, 1) for (rows, before), table in zip(sequences, tables, strict=True)],
        block_size,
    )
    plan = attention.prepare(batch)
    output = attention.attend(plan, query.to(device), keys.to(device), values.to(device), options)
    again = attention.attend(plan, query.to(device), keys.to(device), values.to(device), options)
    assert torch.equal(output, again)  # a plan serves every layer

    expected, first = [], 0
    for (rows, before), table in zip(sequences, tables, strict=True):
        own_keys = keys[table].flatten(0, 1)[: before + rows].double()
        own_values = values[table].flatten(0, 1)[: before + rows].double()
        expected.append(reference(query[first : first + rows].double(), own_keys, own_values, before, options))
        first += rows
    return output.cpu().double(), torch.cat(expected)


def reference(query, keys, values, before, options):
    """Row by row and head by head: [rows, num_heads, head_dim]."""
    output = torch.empty_like(query)
    heads_per_kv = query.shape[1] // keys.shape[1]
    for row, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        position = before + row
        first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        scores = keys[first : position + 1, head // heads_per_kv] @ query[row, head] * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        output[row, head] = torch.softmax(scores, 0) @ values[first : position + 1, head // heads_per_kv]
    return output


def assert_equal(outputs, backend):
    output, expected = outputs
    assert output.shape == expected.shape
    assert float((output - expected).abs().max()) <= TOLERANCES[backend[2]] * max(1.0, float(expected.abs().max()))


@pytest.mark.pairwise
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_rows_see_every_token_before_them(backend, sequences, block_size):
    assert_equal(run(backend, sequences, block_size=block_size, options=AttentionOptions(0.25)), backend)


@pytest.mark.pairwise
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("window", [1, 16, 40, 10_000])
def test_a_sliding_window_hides_older_tokens(backend, sequences, window):
    options = AttentionOptions(0.25, sliding_window=window)
    assert_equal(run(backend, sequences, block_size=8, options=options), backend)


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
def test_a_soft_cap_bounds_the_scores(backend, sequences):
    options = AttentionOptions(0.25, sliding_window=30, softcap=1.5)
    assert_equal(run(backend, sequences, block_size=16, options=options), backend)
    assert_equal(run(backend, sequences, block_size=16, options=AttentionOptions(0.25, softcap=1.5)), backend)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (9, 3)])
def test_query_heads_share_key_value_heads_in_order(backend, num_heads, num_kv_heads):
    outputs = run(
        backend,
        BATCHES["row_counts_mixed"],
        block_size=16,
        options=AttentionOptions(0.2),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
    )
    assert_equal(outputs, backend)


def test_a_wrong_mask_would_be_noticed(backend):
    """The negative control: one key too many is far outside the tolerance."""
    output, _ = run(backend, [(5, 37)], block_size=8, options=AttentionOptions(0.25, sliding_window=9))
    _, expected = run(backend, [(5, 37)], block_size=8, options=AttentionOptions(0.25, sliding_window=10))
    assert float((output - expected).abs().max()) > 10 * TOLERANCES[backend[2]]


# (known rows, tokens before them, parents of the drafts behind them) of each sequence in one batch
TREES = {
    "alone": [(1, 40, (-1, 0, 1, -1, 0))],
    "at_the_beginning": [(1, 0, (-1, -1, -1))],
    "across_a_block_border": [(1, 13, (-1, -1, 0, 1, 2, 3))],
    "among_others": [(1, 20, ()), (1, 37, (-1, 0, -1, 2)), (5, 3, ()), (1, 37, (-1, 0, 0, 1)), (4, 0, (-1, -1))],
    "behind_a_chunk": [(25, 31, (-1, 0, -1, 0, 2, 2)), (1, 300, (-1, -1, -1))],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("sequences", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("window", [None, 3, 30])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_row_of_a_tree_sees_its_own_path(backend, sequences, window, softcap):
    options = AttentionOptions(0.25, sliding_window=window, softcap=softcap)
    output, expected, _ = run_trees(backend, sequences, options)
    assert_equal((output, expected), backend)


def test_a_tree_taken_for_a_chain_would_be_noticed(backend):
    """The negative control of the paths."""
    output, _, as_chain = run_trees(backend, TREES["at_the_beginning"], AttentionOptions(0.25))
    assert float((output - as_chain).abs().max()) > 10 * TOLERANCES[backend[2]]


def run_trees(backend, sequences, options, *, num_heads=6, num_kv_heads=2, head_dim=16, seed=0):
    """(the backend's output, the reference's, and if slots were positions), [num_rows, num_heads, head_dim] float64."""
    name, device, dtype = backend
    attention = make_backend(name, device, dtype)
    block_size = attention.block_size(None if name in ("flash_attn", "stand-in") else 8)
    generator = torch.Generator().manual_seed(seed)
    lengths = [known + before + len(parents) for known, before, parents in sequences]
    tables = [list(range(index * 100, index * 100 + -(-length // block_size))) for index, length in enumerate(lengths)]
    shape = (100 * len(sequences), block_size, num_kv_heads, head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    rows, expected, as_chain = [], [], []
    queries = []
    for (known, before, parents), length, table in zip(sequences, lengths, tables, strict=True):
        own = [torch.randn((length, num_kv_heads, head_dim), generator=generator).to(dtype) for _ in range(2)]
        for cache, tokens in zip((keys, values), own, strict=True):
            for token in range(length):
                cache[table[token // block_size], token % block_size] = tokens[token]
        query = torch.randn((known + len(parents), num_heads, head_dim), generator=generator).to(dtype)
        queries.append(query)
        rows.append(SequenceRows([0] * len(query), before, table, 1, parents))
        by_slot = [tokens.double() for tokens in own]
        chain = reference(query.double(), *by_slot, before, options)
        as_chain.append(chain)
        expected.append(chain[:known])
        for draft in range(len(parents)):
            path = path_to(parents, draft)
            seen = [*range(known + before), *(known + before + each for each in path)]
            one = query[known + draft : known + draft + 1].double()
            expected.append(reference(one, *(tokens[seen] for tokens in by_slot), len(seen) - 1, options))
    plan = attention.prepare(build_input_batch(rows, block_size))
    output = attention.attend(plan, torch.cat(queries).to(device), keys.to(device), values.to(device), options)
    return output.cpu().double(), torch.cat(expected), torch.cat(as_chain)


def test_auto_runs_on_this_machine_without_a_gpu():
    assert make_attention_backend("auto", "cpu").name == "torch_sdpa"


@pytest.fixture
def installed(monkeypatch):
    """flash-attn, as far as `auto` can tell."""
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_flash_attn)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "torch_sdpa"), ("bfloat16", "flash_attn"), ("float16", "flash_attn")]
)
def test_auto_on_a_gpu_takes_flash_attn_for_what_it_can_compute(installed, without_triton, dtype, expected):
    backend = make_attention_backend("auto", "cuda", dtype)
    assert backend.name == expected
    assert backend.block_size(None) == {"torch_sdpa": 16, "flash_attn": 256}[expected]


def test_auto_on_a_gpu_without_flash_attn_and_triton_is_torch(without_triton, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert make_attention_backend("auto", "cuda", "bfloat16").name == "torch_sdpa"
    with pytest.raises(ConfigError, match=r"triton package.*torch_sdpa"):
        make_attention_backend("triton", "cuda", "bfloat16")


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_on_a_gpu_without_flash_attn_is_triton(monkeypatch, dtype):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    backend = make_attention_backend("auto", "cuda", dtype)
    assert (backend.name, backend.block_size(None)) == ("triton", 16)


def test_what_flash_attn_cannot_do_is_refused_with_the_way_out(installed):
    with pytest.raises(ConfigError, match=r"float32.*torch_sdpa"):
        make_attention_backend("flash_attn", "cuda", "float32")
    with pytest.raises(ConfigError, match=r"kv_cache\.block_size 16.*unset"):
        make_attention_backend("flash_attn", "cuda", "bfloat16").block_size(16)
    assert make_attention_backend("torch_sdpa", "cuda").block_size(8) == 8


def test_flash_attn_on_a_cpu_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="torch_sdpa"):
        make_attention_backend("flash_attn", "cpu")
    with pytest.raises(ConfigError, match="one of"):
        make_attention_backend("flashy", "cpu")
