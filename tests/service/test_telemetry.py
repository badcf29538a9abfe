from __future__ import annotations

import io
import json
import logging
import sys
import urllib.request
from types import SimpleNamespace

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from outrider.answer import RequestMetrics, Summary, Usage
from outrider.lossy_stream import LossyStream
from outrider.node import NodeLoad
from outrider.request import FinishReason
from outrider.service.config import ServerConfig, TelemetryConfig
from outrider.service.server import serve_metrics
from outrider.service.telemetry.logging import configure_logging, get_logger
from outrider.service.telemetry.metrics import ITL_BUCKETS, MAX_ADAPTERS, EngineMetrics, PrefillMetrics, RouterMetrics
from outrider.session import SpeculationCounts


@pytest.fixture
def log_to():
    """Yields a function that sends the process's log to a string buffer. Restores everything afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def configure(**settings) -> io.StringIO:
        stream = io.StringIO()
        configure_logging(TelemetryConfig(**settings), role="router", stream=stream)
        return stream

    yield configure
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_an_event_is_one_json_line_with_its_request_and_role(log_to):
    stream = log_to(log_format="json")
    get_logger("flow").info("request admitted", request_id="r1", num_prompt_tokens=7)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp")
    assert event == {
        "level": "info", "role": "router", "component": "flow", "event": "request admitted", "request_id": "r1",
        "num_prompt_tokens": 7,
    }  # fmt: skip


@pytest.mark.parametrize(("log_text", "is_there"), [(False, False), (True, True)])
def test_prompt_text_is_logged_only_when_asked_for(log_to, log_text, is_there):
    stream = log_to(log_format="json", log_text=log_text)
    get_logger("flow").info("request admitted", text="a secret prompt")
    assert ("a secret prompt" in stream.getvalue()) is is_there


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_trace_does_not_show_what_variables_hold(log_to, log_format):
    stream = log_to(log_format=log_format)

    def fail(prompt: str) -> None:
        raise ValueError(f"a prompt of {len(prompt)} characters")

    try:
        fail("a secret " + "prompt")
    except ValueError:
        get_logger("flow").exception("internal error")
    assert "a prompt of 15 characters" in stream.getvalue()
    assert "secret prompt" not in stream.getvalue()


def test_lost_log_lines_are_counted_on_every_service(monkeypatch):
    def full(_text: str) -> None:
        raise OSError

    monkeypatch.setattr("sys.stderr", LossyStream(full))
    sys.stderr.write("one\ntwo\n")
    sys.stderr.drain()
    for metrics in (EngineMetrics, PrefillMetrics, RouterMetrics):
        registry = CollectorRegistry()
        metrics(model_name="m", registry=registry)
        assert exported(registry)['outrider:log_lines_lost_total{model_name="m"}'] == 2


def test_the_level_and_other_libraries_are_respected(log_to):
    stream = log_to(log_format="text", log_level="warning")
    get_logger("flow").info("too quiet")
    logging.getLogger("grpc").warning("from a library")
    logging.getLogger("grpc").info("chatter")
    (line,) = stream.getvalue().splitlines()
    assert "from a library" in line


def test_a_trace_stays_on_one_json_line(log_to):
    stream = log_to(log_format="json")
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        get_logger("flow").error("internal error", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_type"] == "RuntimeError"


def exported(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_the_work_of_ranks_is_counted_from_totals():
    registry = CollectorRegistry()
    metrics = EngineMetrics(model_name="m", registry=registry)
    for rows in ((3, 0), (5, 4)):
        metrics.set_ranks(rows_by_rank=rows, num_expert_copies=2, expert_balance=1.5)
    found = exported(registry)
    assert [found[f'outrider:rank_rows_total{{model_name="m",rank="{rank}"}}'] for rank in range(2)] == [5.0, 4.0]
    assert found['outrider:expert_copies{model_name="m"}'] == 2.0
    assert found['outrider:expert_balance{model_name="m"}'] == 1.5


def test_engine_metrics_have_the_names_of_vllm():
    registry = CollectorRegistry()
    metrics = EngineMetrics(model_name="m", registry=registry)
    metrics.set_load(NodeLoad(num_running=3, num_waiting=1, kv_blocks_total=8, kv_blocks_free=2))
    metrics.add_tokens(num_prompt_tokens=5, num_generated_tokens=2)
    metrics.add_prefix_lookup(num_query_tokens=10, num_hit_tokens=4)
    metrics.add_preemptions(1)
    metrics.observe_step(seconds=0.02, num_rows=9)
    metrics.add_step_parts({"forward": 15_000_000, "emit": 1_000_000})
    metrics.add_speculation(
        SpeculationCounts(
            num_spec_steps=3,
            num_draft_tokens=6,
            num_accepted_draft_tokens=3,
            acceptance_histogram=(1, 1, 1),
            num_wanting_steps=4,
            num_hit_steps=3,
        )
    )
    metrics.observe_transfer(connector="shared_memory", num_bytes=100, seconds=0.01, exposed_seconds=0.002)
    metrics.add_verified_drafts({}, num_tokens_by_source={"ngram": 5}, num_accepted_by_source={"ngram": 2})
    metrics.add_dropped_frames("stale", 1)
    metrics.add_refused_proposals("too_long", 2)
    metrics.set_breakers({"127.0.0.1:1": True})
    metrics.show_cache(num_blocks=20, block_size=16, has_prefix_cache=True)
    figures = exported(registry)
    label = 'model_name="m"'
    cache = 'block_size="16",enable_prefix_caching="True"'
    assert figures[f'vllm:cache_config_info{{{cache},{label},num_gpu_blocks="20"}}'] == 1
    assert figures[f"vllm:num_requests_running{{{label}}}"] == 3
    assert figures[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0.75
    assert figures[f"vllm:generation_tokens_total{{{label}}}"] == 2
    assert figures[f"vllm:spec_decode_num_accepted_tokens_total{{{label}}}"] == 3
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert figures[f'{per_position}{{{label},position="0"}}'] == 2
    assert figures[f'outrider:source_draft_tokens_total{{{label},source="ngram"}}'] == 5
    assert figures[f'outrider:source_accepted_tokens_total{{{label},source="ngram"}}'] == 2
    assert figures[f'{per_position}{{{label},position="1"}}'] == 1
    assert figures[f'outrider:step_part_seconds_total{{{label},part="forward"}}'] == 0.015
    assert figures[f'outrider:kv_frames_dropped_total{{{label},reason="stale"}}'] == 1
    assert figures[f'outrider:draft_breaker_open{{{label},target="127.0.0.1:1"}}'] == 1
    metrics.set_breakers({"127.0.0.1:2": False})
    assert figures[f"outrider:host_kv_bytes{{{label}}}"] == 0
    host = SimpleNamespace(num_bytes=640, num_saved=5, num_loaded=3, num_dropped=2, num_refused=1)
    metrics.show_cache(num_blocks=20, block_size=16, has_prefix_cache=True, host=host)
    figures = exported(registry)
    assert figures[f"outrider:host_kv_bytes{{{label}}}"] == 640
    for ending, number in {"saved": 5, "loaded": 3, "dropped": 2, "refused": 1}.items():
        assert figures[f"outrider:host_kv_blocks_{ending}_total{{{label}}}"] == number
    breakers = {name: value for name, value in exported(registry).items() if "breaker" in name}
    assert breakers == {f'outrider:draft_breaker_open{{{label},target="127.0.0.1:2"}}': 0}


def test_router_metrics_have_the_names_of_vllm():
    registry = CollectorRegistry()
    metrics = RouterMetrics(model_name="m", registry=registry)
    metrics.follow_waiting(lambda: 5)
    metrics.observe_admitted(queue_seconds=0.1, num_prompt_tokens=7)
    metrics.observe_first_token(0.2)
    metrics.observe_tokens(1, None)
    metrics.observe_tokens(4, 0.08)
    metrics.observe_finished_sample(FinishReason.ABORTED)
    times = RequestMetrics(queue_seconds=0.1, ttft_seconds=0.5, e2e_seconds=1.5)
    usage = Usage(num_prompt_tokens=7, num_generated_tokens=5)
    metrics.observe_finished_request(Summary(request_id="r", usage=usage, metrics=times), num_longest=4)
    metrics.add_failures("OVERLOADED", 1)
    metrics.add_lost_nodes("decode", 1)
    figures = exported(registry)
    label = 'model_name="m"'
    assert figures[f"vllm:generation_tokens_total{{{label}}}"] == 5
    assert figures[f"vllm:inter_token_latency_seconds_sum{{{label}}}"] == pytest.approx(0.02)
    assert figures[f"vllm:time_to_first_token_seconds_count{{{label}}}"] == 1
    assert figures[f'vllm:request_success_total{{finished_reason="abort",{label}}}'] == 1
    assert figures[f"vllm:e2e_request_latency_seconds_sum{{{label}}}"] == 1.5
    for part, seconds in {"prefill": 0.4, "decode": 1.0, "inference": 1.4}.items():
        assert figures[f"vllm:request_{part}_time_seconds_sum{{{label}}}"] == pytest.approx(seconds)
    for name, number in {"prompt": 7, "generation": 5, "max_num_generation": 4}.items():
        assert figures[f"vllm:request_{name}_tokens_sum{{{label}}}"] == number
    assert figures[f"vllm:num_requests_waiting{{{label}}}"] == 5


def test_further_adapters_share_their_series():
    registry = CollectorRegistry()
    metrics = RouterMetrics(model_name="m", registry=registry)
    times = RequestMetrics(queue_seconds=0.1, ttft_seconds=0.5, e2e_seconds=1.5)
    summary = Summary(request_id="r", usage=Usage(num_prompt_tokens=7, num_generated_tokens=5), metrics=times)
    metrics.observe_finished_request(summary, num_longest=4, adapter="v0")
    num_lines = len(generate_latest(registry).splitlines())
    for number in range(10 * MAX_ADAPTERS):
        metrics.observe_finished_request(summary, num_longest=4, adapter=f"v{number}")
    labels = {"model_name": "m", "adapter": "other"}
    assert registry.get_sample_value("outrider:adapter_requests_total", labels) == 9 * MAX_ADAPTERS
    assert registry.get_sample_value("outrider:adapter_requests_total", labels | {"adapter": "v0"}) == 2
    num_series = 8  # of one adapter: four counters, each with the time of its creation
    assert len(generate_latest(registry).splitlines()) == num_lines + num_series * MAX_ADAPTERS


def test_what_autoscaling_asks_for_is_read_at_each_scrape():
    registry = CollectorRegistry()
    router = RouterMetrics(model_name="m", registry=registry)
    label = '{model_name="m"}'
    assert exported(registry)[f"outrider:oldest_wait_seconds{label}"] == 0
    wait = iter([1.5, 2.5])
    router.follow_running(lambda: 2)
    router.follow_waiting(lambda: 5)
    router.follow_waiting_tokens(lambda: 700)
    router.follow_oldest_wait(lambda: next(wait))
    assert exported(registry)[f"outrider:oldest_wait_seconds{label}"] == 1.5
    figures = exported(registry)
    assert figures[f"outrider:oldest_wait_seconds{label}"] == 2.5
    assert figures[f"outrider:waiting_prompt_tokens{label}"] == 700
    assert (figures[f"vllm:num_requests_running{label}"], figures[f"vllm:num_requests_waiting{label}"]) == (2, 5)
    registry = CollectorRegistry()
    prefill = PrefillMetrics(model_name="m", registry=registry)
    prefill.follow_outstanding(lambda: 90)
    prefill.follow_saturation(lambda: 0.75)
    figures = exported(registry)
    assert figures[f"outrider:prefill_outstanding_tokens{label}"] == 90
    assert figures[f"outrider:prefill_saturation{label}"] == 0.75
    assert figures[f"vllm:num_requests_running{label}"] == 0


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # Prometheus 2
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,*/*;q=0.1",  # Prometheus 3
        "*/*",
    ],
)
def test_names_keep_their_colons_whatever_format_is_asked_for(accept):
    registry = CollectorRegistry()
    Counter("outrider:things", "Some things.", registry=registry).inc()
    server = serve_metrics(ServerConfig(metrics_port=0), registry=registry)
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "outrider:things_total 1.0" in answer.read().decode().splitlines()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("names", [[], ["vllm:generation_tokens_total"]])
def test_tokens_are_counted_when_metrics_are_read_all_of_them_or_one_by_name(names):
    registry = CollectorRegistry()
    metrics = RouterMetrics(model_name="m", registry=registry)
    metrics.observe_tokens(7, None)
    read = registry.restricted_registry(names) if names else registry
    assert 'vllm:generation_tokens_total{model_name="m"} 7.0' in generate_latest(read).decode()


def test_what_a_router_may_count_is_there_before_it_has_happened():
    registry = CollectorRegistry()
    RouterMetrics(model_name="m", registry=registry)
    exported = generate_latest(registry).decode().splitlines()
    for reason in ("stop", "length", "abort"):
        assert f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}} 0.0' in exported
    for role in ("prefill", "decode", "draft"):
        assert f'outrider:nodes_lost_total{{model_name="m",role="{role}"}} 0.0' in exported


def test_counts_are_summed_as_they_are_added():
    parts = [
        SpeculationCounts(
            num_spec_steps=1, num_draft_tokens=3, num_accepted_draft_tokens=2, acceptance_histogram=(0, 0, 1)
        ),
        SpeculationCounts(num_wanting_steps=1, num_hit_steps=1),
        SpeculationCounts(num_spec_steps=2, num_draft_tokens=4, acceptance_histogram=(2,), num_wanting_steps=2),
    ]
    assert SpeculationCounts.total([*parts, parts[0]]) == SpeculationCounts(
        num_spec_steps=4,
        num_draft_tokens=10,
        num_accepted_draft_tokens=4,
        acceptance_histogram=(2, 0, 2),
        num_wanting_steps=3,
        num_hit_steps=1,
    )
    assert SpeculationCounts.total([]) == SpeculationCounts()


def test_times_between_tokens_are_counted_in_buckets_as_prometheus_does():
    registry, expected = CollectorRegistry(), CollectorRegistry()
    metrics = RouterMetrics(model_name="m", registry=registry)
    name = "vllm:inter_token_latency_seconds"
    histogram = Histogram(name, "", ("model_name",), registry=expected, buckets=ITL_BUCKETS)
    for num_tokens, seconds in [(1, 0.01), (2, 0.06), (1, 0.011), (3, 240.0), (1, 100.0), (1, 0.0)]:
        metrics.observe_tokens(num_tokens, seconds)
        histogram.labels("m").observe(seconds / num_tokens)

    def samples(of):
        lines = generate_latest(of).decode().splitlines()
        return sorted(line for line in lines if line.startswith(f"{name}_") and "created" not in line)

    assert len(samples(registry)) == len(ITL_BUCKETS) + 3
    assert samples(registry) == samples(expected)
