"""Nodes that start at the same time on one GPU. Locks and sizes are real; torch's allocator and models are fakes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.gpus import assign_gpus
from outrider.config.resolve import load_config
from outrider.engine import open_runner, runnable_model
from outrider.engine.gpu_turns import loading_turn
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_spec import ModelSpec
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.progress import no_progress
from tests.support.fake_gpu_memory import FakeGpuMemory

H100_BYTES = 85_017_755_648
GB = 1_000_000_000
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256,
    max_model_len=131_072, dtype="bfloat16",
)  # fmt: skip
LLAMA_1B = replace(LLAMA_8B, num_layers=16, head_dim=64)


@dataclass(frozen=True)
class Kind:
    """A kind of node: what it computes, and the memory that it needs."""

    spec: ModelSpec
    weight_bytes: int
    num_rows: int
    step_bytes: int  # the largest step's
    graphs: GraphShapes | None = None
    graph_bytes: int = 0  # memory of all graphs, in torch's pools


KINDS = {
    "prefill": Kind(LLAMA_8B, 16_060_522_496, 4096, 700 << 20, GraphShapes(has_logits=False), 200 << 20),
    "decode": Kind(LLAMA_8B, 16_060_522_496, 512, 400 << 20, GraphShapes(512, has_trees=True), 1200 << 20),
    "draft": Kind(LLAMA_1B, 2_471_645_608, 512, 200 << 20, GraphShapes(has_rollouts=True), 300 << 20),
}


class Runner:
    """A runner that takes as much memory as its node's steps."""

    is_asynchronous = True

    def __init__(self, gpu, kind, graphs):
        self.gpu, self._kind = gpu, kind
        self.padded_rows = () if graphs is None else graphs.row_counts

    def forward(self, batch):
        num_bytes = self._kind.step_bytes * batch.num_rows // self._kind.num_rows
        self.gpu.take(num_bytes)
        self.gpu.free(num_bytes)

    def capture_graphs(self):
        self.gpu.take(self._kind.graph_bytes)
        self._kept = Kept(self.gpu, self._kind.graph_bytes)


class Kept:
    def __init__(self, gpu, num_bytes):
        self._gpu, self._num_bytes = gpu, num_bytes

    def __del__(self):
        self._gpu.free(self._num_bytes)


class Node:
    """The start of one process, as `open_model_runtime` does it."""

    def __init__(self, gpu, name, memory, *, max_model_len=0):
        self.gpu, self.name, self.kind = gpu, name, KINDS[name.partition("-")[0]]
        self.config = KVCacheConfig(memory=memory)
        self.max_model_len = max_model_len

    def start(self):
        spec = self.kind.spec
        if self.max_model_len:
            spec = replace(spec, max_model_len=self.max_model_len)
        with loading_turn(["cuda"], no_progress):
            for _ in range(8):
                self.gpu.take(self.kind.weight_bytes // 8)
                time.sleep(0.001)
            model = RunnableModel(model=self, native=None, fused=self, device="cuda", spec=spec)
            self.cache, self.runner, self.window = open_runner.open_runner(
                model,
                "auto",
                self.config,
                num_rows=self.kind.num_rows,
                graphs=self.kind.graphs,
                may_shorten=not self.max_model_len,
            )
        self.gpu.take(self.kind.step_bytes)  # the largest step runs while others start
        return self


def in_a_process(run):
    """Runs a function in a thread of its own, unlike an executor, and returns a future."""
    future = Future()

    def complete():
        try:
            future.set_result(run())
        except Exception as error:  # noqa: BLE001 raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=complete).start()
    return future


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(total_bytes, shares by node) starts all nodes at the same time on one GPU, and returns them by name."""

    class Cache(PagedKVCache):
        def __init__(self, planes, *, num_blocks, block_size, device, num_scratch_blocks, **_options):
            self.planes, self.num_blocks, self.block_size, self.device = planes, num_blocks, block_size, device
            self.scratch_blocks, self.num_tables = (num_blocks,), 1
            per_token = sum(plane.bytes_per_token for plane in planes)
            num_bytes = (num_blocks + num_scratch_blocks) * block_size * per_token
            gpus[0].take(num_bytes)
            self._kept = Kept(gpus[0], num_bytes)

    gpus = []
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runnable_model, "PagedKVCache", Cache)
    monkeypatch.setattr(open_runner, "make_attention_backend", lambda *_arguments, **_heads: None)
    monkeypatch.setattr(
        open_runner,
        "make_runner",
        lambda model, _cache, _attention, *, graphs, features: Runner(gpus[0], model.model.kind, graphs),
    )

    def start_all(total_bytes, shares, **keywords):
        gpus[:] = [FakeGpuMemory(total_bytes)]
        gpus[0].patch(monkeypatch)
        nodes = [Node(gpus[0], name, memory, **keywords) for name, memory in shares.items()]
        started = [in_a_process(node.start) for node in nodes]
        wait(started, timeout=60)
        return {node.name: node for node in [each.result() for each in started]}

    return start_all


def shares_of(**config):
    settings = load_config(
        {"model": ModelConfig, "kv_cache": KVCacheConfig}, file=None, environ={}, overrides=["model.device=cuda"]
    )
    found = assign_gpus(ClusterConfig(**config), settings, environ={"CUDA_VISIBLE_DEVICES": "0"})[1]
    return {name: texts[-1].removeprefix("kv_cache.memory=") for name, texts in found.items()}


def windows(nodes):
    return {name: node.window for name, node in nodes.items()}


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("total_bytes", [80 * GB, H100_BYTES])
def test_a_prefill_and_a_decode_node_of_an_8b_model_fit_with_default_settings(start, total_bytes, attempt):
    nodes = start(total_bytes, shares_of())
    assert windows(nodes) == {"prefill-0": 131_072, "decode-0": 131_072}
    assert nodes["decode-0"].gpu.min_free > 0.05 * total_bytes


@pytest.mark.parametrize("attempt", range(2))
def test_a_draft_model_fits_beside_them(start, attempt):
    """Its window may be shorter, since it need not draft for sequences that are longer."""
    shares = shares_of(draft="draft_model:small")
    assert set(shares) == {"prefill-0", "decode-0", "draft-0"}
    nodes = start(H100_BYTES, shares)
    found = windows(nodes)
    assert found.pop("draft-0") >= 65_536
    assert found == {"prefill-0": 131_072, "decode-0": 131_072}
    assert nodes["decode-0"].gpu.min_free > 0.05 * H100_BYTES
    shorter = windows(start(80 * GB, shares))
    assert 110_000 < shorter["prefill-0"] < 131_072


def test_two_prefill_and_two_decode_nodes_have_no_room_for_their_weights_and_say_so(start):
    with pytest.raises(
        ConfigError, match=r"131072 tokens needs [\d,]+ .*kv_cache\.memory gives [\d,]+ after [\d,]+ for"
    ):
        start(70 * GB, shares_of(prefill_nodes=2, decode_nodes=2))


def test_a_window_that_does_not_fit_is_shortened_with_a_warning_unless_it_is_wanted(start, capsys):
    assert windows(start(48 * GB, {"prefill-0": ""})) == {"prefill-0": 131_072}
    assert capsys.readouterr().err == ""
    assert windows(start(48 * GB, {"prefill-0": "1GiB"})) == {"prefill-0": 8192}
    assert capsys.readouterr().err == (
        "not enough memory for the model's window of 131072 tokens: "
        "sequences have at most 8192. Set model.max_model_len, or give more memory (kv_cache.memory)\n"
    )
    with pytest.raises(ConfigError, match=r"one window of 9000 tokens needs .* model.max_model_len to 8192 or lower"):
        start(48 * GB, {"prefill-0": "1GiB"}, max_model_len=9000)
    assert windows(start(48 * GB, {"prefill-0": "1GiB"}, max_model_len=8000)) == {"prefill-0": 8000}


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_what_others_take_and_free_during_the_rehearsal_is_not_this_nodes(start, monkeypatch, name):
    alone = start(80 * GB, {name: "45%"})[name].cache.num_blocks
    own_forward = Runner.forward

    def disturbed(runner, batch):
        own_forward(runner, batch)
        in_a_process(lambda: runner.gpu.take(GB)).result(timeout=30)

    monkeypatch.setattr(Runner, "forward", disturbed)
    assert start(80 * GB, {name: "45%"})[name].cache.num_blocks == alone
