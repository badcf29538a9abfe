"""With a tiny model and real connectors, what arrives is what a decode node would have computed itself."""

from __future__ import annotations

import os
import queue
import threading

import numpy as np
import pytest
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.engine import PromptEngine
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.engine.model_runner import make_runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.prefill import PrefillFigures
from prefill_node.jobs import Stop
from prefill_node.prefill_loop import PrefillLoop
from tests.prefill_node.conftest import job_of
from tests.support.fake_cuda_driver import fake_shared_gpu, put_caches_on_gpu
from tests.support.pool_integrity import check_pool
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import PATIENCE_SECONDS

INCARNATION = b"d" * 16
BLOCK_SIZE = 16
DECODE_BLOCK_SIZE = 8  # block sizes may differ on both sides
TOKENS = [3 + (7 * n) % 290 for n in range(150)]
REDUCTION = FeatureReduction(
    taps=(0, 3, 1), hidden_size=64, projection=torch.randn(48, 3 * 64, generator=torch.Generator().manual_seed(0))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")
    return load_model(ModelConfig(id=str(path))).with_features(REDUCTION)


def fresh_runner(model, *, block_size):
    cache = PagedKVCache(
        model.spec.planes,
        layer_groups=model.spec.layer_groups,
        num_blocks=64,
        block_size=block_size,
        kernels=model.cpu_kernels,
    )
    return cache, make_runner(model, cache, make_attention_backend("auto", model.device), features=REDUCTION)


def compute(runner, tokens, blocks, *, block_size):
    runner.forward(build_input_batch([SequenceRows(tokens, 0, blocks, 0)], block_size))


def on_fake_gpu(monkeypatch, directory):
    """Returns (model, gpu), with caches as they would be on a GPU."""
    gpu, _ = fake_shared_gpu(monkeypatch, directory)
    put_caches_on_gpu(gpu, monkeypatch)
    path = make_tiny_model(directory / "tiny")
    return load_model(ModelConfig(id=str(path), kernels="torch")).with_features(REDUCTION), gpu


@pytest.mark.parametrize("connector_name", ["grpc", "shared_memory", "cuda_ipc"])
def test_pushed_kv_and_features_equal_those_computed_in_one_pass(model, connector_name, monkeypatch, tmp_path):
    gpu = None
    if connector_name == "cuda_ipc":
        model, gpu = on_fake_gpu(monkeypatch, tmp_path)
    decode_cache, decode_runner = fresh_runner(model, block_size=DECODE_BLOCK_SIZE)
    blocks = list(range(5, 5 + 19))
    news: queue.SimpleQueue = queue.SimpleQueue()
    receiver = KvReceiver(
        incarnation=INCARNATION,
        host="127.0.0.1",
        on_complete=lambda transfer_id, stats: news.put(stats),
        on_failed=lambda transfer_id, reason: news.put(reason),
        gpu=gpu,
    )
    port = receiver.start()

    cache, runner = fresh_runner(model, block_size=BLOCK_SIZE)
    pool = BlockPool(num_blocks=64, block_size=BLOCK_SIZE, hash_seed=b"seed")
    scheduler = Scheduler(pool, max_running=4, max_rows_per_step=64, reserve_blocks_per_running=0)
    engine = PromptEngine(pool, scheduler, cache, runner)
    ended: queue.SimpleQueue = queue.SimpleQueue()
    config = KvTransferConfig(
        connector=connector_name, frame_bytes=8192, device_frame_bytes=16384, device_arena_bytes=1 << 20
    )
    connector = Connector(config, gpu=gpu)
    loop = PrefillLoop(
        engine=engine,
        connector=connector,
        frame_bytes=8192,
        profiler=StepProfiler(engine.clock, runner.phases),
        emit=lambda ends, stats: [ended.put(end.result) for end in ends],
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        for attempt, (tokens, held, num_cached, num_read) in enumerate(
            [
                (TOKENS, 21, 0, 0),
                (TOKENS, 21, 144, 0),  # pushed from the prefix cache
                (TOKENS[::-1], 101, 0, 101),  # computed after 101 tokens whose KV was read
            ]
        ):
            compute(decode_runner, tokens[:held], blocks, block_size=DECODE_BLOCK_SIZE)
            transfer_id = os.urandom(16)
            ids = {"transfer_id": transfer_id, "incarnation": INCARNATION}
            spec = TransferSpec(**ids, start_token=held, end_token=150, planes=model.spec.planes)
            receiver.inbox.open(spec, ReservedBlocks(decode_cache, blocks))
            where = {"transfer_id": transfer_id, "address": f"127.0.0.1:{port}", "incarnation": INCARNATION}
            loop.submit(job_of(attempt, tokens, held=held, may_read_held=num_read > 0, **where))
            result = ended.get(timeout=PATIENCE_SECONDS)
            assert isinstance(result, PrefillFigures), result
            assert (result.num_cached_tokens, result.num_read_tokens) == (num_cached, num_read)
            assert result.connector == news.get(timeout=PATIENCE_SECONDS).connector == connector_name
            assert_equal_to_one_pass(model, tokens, decode_cache, blocks)
            wipe(decode_cache)
            receiver.close(transfer_id)
    finally:
        loop.submit(Stop())
        thread.join(PATIENCE_SECONDS)
        connector.close()
        receiver.stop()
    check_pool(pool, [])


def assert_equal_to_one_pass(model, tokens, decode_cache, blocks):
    cache, runner = fresh_runner(model, block_size=BLOCK_SIZE)
    own_blocks = list(range(10))
    compute(runner, tokens, own_blocks, block_size=BLOCK_SIZE)
    assert [plane.name for plane in cache.planes] == ["k", "v", REDUCTION.plane_name]
    for plane in cache.planes:
        layers = range(plane.num_layers)
        wanted = cache.read(plane.name, layers, slots_of(own_blocks, len(tokens), BLOCK_SIZE))
        arrived = decode_cache.read(plane.name, layers, slots_of(blocks, len(tokens), DECODE_BLOCK_SIZE))
        if model.info.numerics.startswith("exact ("):
            assert bytes(arrived) == bytes(wanted), plane.name
        torch.testing.assert_close(
            *(torch.from_numpy(payload).view(TORCH_DTYPES[model.spec.dtype]) for payload in (arrived, wanted)),
            rtol=1e-3,  # torch's products depend on the number of rows
            atol=1e-3,
        )


def wipe(cache):
    """Overwrites the cache, so that the next push must bring everything."""
    slots = np.arange(cache.num_blocks * cache.block_size)
    for plane in cache.planes:
        layers = range(plane.num_layers)
        cache.write(plane.name, layers, slots, bytes(len(cache.read(plane.name, layers, slots))))
