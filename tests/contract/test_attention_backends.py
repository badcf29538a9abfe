"""Every attention backend against plain causal attention, written out in float64."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.attention import AttentionOptions, flash_attn, make_attention_backend
from outrider.engine.attention.flash_attn import FlashAttention
from outrider.engine.attention.native import NativeAttention
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec, stored_vectors
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import start_kernels
from tests.contract import stand_in_flash_attn
from tests.speculation.draft_trees import path_to
from tests.support.interpreted_triton import interpreted_attention

PLAIN = AttentionOptions(0.25)
SINKS = torch.tensor([-1.0, 8.0, 0.5, -30.0, 4.0, 2.0])  # of the six heads that `run` has by default
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

HAS_CUDA = torch.cuda.is_available()
HAS_FLASH_ATTN = HAS_CUDA and importlib.util.find_spec("flash_attn") is not None

HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
INTERPRETED = pytest.mark.skipif(not HAS_TRITON or HAS_CUDA, reason="needs triton, and no CUDA device to run it on")


@functools.cache
def kernels():
    """Returns the kernels of this processor. They are not opened at import, since compiling takes half a minute."""
    return choose_kernels()


def case(name, device, dtype, *marks):
    label = {"interpreted": "triton-interpreted"}.get(name, name if "stand-in" in name else f"{name}-{device}")
    return pytest.param((name, device, dtype), id=f"{label}-{str(dtype).removeprefix('torch.')}", marks=marks)


NEEDS_FLASH_ATTN = pytest.mark.skipif(not HAS_FLASH_ATTN, reason="needs a CUDA device and flash-attn")
STAND_INS = {
    "flash_attn": stand_in_flash_attn.flash_attn_varlen_func,
    "varlen_attn": stand_in_flash_attn.varlen_attn,
    "varlen_attn-2.11": stand_in_flash_attn.varlen_attn_of_2_11,
}
BACKENDS = [
    case("torch_sdpa", "cpu", torch.float32),
    case("torch_sdpa", "cpu", torch.bfloat16),
    case("native", "cpu", torch.float32),
    case("native", "cpu", torch.bfloat16),
    *(case(f"{name}-stand-in", "cpu", torch.bfloat16) for name in STAND_INS),
    case("varlen_attn-stand-in", "cpu", torch.float16),
    # Triton's interpreter cannot multiply bfloat16 matrices.
    case("interpreted", "cpu", torch.float32, pytest.mark.triton, INTERPRETED),
    case("triton", "cuda", torch.float32, *ON_CUDA),
    case("triton", "cuda", torch.bfloat16, *ON_CUDA),
    case("torch_sdpa", "cuda", torch.float32, *ON_CUDA),
    case("varlen_attn", "cuda", torch.bfloat16, *ON_CUDA),
    case("flash_attn", "cuda", torch.bfloat16, pytest.mark.gpu, NEEDS_FLASH_ATTN),
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
    "lengths_far_apart": [(1, 0), (1, 3), (1, 130), (1, 600), (1, 17), (1, 16), (1, 15)],
    "row_counts_mixed": [(5, 100), (1, 20), (40, 0), (5, 3), (1, 64), (25, 31), (2, 8)],
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    torch.set_num_threads(1)
    if request.param[0] == "native" and kernels().library is None:
        pytest.skip(str(kernels()))
    return request.param


def make_backend(name, device, dtype, **heads):
    if name == "native":  # has no name of its own, as it belongs to a loaded model's kernels
        return NativeAttention(start_kernels(kernels(), ModelConfig(num_threads=2)))
    if name == "interpreted":
        return interpreted_attention(**heads)
    if name.endswith("-stand-in"):
        return flash_attention_by(STAND_INS[name.removesuffix("-stand-in")])
    return make_attention_backend(name, device, str(dtype).removeprefix("torch."), **heads)


def flash_attention_by(compute):
    """Returns FlashAttention with `compute` in place of the installed function."""
    with pytest.MonkeyPatch.context() as patch:
        if "q" in inspect.signature(compute).parameters:
            patch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=compute))
            return FlashAttention("flash_attn", "cpu", make_attention_backend("torch_sdpa", "cpu"))
        patch.setattr("torch.nn.attention.varlen.varlen_attn", compute)
        return FlashAttention("varlen_attn", "cpu", make_attention_backend("torch_sdpa", "cpu"))


@pytest.fixture(autouse=True)
def flash_attention_has_short_prompts_too(monkeypatch):
    monkeypatch.setattr(flash_attn, "MIN_ROWS", 0)


def run(backend, sequences, options, *, block_size=8, num_heads=6, num_kv_heads=2, head_dim=16):
    """Returns outputs of the backend, of the reference, and of the reference if trees are taken for chains.

    Each is [num_rows, num_heads, head_dim] float64. A sequence is (known rows, tokens before them) and, if it has
    drafts, their parents.
    """
    name, device, dtype = backend
    attention = make_backend(name, device, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(device))
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [rows + before + sum(map(len, parents)) for rows, before, *parents in sequences]
    num_blocks = [-(-length // block_size) for length in lengths]
    shuffled = torch.randperm(sum(num_blocks) + 5, generator=generator).tolist()
    vectors = stored_vectors(head_dim, options.latent_dim)
    shape = (len(shuffled), block_size, num_kv_heads)
    # Unwritten slots have no effect.
    keys, values = (torch.full((*shape, width), float("nan"), dtype=dtype) for _, width in vectors)
    parts, queries, expected, as_chains = [], [], [], []
    for (known, before, *drafts), length, count in zip(sequences, lengths, num_blocks, strict=True):
        parents = drafts[0] if drafts else ()
        table = [shuffled.pop() for _ in range(count)]
        by_slot = []
        for cache in (keys, values):
            tokens = random(count * block_size, *cache.shape[2:])
            tokens[length:] = float("nan")  # remains of the block's earlier owner
            cache[table] = tokens.unflatten(0, (count, block_size))
            by_slot.append(tokens[:length].double())
        if options.latent_dim:
            by_slot[0] = torch.cat(by_slot[::-1], -1)
        query = random(known + len(parents), num_heads, head_dim)
        queries.append(query)
        parts.append(SequenceRows([0] * len(query), before, table, 1, parents))
        as_chains.append(reference(query.double(), *by_slot, before, options))
        expected.append(as_chains[-1][:known])
        for draft in range(len(parents)):
            path = path_to(parents, draft)
            seen = [*range(known + before), *(known + before + each for each in path)]
            one = query[known + draft : known + draft + 1].double()
            expected.append(reference(one, *(tokens[seen] for tokens in by_slot), len(seen) - 1, options))
    plan = attention.prepare(build_input_batch(parts, block_size))
    query, *caches = (each.to(device) for each in (torch.cat(queries), keys, values))
    if isinstance(attention, NativeAttention):
        planes = [PlaneSpec(name, 1, num_kv_heads, width, str(dtype).removeprefix("torch.")) for name, width in vectors]
        cache = PagedKVCache(planes, num_blocks=len(keys), block_size=block_size, kernels=attention.kernels)
        attention.store(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            cache.keys[0],
            cache.values[0],
            torch.arange(len(keys) * block_size),
        )
        caches = [cache.keys[0], cache.values[0]]
    output = attention.attend(plan, query, *caches, options)
    assert torch.equal(output, attention.attend(plan, query, *caches, options))  # a plan can be used for every layer
    return output.cpu().double(), torch.cat(expected), torch.cat(as_chains)


def reference(query, keys, values, before, options):
    """Computes the reference row by row and head by head: [rows, num_heads, head_dim]."""
    output = query.new_empty((*query.shape[:2], values.shape[2]))
    heads_per_kv = query.shape[1] // keys.shape[1]
    for row, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        position = before + row
        first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        scores = keys[first : position + 1, head // heads_per_kv] @ query[row, head] * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.exp()
        total = weights.sum() + (0.0 if options.sinks is None else options.sinks[head].double().exp())
        output[row, head] = weights / total @ values[first : position + 1, head // heads_per_kv]
    return output


def assert_equal(outputs, backend):
    output, expected, _ = outputs
    assert output.shape == expected.shape
    assert float((output - expected).abs().max()) <= TOLERANCES[backend[2]] * max(1.0, float(expected.abs().max()))


# (block size, options)
LAYERS = {
    "blocks_of_1": (1, PLAIN),
    "blocks_of_16": (16, PLAIN),
    "window_of_1": (8, AttentionOptions(0.25, sliding_window=1)),
    "window_of_40": (5, AttentionOptions(0.25, sliding_window=40)),
    "soft_cap": (8, AttentionOptions(0.25, softcap=1.5)),
    "soft_cap_and_window": (16, AttentionOptions(0.25, sliding_window=16, softcap=1.5)),
    "sinks": (16, AttentionOptions(0.25, sinks=SINKS)),
    "sinks_soft_cap_and_window": (8, AttentionOptions(0.25, sliding_window=16, softcap=1.5, sinks=SINKS)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("block_size", "options"), LAYERS.values(), ids=LAYERS.keys())
def test_rows_see_the_tokens_before_them_that_their_layer_wants(backend, sequences, block_size, options):
    assert_equal(run(backend, sequences, options, block_size=block_size), backend)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (9, 3), (64, 1), (142, 2)])
def test_query_heads_share_key_value_heads_in_order(backend, num_heads, num_kv_heads):
    """Some cases also have more rows than a tile of our kernel."""
    outputs = run(
        backend,
        [(5, 100), (1, 20)] if num_heads > 9 else BATCHES["row_counts_mixed"],
        AttentionOptions(0.2),
        block_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
    )
    assert_equal(outputs, backend)


@pytest.mark.parametrize("window", [None, 700])
def test_a_sink_counts_once_in_a_context_that_is_divided(backend, window):
    """Some backends divide the keys of few rows among threads or programs, and merge the parts."""
    options = AttentionOptions(0.25, sliding_window=window, sinks=SINKS)
    outputs = run(backend, [(2, 1300)], options, block_size=16)
    assert_equal(outputs, backend)
    _, without, _ = run(backend, [(2, 1300)], replace(options, sinks=None), block_size=16)
    assert float((outputs[1] - without).abs().max()) > 2 * TOLERANCES[backend[2]], "the test would notice a lost sink"


def test_sinks_may_be_far_from_all_scores(backend):
    options = AttentionOptions(0.25, sinks=torch.tensor([-1e30, -1e4, -200.0, 200.0, 1e4, 1e30]))
    output, expected, _ = run(backend, [(3, 300), (9, 0)], options)
    _, without, _ = run(backend, [(3, 300), (9, 0)], PLAIN)
    assert not output[:, 3:].any()
    assert_equal((output[:, :3], without[:, :3], expected), backend)


def test_a_wrong_mask_would_be_noticed(backend):
    """Negative control: one key too many changes outputs by far more than the tolerance."""
    output, *_ = run(backend, [(5, 37)], AttentionOptions(0.25, sliding_window=9))
    _, expected, _ = run(backend, [(5, 37)], AttentionOptions(0.25, sliding_window=10))
    assert float((output - expected).abs().max()) > 10 * TOLERANCES[backend[2]]


# (known rows, tokens before them, parents of the drafts behind them) of each sequence in one batch
TREES = {
    "alone": [(1, 40, (-1, 0, 1, -1, 0))],
    "at_the_beginning": [(1, 0, (-1, -1, -1))],
    "across_a_block_border": [(1, 13, (-1, -1, 0, 1, 2, 3))],
    "among_others": [(1, 20, ()), (1, 37, (-1, 0, -1, 2)), (5, 3, ()), (1, 37, (-1, 0, 0, 1)), (4, 0, (-1, -1))],
    "behind_a_chunk": [(25, 31, (-1, 0, -1, 0, 2, 2)), (1, 300, (-1, -1, -1))],
}


TREE_LAYERS = {
    "plain": PLAIN,
    "window_of_3": AttentionOptions(0.25, sliding_window=3),
    "soft_cap_and_window_of_30": AttentionOptions(0.25, sliding_window=30, softcap=1.5),
    "sinks_and_window_of_30": AttentionOptions(0.25, sliding_window=30, sinks=SINKS),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("sequences", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("options", TREE_LAYERS.values(), ids=TREE_LAYERS.keys())
def test_a_row_of_a_tree_sees_its_own_path(backend, sequences, options):
    assert_equal(run(backend, sequences, options), backend)


def test_a_tree_taken_for_a_chain_would_be_noticed(backend):
    """Negative control: if a tree is taken for a chain, outputs change by far more than the tolerance."""
    output, _, as_chain = run(backend, TREES["at_the_beginning"], PLAIN)
    assert float((output - as_chain).abs().max()) > 10 * TOLERANCES[backend[2]]


def test_auto_runs_on_this_machine_without_a_gpu():
    assert make_attention_backend("auto", "cpu").name == "torch_sdpa"


@pytest.mark.parametrize("name", STAND_INS)
def test_flash_attention_has_prompts_and_leaves_steps_trees_and_what_it_cannot_compute_to_another(name, monkeypatch):
    calls = []

    @functools.wraps(STAND_INS[name])
    def compute(query, *_keys, **_options):
        calls.append(len(query))
        return query

    monkeypatch.setattr(flash_attn, "MIN_ROWS", 20)
    monkeypatch.setattr(flash_attn, "MAX_GATHERED_KEYS", 60)
    attention = flash_attention_by(compute)
    chunks = [SequenceRows([0] * 30, 0, range(4), 1), SequenceRows([0] * 10, 0, range(4, 6), 1)]
    steps = {
        "two chunks": (chunks, PLAIN, 16),
        "two chunks behind a prefix": ([SequenceRows([0] * 30, 16, range(6), 1)] * 2, PLAIN, 16),
        "one chunk behind a prefix": ([SequenceRows([0] * 30, 70, [*range(6)] * 3, 1)], PLAIN, 16),
        "a chunk beside decoding": ([chunks[0], SequenceRows([0], 9, range(4, 6), 1)], PLAIN, 16),
        "a tree": ([SequenceRows([0] * 30, 0, range(4), 1, parents=(-1, -1))], PLAIN, 16),
        "odd heads": (chunks, PLAIN, 20),
        "large heads": (chunks, PLAIN, 264),
        "a soft cap": (chunks, AttentionOptions(0.25, softcap=1.5), 16),
        "sinks": (chunks, AttentionOptions(0.25, sinks=torch.zeros(2)), 16),
    }
    for rows, options, head_dim in steps.values():
        batch = build_input_batch(rows, 8)
        cache = torch.zeros((6, 8, 1, head_dim))
        output = attention.attend(
            attention.prepare(batch), torch.ones((batch.num_rows, 2, head_dim)), cache, cache, options
        )
        assert output.shape == (batch.num_rows, 2, head_dim)
    assert calls == ([40, 30, 40] if name == "flash_attn" else [40, 30])


def test_the_stand_in_is_called_as_torch_s_own_is():
    from torch.nn.attention import varlen  # the import takes two seconds

    own = inspect.signature(varlen.varlen_attn).parameters
    stand_in = STAND_INS["varlen_attn" if "enable_gqa" in own else "varlen_attn-2.11"]
    stood_in = inspect.signature(stand_in).parameters
    assert [(each.name, each.kind, each.default) for each in own.values()] == [
        (each.name, each.kind, each.default) for each in stood_in.values()
    ]


@pytest.fixture
def installed(monkeypatch):
    """Makes flash-attn and triton look installed to the choice of a backend."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_flash_attn)
    if not HAS_TRITON:
        pytest.skip("needs triton")


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "triton"), ("bfloat16", "varlen_attn"), ("float16", "varlen_attn")]
)
def test_auto_on_a_gpu_takes_flash_attention_of_torch_for_what_it_can_compute(installed, dtype, expected):
    backend = make_attention_backend("auto", "cuda", dtype)
    assert backend.name == expected
    assert backend.can_be_captured  # steps are triton's


def test_auto_on_a_gpu_without_triton_is_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    backend = make_attention_backend("auto", "cuda", "bfloat16")
    assert (backend.name, backend.can_be_captured) == ("torch_sdpa", False)
    for name in ("triton", "varlen_attn", "flash_attn"):
        with pytest.raises(ConfigError, match=r"triton package.*torch_sdpa"):
            make_attention_backend(name, "cuda", "bfloat16")


@pytest.mark.triton
def test_the_flash_attn_package_is_used_where_it_is_asked_for(installed, monkeypatch):
    assert make_attention_backend("flash_attn", "cuda", "bfloat16").name == "flash_attn"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"flash-attn package"):
        make_attention_backend("flash_attn", "cuda", "bfloat16")


@pytest.mark.triton
@pytest.mark.parametrize("name", ["varlen_attn", "flash_attn"])
def test_what_flash_attention_cannot_do_is_refused_with_the_way_out(installed, name):
    with pytest.raises(ConfigError, match=r"float32.*torch_sdpa"):
        make_attention_backend(name, "cuda", "float32")


@pytest.mark.parametrize(("name", "message"), [("flash_attn", "torch_sdpa"), ("flashy", "one of")])
def test_what_a_cpu_cannot_have_is_refused_with_the_way_out(name, message):
    with pytest.raises(ConfigError, match=message):
        make_attention_backend(name, "cpu")
