"""The GPU memory of a process, and a rehearsal's estimate of the memory that steps and graphs take."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.gpu_turns import loading_turn
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.memory import KVMemory
from outrider.engine.open_runner import open_runner, profile_run
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.progress import no_progress

pytestmark = pytest.mark.gpu

SLACK_BYTES = 256 << 20
"""Difference allowed between estimates and the driver's allocations, in bytes."""


def test_a_process_knows_its_own_part(tmp_path, monkeypatch):
    free, total = torch.cuda.mem_get_info("cuda")
    before = KVMemory.of("cuda").own_bytes
    assert 0 < before <= total - free + SLACK_BYTES
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert KVMemory.of("cuda").own_bytes - before == pytest.approx(kept.nbytes, abs=64 << 20)
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    with loading_turn(["cuda", "cuda:0"], no_progress):
        (lock,) = (tmp_path / "locks").iterdir()
    assert len(lock.name) > len("gpu-") + 8


def test_a_rehearsal_foresees_what_steps_and_graphs_take(tiny_model):
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="bfloat16"))
    heads = {"num_heads": model.spec.num_heads, "num_kv_heads": model.spec.num_kv_heads}
    attention = make_attention_backend("triton", model.device, model.spec.dtype, **heads)
    shapes = GraphShapes(256, has_trees=True)
    foreseen = profile_run(model, attention, num_rows=512, block_size=16, graphs=shapes)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info("cuda")[0]
    _, runner, _ = open_runner(model, "triton", KVCacheConfig(num_blocks=256), num_rows=512, graphs=shapes)
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info("cuda")[0] - 256 * 16 * model.spec.bytes_per_token
    print(f"foreseen {foreseen >> 20} MiB, taken {taken >> 20} MiB, of others on this GPU too")
    assert taken <= foreseen + SLACK_BYTES
    assert runner.padded_rows[-1] == 256
