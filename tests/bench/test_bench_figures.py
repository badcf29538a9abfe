from __future__ import annotations

import pytest

from outrider.bench.load import Level, Pass, RequestRecord
from outrider.bench.machine import CpuMeter, CpuReading, others_cpu_share
from outrider.bench.measure import Percentiles, compare, figures_of, stream_rate
from outrider.client import KvTransferMetrics, RequestMetrics, SpeculationMetrics, Usage

ONE_CLIENT = Level(is_open_loop=False, value=1)


def record(*deltas, sent_at=0.0, error="", accepted=0, drafted=0, steps=0, token_ids=None):
    """Returns the record of a request whose `deltas` are (time, number of tokens)."""
    count = sum(number for _, number in deltas)
    return RequestRecord(
        prompt_id="a",
        kind="chat",
        sent_at=sent_at,
        finished_at=deltas[-1][0] if deltas else sent_at,
        token_times=deltas,
        token_ids=tuple(range(count)) if token_ids is None else token_ids,
        error=error,
        usage=Usage(num_prompt_tokens=10, num_cached_tokens=4, num_generated_tokens=count),
        metrics=RequestMetrics(
            kv_transfer=KvTransferMetrics(connector="grpc", bytes=100),
            speculation=SpeculationMetrics(
                num_spec_steps=steps, num_draft_tokens=drafted, num_accepted_draft_tokens=accepted
            ),
        ),
    )


def test_percentiles_interpolate_between_neighbours():
    found = Percentiles.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == Percentiles(p50=3.0, p90=pytest.approx(4.6), p99=pytest.approx(4.96))
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p90=7.0, p99=7.0)
    assert Percentiles.of([]) is None


def test_stream_rate_counts_from_the_first_delta_on():
    assert stream_rate(record((1.0, 3), (1.5, 2), (2.0, 3))) == pytest.approx(5.0)
    assert stream_rate(record((1.0, 3))) is None


def test_figures_of_a_level():
    passes = [
        Pass(records=(record((0.5, 1), (0.6, 2), (0.8, 1), accepted=2, drafted=8, steps=2),), wall_seconds=1.0),
        Pass(records=(record((2.0, 2), (2.2, 2), sent_at=1.5, accepted=1, drafted=4, steps=1),), wall_seconds=1.0),
    ]
    figures = figures_of(ONE_CLIENT, passes, speculation=True)
    assert figures.tokens_per_second == pytest.approx(8 / 2.0)
    assert figures.ttft_seconds.p50 == pytest.approx(0.5)
    assert figures.itl_seconds.p50 == pytest.approx(0.2)
    assert figures.acceptance_rate == pytest.approx(3 / 12)
    assert figures.mean_acceptance_length == pytest.approx(2.0)
    assert (figures.num_prompt_tokens, figures.num_cached_tokens, figures.kv_bytes) == (20, 8, 200)
    assert figures.others_cpu_share is None


def test_failed_answers_are_counted_and_give_no_tokens():
    passes = [Pass(records=(record((0.5, 9), error="NODE_LOST"), record((1.0, 1))), wall_seconds=1.0)]
    figures = figures_of(ONE_CLIENT, passes, speculation=False)
    assert figures.errors == {"NODE_LOST": 1}
    assert (figures.num_requests, figures.num_generated_tokens) == (2, 1)


def test_a_level_of_failures_has_no_figures():
    figures = figures_of(ONE_CLIENT, [Pass(records=(record(error="OVERLOADED"),), wall_seconds=1.0)], speculation=True)
    assert figures.ttft_seconds is None
    assert figures.tokens_per_second == 0.0


def test_comparison_takes_the_median_of_pairs():
    plain = [Pass(records=(record((1.0, 1), (2.0, 9)),), wall_seconds=wall) for wall in (1.0, 1.0, 1.0)]
    speculative = [Pass(records=(record((1.0, 1), (2.0, 9)),), wall_seconds=wall) for wall in (0.5, 0.8, 10.0)]
    comparison = compare(ONE_CLIENT, plain, speculative, are_answers_comparable=True)
    assert comparison.tokens_per_second_ratio == pytest.approx(1 / 0.8)
    assert comparison.ttft_ratio == pytest.approx(1.0)
    assert (comparison.num_identical_answers, comparison.num_compared_answers) == (3, 3)


def test_answers_that_differ_are_not_identical():
    plain = [Pass(records=(record((1.0, 2), token_ids=(1, 2)), record((1.0, 1), error="X")), wall_seconds=1.0)]
    other = [Pass(records=(record((1.0, 2), token_ids=(1, 3)), record((1.0, 1))), wall_seconds=1.0)]
    comparison = compare(ONE_CLIENT, plain, other, are_answers_comparable=True)
    assert (comparison.num_identical_answers, comparison.num_compared_answers) == (0, 1)


def test_others_share_is_of_all_spans_and_cores():
    first = CpuReading(elapsed_seconds=1.0, own_cpu_seconds=1.0, others_cpu_seconds=0.5, num_cores=2)
    second = CpuReading(elapsed_seconds=3.0, own_cpu_seconds=2.0, others_cpu_seconds=1.5, num_cores=2)
    assert others_cpu_share([first, second]) == pytest.approx(2.0 / 8.0)


def test_the_meter_counts_this_process_as_ours():
    meter = CpuMeter(())
    sum(range(2_000_000))
    reading = meter.stop()
    assert reading.own_cpu_seconds > 0.0
    assert 0.0 <= others_cpu_share([reading]) <= 1.0
