"""A whole step of a node on a simulated GPU: the devices of tensors, and where the host waits.

Everything runs under torch's FakeTensorMode with a model, a cache and logits on device cuda.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from array import array
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine import module_steps, open_runner, runnable_model, transfer
from outrider.engine.attention import make_attention_backend
from outrider.engine.attention.flash_attn import FlashAttention
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.low_rank import LowRank
from outrider.engine.memory import KVMemory, pool_size
from outrider.engine.model_runner import make_runner
from outrider.engine.model_spec import ModelSpec
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.torch_adapter import TorchAdapter
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams, VerificationMethod
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.model_forward import ModelForward
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.support.fake_gpu import GPU, Kernel, OneDevice, Operations, fake_gpu, flash_attn_varlen_func
from tests.support.verifying import verify_now

VOCAB_SIZE = 5000
BATCH = [
    SequenceRows([5, 6, 7, 8, 9], 40, range(8), num_logits=5),  # verifies four drafts
    SequenceRows([5], 7, range(8, 16), num_logits=1),
    SequenceRows(range(30), 16, range(16, 24), num_logits=0),  # a chunk of a prompt
]
TREE = SequenceRows([5, 6, 7, 8], 20, range(8), num_logits=4, parents=(-1, -1, 1))
SETTINGS = [
    {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_tokens": 9,
        "logit_bias": ((3, 1.0),),
    },
    {"temperature": 0.0},
]


@pytest.fixture(
    params=[
        "torch_sdpa",
        *(pytest.param(name, marks=pytest.mark.triton) for name in ("varlen_attn", "flash_attn", "triton")),
    ]
)
def backend(request, monkeypatch):
    """The name of the attention backend. With torch_sdpa, triton cannot be imported."""
    if request.param == "torch_sdpa":
        monkeypatch.setitem(sys.modules, "triton", None)
        return request.param
    pytest.importorskip("triton")
    from outrider.engine.attention import triton_paged
    from outrider.engine.gpu_kernels import edits, filters, race

    for module, name in (
        (triton_paged, "attend"),
        (triton_paged, "merge_splits"),
        (edits, "edit_rows"),
        (filters, "raise_lanes"),
        (filters, "list_tokens"),
        (filters, "fill_bins"),
        (filters, "list_bins"),
        (filters, "filter_limits"),
        (race, "best_scores"),
        (race, "pick"),
    ):
        monkeypatch.setattr(module, name, Kernel(name))
    return request.param


@pytest.fixture
def sampler(backend):
    """A sampler, made before tensors are fake because it reads the mask of known ids."""
    return Sampler(vocab_size=VOCAB_SIZE, known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool), device=GPU)


@pytest.fixture
def gpu(sampler, monkeypatch):
    with fake_gpu(monkeypatch):
        yield


@pytest.fixture
def node(backend, sampler, gpu, monkeypatch):
    register_attention()
    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for name in ("uniform_", "normal_"):  # fake weights have no values, and these functions would need a real device
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_arguments, **_keywords: tensor)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with GPU:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    spec = ModelSpec(
        architecture="llama", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=VOCAB_SIZE,
        max_model_len=2048, dtype="bfloat16",
    )  # fmt: skip
    loaded = RunnableModel(model=model.eval(), native=None, device=str(GPU), spec=spec)
    attention = make_attention_backend(backend, str(GPU), spec.dtype, num_heads=4, num_kv_heads=2)
    assert attention.name == backend
    cache = PagedKVCache(spec.planes, layer_groups=spec.layer_groups, num_blocks=24, block_size=16, device=str(GPU))
    return SimpleNamespace(
        cache=cache,
        runner=make_runner(loaded, cache, attention),
        sampler=sampler,
        verifier=RequestVerifier(sampler),
        loaded=loaded,
        attention=attention,
    )


@pytest.fixture
def reads(monkeypatch):
    """Returns a list that gets the number of values of each read by the host."""
    sizes = []

    def download(numbers):
        sizes.append(numbers.numel())
        return np.ones(numbers.numel(), dtype=np.float64).view(np.int64)

    monkeypatch.setattr(transfer, "download", download)
    return sizes


def drafts(sampler, methods=(VerificationMethod.COUPLED,), logprobs=(None,)):
    """Yields the draft rows of BATCH's first two sequences, for each method and kind of logprobs."""
    for method, wanted in itertools.product(methods, logprobs):
        for settings, draft, position in zip(SETTINGS, [(6, 7, 8, 9), ()], [45, 8], strict=True):
            state = sampler.start(
                SamplingParams(seed=1, max_tokens=99, **settings), sample=0, prompt_token_ids=[1, 2], logprobs=wanted
            )
            yield DraftRows(SampleRows(state, position, draft), method=method)


def test_a_step_waits_for_the_gpu_once_to_read_the_tokens(node, reads):
    rows = list(drafts(node.sampler))
    with OneDevice():
        node.cache.copy_blocks([(0, 23), (1, 22)])
        logits = node.runner.forward(build_input_batch(BATCH, 16))
        assert logits.shape == (6, VOCAB_SIZE)
        assert reads == []
        verified = verify_now(node.verifier, logits, rows)
    assert reads == [6]
    assert len(verified) == 2


def test_a_step_with_adapters_waits_no_more_than_others(node, reads):
    part = LowRank(np.ones((3, 64), np.float32), np.ones((64, 3), np.float32))
    with GPU:
        adapter = TorchAdapter(node.loaded.model, {"model.layers.1.self_attn.o_proj": part}, device=GPU)
    batch = [BATCH[0], BATCH[1]._replace(adapter=adapter), BATCH[2]]
    with OneDevice():
        logits = node.runner.forward(build_input_batch(batch, 16))
    assert (logits.shape, reads) == ((6, VOCAB_SIZE), [])


@pytest.mark.parametrize(
    ("methods", "has_logprobs"),
    [([VerificationMethod.REJECTION], False), ([VerificationMethod.TYPICAL], False), (list(VerificationMethod), True)],
    ids=["rejection", "typical", "all and logprobs"],
)
def test_every_method_waits_once_for_its_tokens_and_their_logprobs(node, reads, methods, has_logprobs):
    logprobs = [LogprobsRequest(num_top=2, mode=mode) for mode in LogprobsMode] if has_logprobs else [None]
    rows = list(drafts(node.sampler, methods, logprobs))
    with OneDevice():
        verified = verify_now(node.verifier, torch.empty(3 * len(rows), VOCAB_SIZE, device=GPU), rows)
    assert len(reads) == 1
    assert len(verified) == len(rows)
    assert all(any(each.logprobs) for each in verified) is has_logprobs


def test_no_request_compiles_a_sampling_kernel_or_waits_twice(node, reads):
    """A compilation would take seconds within a step, longer than a node may be silent."""
    filters = [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 0.0}, {"frequency_penalty": 0.3}]
    logprobs = [None, *(LogprobsRequest(num_top=3, mode=mode) for mode in LogprobsMode)]
    Kernel.compiled.clear()
    node.sampler.warm_up()
    warm = set(Kernel.compiled)
    kernels = {"edit_rows", "raise_lanes", "list_tokens", "fill_bins", "list_bins", "filter_limits"}
    kernels |= {"best_scores", "pick"}
    is_compiled = node.attention.name != "torch_sdpa"
    assert {name for name, *_ in warm} == (kernels if is_compiled else set())
    for number in (0, 1, 2, 5) if is_compiled else (0, 5):
        for parts in itertools.combinations(filters, number):
            params = SamplingParams(seed=1, max_tokens=9, **{key: part[key] for part in parts for key in part})
            states = [node.sampler.start(params, sample=0, prompt_token_ids=[1], logprobs=each) for each in logprobs]
            reads.clear()
            with OneDevice():
                logits = torch.empty(9, VOCAB_SIZE, device=GPU)
                node.sampler.sample(logits, [SampleRows(each, 5, (1, 2)) for each in states])
            assert len(reads) == 1
    assert warm == Kernel.compiled


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (lambda logits: logits.amax().item(), DataDependentOutputException),
        (lambda logits: logits.cpu(), AssertionError),
        (lambda logits: logits + torch.ones(()), AssertionError),
        (lambda logits: torch.ones(3).to(logits.device), AssertionError),
        (lambda logits: torch.ones(3).to(logits.device, non_blocking=True), AssertionError),
    ],
)
def test_a_wait_or_a_mix_is_noticed(monkeypatch, question, error):
    """This is the negative control of all tests here."""
    with fake_gpu(monkeypatch), OneDevice():
        logits = torch.empty(4, VOCAB_SIZE, device=GPU)
        with pytest.raises(error):
            question(logits)


def test_a_draft_model_waits_once_for_siblings_and_what_they_were_drawn_from(node, reads):
    sampling = node.sampler.start(SamplingParams(seed=1, max_tokens=99), sample=0, prompt_token_ids=[1, 2])
    pool = SimpleNamespace(block_size=16)
    forward = ModelForward(pool, node.cache, node.runner, node.sampler, 2048, VOCAB_SIZE)
    paths = [
        PathRows([5], 40, range(8), sampling, (), num_decisions, wants_distribution)
        for num_decisions, wants_distribution in ((1, True), (3, True), (2, False), (0, False))
    ]
    with OneDevice():
        decided = forward.decide(paths, [(0, 23)])
    assert reads == [6 + 2 * 2 * 32]
    assert [len(each.token_ids) for each in decided] == [1, 3, 2, 0]


@pytest.mark.usefixtures("gpu_memory")
def test_no_step_without_graphs_compiles_attention_or_takes_more_memory_than_were_tried(node, monkeypatch):
    """Some steps have a long context, whose keys our kernel splits and FlashAttention gathers."""
    gathered, own = [], FlashAttention.attend
    monkeypatch.setattr(
        FlashAttention, "attend", lambda *args: gathered.append(getattr(args[1], "max_seq_len", 0)) or own(*args)
    )
    Kernel.compiled.clear()
    open_runner.profile_run(node.loaded, node.attention, num_rows=64, block_size=16)
    warm, most = set(Kernel.compiled), max(gathered, default=0)
    assert {name for name, *_ in warm} == (set() if node.attention.name == "torch_sdpa" else {"attend", "merge_splits"})
    chunk, step = (SequenceRows(range(num), 2000 - num, [*range(24)] * 6, num_logits=1) for num in (300, 1))
    for rows in (BATCH, [BATCH[1]] * 3, [chunk], [step, *BATCH]):
        node.runner.forward(build_input_batch(rows, 16))
    assert warm == Kernel.compiled
    assert most == max(gathered, default=0) == (node.loaded.spec.max_model_len if gathered else 0)


@pytest.fixture
def gpu_memory(monkeypatch):
    """A GPU with 12 of 20 MB free. This process has reserved 1,000 bytes, and at most 9,000 in a step."""
    for name, value in (
        ("memory_reserved", 1000),
        ("max_memory_reserved", 9000),
        ("mem_get_info", (12_000_000, 20_000_000)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: None)
    monkeypatch.setattr("outrider.engine.memory.CONTEXT_BYTES", 499_000)


@pytest.mark.usefixtures("gpu_memory")
def test_the_pool_leaves_free_what_the_largest_step_takes(node):
    assert open_runner.profile_run(node.loaded, node.attention, num_rows=64, block_size=16) == 8000
    spec = node.loaded.spec
    num_blocks, *_ = pool_size(spec, KVCacheConfig(memory="50%"), KVMemory.of(str(GPU), 2_000_000))
    assert num_blocks == (10_000_000 - 500_000 - 2_000_000) // (16 * spec.bytes_per_token)
    assert len(node.loaded.make_cache(num_blocks, 16).scratch_blocks) == 1


@pytest.mark.usefixtures("gpu_memory")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("has_rollouts", [False, True])
def test_a_rehearsal_leaves_nothing_behind(node, monkeypatch, has_rollouts, is_fused):
    """Its cache and graphs are freed even if no garbage is collected. It captures the largest graphs only."""
    kept = []

    class Graph:
        def __call__(self):
            return

    def capture(run):
        run()
        kept.append(weakref.ref(graph := Graph()))
        return graph

    class Cache(PagedKVCache):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            kept.append(weakref.ref(self))

    if is_fused:
        empty = torch.empty((9, VOCAB_SIZE), device=GPU)
        forward = lambda batch, *_, **__: empty[: batch.num_logits]  # noqa: E731
        monkeypatch.setattr(node, "loaded", replace(node.loaded, fused=SimpleNamespace(forward=forward)))
    monkeypatch.setattr(runnable_model, "PagedKVCache", Cache)
    monkeypatch.setattr(module_steps, "cuda_graphs", lambda _device: capture)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        graphs = GraphShapes(8, has_trees=True, has_rollouts=has_rollouts)
        taken = open_runner.profile_run(node.loaded, node.attention, num_rows=64, block_size=16, graphs=graphs)
    finally:
        gc.enable()
    has_graphs = node.attention.can_be_captured
    assert len(kept) == 1 + 2 * has_graphs
    num_forwards = 4 + 2 + has_rollouts * 6 * (1 + 2 + 3 + 4 + 5 + 7)  # buckets of 1 to 8 rows; trees have 4 or 8
    layer_bytes = open_runner.FUSED_LAYER_BYTES if is_fused else open_runner.GRAPH_LAYER_BYTES
    assert taken == 8000 + has_graphs * num_forwards * node.loaded.spec.num_layers * layer_bytes
    assert [each for each in kept if each() is not None] == []


def test_a_captured_step_copies_its_batch_and_allocates_nothing(gpu):
    graphs = StepGraphs(
        GraphShapes(64, has_trees=True),
        device=GPU,
        scratch_blocks=(24,),
        block_size=16,
        capture=lambda run: run() or (lambda: None),
    )
    graphs.capture_all(lambda batch: batch.on(GPU).logits_rows.float().unsqueeze(1))
    with OneDevice(), Operations() as operations:
        for rows in (BATCH, [TREE, BATCH[1]], BATCH[:1]):
            batch = build_input_batch(rows, 16)
            assert graphs.run(batch).shape == (batch.num_logits, 1)
    assert operations.names <= {"aten.copy_.default", "aten.slice.Tensor", "aten.narrow.default"}


def test_rows_of_a_draft_tree_do_not_wait_either(node):
    with OneDevice():
        logits = node.runner.forward(build_input_batch([TREE, BATCH[1]], 16))
        node.cache.move_slots([(22, 21), (23, 22)])
    assert logits.shape == (5, VOCAB_SIZE)


def test_what_is_laid_out_ahead_is_not_on_the_gpu_before_its_token_ids_are(node):
    rows = [SequenceRows((0,), 20, range(8), 1), SequenceRows((0,), 7, range(8, 16), 1)]
    with OneDevice(), Operations() as operations:
        batch = node.runner.prepare_ahead(build_input_batch(rows, 16))
        assert not operations.names
        batch.arrays.token_ids[:] = array("q", (5, 6))
        logits = node.runner.forward(batch)
    assert logits.shape == (2, VOCAB_SIZE)


LONG_CHUNK = SequenceRows(range(300), 40, range(22), num_logits=0)
"""A chunk that FlashAttention computes if it is the backend."""


@pytest.mark.parametrize("chunk", [BATCH[2], LONG_CHUNK])
def test_a_forward_without_logits_reads_nothing(node, chunk):
    """The forward computes a chunk of a prompt."""
    done = []
    with OneDevice(), Operations() as operations:
        logits = node.runner.forward(build_input_batch([chunk], 16), on_layer_done=done.append)
    assert logits.shape == (0, VOCAB_SIZE)
    assert done == [0, 1]
    is_torch_s = chunk is LONG_CHUNK and node.attention.name == "varlen_attn"
    assert ("torch_attn._varlen_attn.default" in operations.names) is is_torch_s
