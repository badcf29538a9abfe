"""`python -m benchmarks.three_lines --simulated`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.three_lines.__main__ import main
from benchmarks.three_lines.decode_side import LineNode, TimedProposer
from benchmarks.three_lines.lines import Comparison, LineFigures, compare_lines, summary
from benchmarks.three_lines.models import ModelPair, mixed
from benchmarks.three_lines.simulation import SimulatedPair, Simulation, simulated_drafter
from outrider.bench.prompts import DEFAULT_PROMPTS as PROMPTS
from outrider.bench.prompts import load_prompts
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from tests.support.tiny_head import make_tiny_head
from tests.support.tiny_model import make_tiny_model

QUICK = Simulation(step_seconds=0.0, token_seconds=0.0, num_speculative_tokens=4, vocab_size=64)
PAIR = SimulatedPair(QUICK)


def test_a_round_trip_is_no_negative_time():
    with pytest.raises(SystemExit):
        main(["--simulated", "--draft-rtt-ms", "-1"])


@pytest.mark.parametrize(
    "arguments", [["--simulated", "--added-layers", "2"], ["--draft", "ngram", "--added-layers", "-2"]]
)
def test_layers_are_added_to_real_targets_only(arguments):
    with pytest.raises(SystemExit):
        main(arguments)


@pytest.mark.usefixtures("fixed_step_times")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_beside_the_target_changes_no_token(temperature):
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain = LineNode(PAIR, PAIR.engine())
    colocated = LineNode(PAIR, PAIR.engine(), beside=TimedProposer(simulated_drafter(QUICK, noises=[0.1])))
    answers = [node.answer(prompts, temperature=temperature, max_tokens=12) for node in (plain, colocated)]
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [12, 12]
    assert colocated.passed.counts.num_accepted_draft_tokens > 0
    assert plain.passed.counts.num_draft_tokens == 0


HEAD = SimulatedPair(replace(QUICK, acceptance=(0.9, 0.4), is_head=True))


@pytest.mark.usefixtures("fixed_step_times")
def test_a_simulated_head_beside_the_target_is_accepted_by_depth():
    engine = HEAD.engine()
    plain = LineNode(HEAD, HEAD.engine())
    colocated = LineNode(HEAD, engine, beside=TimedProposer(*HEAD.drafter_beside(engine, temperature=0.0)))
    prompts = HEAD.prompts(0, 4)
    assert colocated.answer(prompts, temperature=0.0, max_tokens=80) == plain.answer(
        prompts, temperature=0.0, max_tokens=80
    )
    counts = colocated.passed.counts
    reached = [sum(counts.acceptance_histogram[depth:]) for depth in range(1, len(counts.acceptance_histogram))]
    assert 0.75 < reached[0] / counts.num_spec_steps < 1.0
    assert 0.2 < reached[1] / reached[0] < 0.6


@pytest.mark.usefixtures("fixed_step_times", "one_thread")
def test_a_real_head_beside_the_target_changes_no_token(tmp_path):
    models = ModelPair.open(
        ModelConfig(id=str(make_tiny_model(tmp_path / "model"))),
        f"head:{make_tiny_head(tmp_path / 'head')}",
        kv_cache=KVCacheConfig(num_blocks=128),
        prompts_file=PROMPTS,
        draft_cpus=(),
    )
    prompts = [list(range(5, 30)), list(range(40, 52))]
    engine = models.engine()
    beside = TimedProposer(*models.drafter_beside(engine, temperature=0.0))
    colocated = LineNode(models, engine, beside=beside)
    plain = LineNode(models, models.engine())
    answers = [node.answer(prompts, temperature=0.0, max_tokens=12) for node in (plain, colocated)]
    assert answers[0] == answers[1]
    assert colocated.passed.counts.num_draft_tokens > 0
    assert models.features is not None
    assert models.feature_plane(engine) is not None
    assert "head" in models.description


def test_the_summary_has_every_line_in_order():
    figures = [
        LineFigures(
            line=line,
            temperature=temperature,
            tokens_per_second=1.0,
            speedup=speedup,
            predicted=3.0,
            acceptance_rate=0.5,
            hit_rate=0.9,
            explained=2.9,
            tokens_per_step=3.0,
            draft_tokens_per_step=4.0,
            step_seconds=0.03,
        )
        for line, speedup in (("plain", 1.0), ("colocated", 2.0), ("remote_0ms", 2.5), ("remote_1ms", 2.4))
        for temperature in (0.0, 1.0)
    ]
    assert summary(figures) == (
        "three-lines: plain=1.00 colocated=2.00 remote_0ms=2.50 remote_1ms=2.40 predicted_1ms=3.00"
    )


def test_all_lines_generate_the_same_tokens(is_full):
    if not is_full:
        pytest.skip("starts a process: make test-all")
    comparison = Comparison(
        pair=SimulatedPair(Simulation(step_seconds=0.01, token_seconds=0.0005)),
        round_trips_ms=(0.0, 5.0),
        max_tokens=24,
        has_both=True,
    )
    figures = asyncio.run(compare_lines(comparison))  # raises if tokens depend on drafts
    lines = ["plain", "colocated", "remote_0ms", "both_0ms", "remote_5ms", "both_5ms"]
    assert [each.line for each in figures] == lines * 2
    assert all(each.speedup > 0.0 for each in figures)


def test_real_models_generate_the_same_tokens_on_every_line(is_full):
    if not is_full:
        pytest.skip("loads a model and starts a process: make test-all")
    models = ModelPair.open(
        ModelConfig(), "ngram", kv_cache=KVCacheConfig(num_blocks=1024), prompts_file=PROMPTS, draft_cpus=()
    )
    comparison = Comparison(pair=models, round_trips_ms=(0.0,), max_tokens=24)
    figures = asyncio.run(compare_lines(comparison))  # raises if tokens depend on drafts
    assert [each.line for each in figures] == ["plain", "colocated", "remote_0ms"] * 2


def test_prompts_of_real_models_are_of_each_kind_by_turns():
    kinds = [prompt.kind for prompt in mixed(load_prompts(PROMPTS))]
    assert len(set(kinds[:3])) == 3
    assert kinds[:3] == kinds[3:6]
