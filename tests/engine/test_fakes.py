from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from outrider.engine.fakes import (
    FakeClock,
    ScriptedKVCache,
    ScriptedModel,
    ScriptedModelRunner,
    ScriptedRows,
    ScriptedSampler,
    greedy,
)
from outrider.errors import InternalError
from outrider.request import SamplingParams

BLOCK = 4


@pytest.fixture
def runner() -> ScriptedModelRunner:
    return ScriptedModelRunner(ScriptedModel(), ScriptedKVCache(num_blocks=8, block_size=BLOCK))


@dataclass(frozen=True)
class FakeSampleRows:
    state: object
    draft_token_ids: tuple[int, ...] = ()
    assumed_token_ids: tuple[int, ...] = ()


def test_a_fake_clock_moves_when_told():
    clock = FakeClock(5.0)
    clock.advance(1.5)
    assert clock() == 6.5


def test_the_model_is_a_function_of_its_context():
    assert ScriptedModel(seed=1).generate([1, 2, 3], 20) == ScriptedModel(seed=1).generate([1, 2, 3], 20)
    assert ScriptedModel(seed=1).generate([1, 2, 3], 20) != ScriptedModel(seed=2).generate([1, 2, 3], 20)
    assert ScriptedModel(seed=1).generate([1, 2, 3], 20) != ScriptedModel(seed=1).generate([2, 2, 3], 20)


def test_a_model_of_low_order_repeats_itself():
    tokens = ScriptedModel(vocab_size=6, order=1).generate([0], 40)
    assert tokens[-6:] in [tokens[start : start + 6] for start in range(28)]


def test_ties_go_to_the_lowest_id():
    assert greedy([0.5, 2.0, 2.0]) == 1


def test_chunks_and_drafts_give_what_one_row_at_a_time_gives(runner):
    blocks = [5, 2, 7]
    prompt = [3, 1, 4, 1, 5]
    expected = runner.model.generate(prompt, 3)
    assert runner.forward([ScriptedRows(prompt[:3], 0, blocks, 0)]) == []
    assert runner.target_token_ids([ScriptedRows([*prompt[3:], *expected[:2]], 3, blocks, 3)]) == expected
    assert runner.num_rows == [3, 4]


def test_layers_are_announced_in_order_after_they_are_written(runner):
    seen = []

    def on_layer_done(layer: int) -> None:
        seen.append((layer, bytes(runner.kv_cache.read("k", range(layer, layer + 1), [4, 5]))))

    runner.forward([ScriptedRows([9, 8], 0, [1], 0)], on_layer_done=on_layer_done)
    expected = (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert seen == [(0, expected), (1, expected)]


def test_kv_that_was_never_written_is_an_error(runner):
    with pytest.raises(InternalError, match="position 0"):
        runner.forward([ScriptedRows([1], 2, [0], 1)])


def test_kv_moves_between_caches_of_different_block_sizes():
    model = ScriptedModel()
    source = ScriptedModelRunner(model, ScriptedKVCache(num_blocks=4, block_size=8))
    target = ScriptedModelRunner(model, ScriptedKVCache(num_blocks=8, block_size=2))
    prompt = [3, 1, 4, 1, 5]
    source.forward([ScriptedRows(prompt[:4], 0, [2], 0)])
    for plane in source.kv_cache.planes:
        payload = source.kv_cache.read(plane.name, range(2), [16, 17, 18, 19])
        assert payload.size == 4 * 2 * plane.bytes_per_token_per_layer
        target.kv_cache.write(plane.name, range(2), [6, 7, 12, 13], payload.data)
    assert target.target_token_ids([ScriptedRows(prompt[4:], 4, [3, 6, 0], 1)]) == model.generate(prompt, 1)


def test_a_payload_of_the_wrong_size_is_refused(runner):
    with pytest.raises(InternalError):
        runner.kv_cache.write("k", range(2), [0, 1], bytes(12))


def test_the_sampler_counts_drafts_for_min_tokens():
    sampler = ScriptedSampler()
    params = SamplingParams(seed=0, max_tokens=9, min_tokens=2)
    state = sampler.start(params, sample=0, prompt_token_ids=[1], stop_token_ids=[0])
    stop_is_best = [3.0, 1.0, 2.0]
    sampled = sampler.sample([stop_is_best] * 3, [FakeSampleRows(state, (2, 2))])
    assert sampled.token_ids == [2, 2, 0]
    sampler.commit(state, [2, 2])
    assert sampler.sample([stop_is_best], [FakeSampleRows(state)]).token_ids == [0]


def test_bookkeeping_scheduler_and_fakes_do_without_torch():
    modules = "outrider.engine.fakes, outrider.engine.scheduler, outrider.engine.kv_cache.sequence_kv"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
