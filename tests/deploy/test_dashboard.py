"""Grafana's dashboard reads only metrics that Outrider exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from outrider.service.telemetry.metrics import EngineMetrics, PrefillMetrics, RouterMetrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "outrider.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
SCRAPE_LABELS = {"instance", "job", "service"}  # set by deploy/prometheus/prometheus.yaml
HISTOGRAM_SUFFIXES = {"_bucket": {"le"}, "_sum": set(), "_count": set()}
SERIES = re.compile(r"(?P<rate>\b(?:rate|irate|increase)\()?(?P<name>(?:vllm|outrider):\w+)(?:\{(?P<labels>[^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")

by_panel = pytest.mark.parametrize(
    ("panel", "target"), TARGETS, ids=[f"{panel['title']}-{target['refId']}" for panel, target in TARGETS]
)


def metrics_of(registry):
    for collector in registry._collector_to_names:
        if not isinstance(collector, MetricWrapperBase):
            for family in collector.collect():
                yield SimpleNamespace(_name=family.name, _type=family.type, _labelnames=family._labelnames)
        else:
            yield collector


@pytest.fixture(scope="module")
def exported():
    """Returns (labels by name of each series that a router or a node exports, names of series that only grow)."""
    labels, growing = {}, set()
    for kind in (RouterMetrics, EngineMetrics, PrefillMetrics):
        registry = CollectorRegistry()
        kind(model_name="m", registry=registry)
        for collector in metrics_of(registry):
            own = set(collector._labelnames)
            match collector._type:
                case "counter":
                    names = {f"{collector._name}_total": own}
                    growing.update(names)
                case "histogram":
                    names = {collector._name + suffix: own | more for suffix, more in HISTOGRAM_SUFFIXES.items()}
                    growing.update(names)
                case _:
                    names = {collector._name: own}
            for name, found in names.items():
                labels[name] = labels.get(name, set()) | found
    return labels, growing


@by_panel
def test_every_expression_names_series_and_labels_that_we_export_and_rates_those_that_grow(exported, panel, target):
    labels, growing = exported
    expression = target["expr"]
    found = list(SERIES.finditer(expression))
    assert found
    known = set(SCRAPE_LABELS)
    for series in found:
        name = series["name"]
        assert set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", series["labels"] or "")) <= labels[name] | SCRAPE_LABELS
        assert bool(series["rate"]) == (name in growing), name
        known |= labels[name]
    grouped = {label for group in GROUPING.findall(expression) for label in re.findall(r"\w+", group)}
    assert grouped <= known
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= (grouped or known)
    if "histogram_quantile" in expression:
        assert "le" in grouped


def test_the_dashboard_shows_what_an_operator_asks_for():
    """Requests, TTFT, ITL, batch, KV use, hand-off bytes and exposed time, acceptance, drafts found, errors, losses."""
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:kv_cache_usage_perc",
        "outrider:kv_transfer_bytes_total",
        "outrider:kv_transfer_exposed_seconds_bucket",
        "vllm:spec_decode_num_accepted_tokens_total",
        "outrider:draft_hit_steps_total",
        "outrider:request_failures_total",
        "outrider:nodes_lost_total",
        "outrider:waiting_prompt_tokens",
        "outrider:oldest_wait_seconds",
        "outrider:prefill_saturation",
    } <= {series["name"] for _, target in TARGETS for series in SERIES.finditer(target["expr"])}


def test_all_of_it_asks_the_data_source_that_is_provisioned():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    assert all(panel["datasource"] == wanted for panel in PANELS)
    assert all(target["datasource"] == wanted for _, target in TARGETS)
    assert all(variable["datasource"] == wanted for variable in DASHBOARD["templating"]["list"])
