"""Grafana's dashboard reads only what we export, in a form that Grafana knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from outrider.service.telemetry.metrics import EngineMetrics, RouterMetrics, TokenTimes

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "outrider.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
SCRAPE_LABELS = {"instance", "job", "service"}  # set by deploy/prometheus/prometheus.yaml
HISTOGRAM_SUFFIXES = {"_bucket": {"le"}, "_sum": set(), "_count": set()}

GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$model": "any"}
RATE_FUNCTIONS = {"rate", "irate", "increase"}


@dataclass(frozen=True)
class Selector:
    name: str
    labels: frozenset[str]  # that are matched
    is_rated: bool  # stands inside rate() or its like


@dataclass(frozen=True)
class Reading:
    """An expression's selectors, and all labels that its aggregations and matchings name."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def read(expression: str) -> Reading:
    """Raises: ValueError for what is not PromQL."""
    for variable, value in GRAFANA_VARIABLES.items():
        expression = expression.replace(variable, value)
    nodes = list(_walk(promql.parse(expression), is_rated=False))
    return Reading(
        selectors=tuple(node for node in nodes if isinstance(node, Selector)),
        grouped=frozenset(node for node in nodes if isinstance(node, str)),
    )


def _walk(node: promql.Expr, *, is_rated: bool) -> Iterator[Selector | str]:
    match node:
        case promql.VectorSelector():
            yield Selector(node.name, frozenset(matcher.name for matcher in node.matchers.matchers), is_rated)
        case promql.MatrixSelector():
            yield from _walk(node.vector_selector, is_rated=is_rated)
        case promql.AggregateExpr():
            yield from () if node.modifier is None else node.modifier.labels
            yield from _walk(node.expr, is_rated=is_rated)
        case promql.Call():
            for argument in node.args:
                yield from _walk(argument, is_rated=is_rated or node.func.name in RATE_FUNCTIONS)
        case promql.BinaryExpr():
            matching = None if node.modifier is None else node.modifier.matching
            yield from () if matching is None else matching.labels
            yield from _walk(node.lhs, is_rated=is_rated)
            yield from _walk(node.rhs, is_rated=is_rated)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _walk(node.expr, is_rated=is_rated)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise AssertionError(f"an expression of a kind that this test does not know: {node!r}")


def by_panel(cases):
    return pytest.mark.parametrize(("panel", "target"), cases, ids=[f"{p['title']}-{t['refId']}" for p, t in cases])


def metrics_of(registry):
    for collector in registry._collector_to_names:
        if isinstance(collector, TokenTimes):
            for family in collector.collect():
                yield SimpleNamespace(_name=family.name, _type=family.type, _labelnames=family._labelnames)
        else:
            yield collector


@pytest.fixture(scope="module")
def exported():
    """Labels by the name of each series that a router or a node exports, and the names that only ever grow."""
    labels, growing = {}, set()
    for kind in (RouterMetrics, EngineMetrics):
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


@by_panel(TARGETS)
def test_every_expression_names_series_and_labels_that_we_export(exported, panel, target):
    labels, _ = exported
    reading = read(target["expr"])
    assert reading.selectors
    known = set(SCRAPE_LABELS)
    for selector in reading.selectors:
        assert selector.name in labels
        assert selector.labels <= labels[selector.name] | SCRAPE_LABELS
        known |= labels[selector.name]
    assert reading.grouped <= known


@by_panel(TARGETS)
def test_what_only_grows_is_read_as_a_rate_and_nothing_else_is(exported, panel, target):
    _, growing = exported
    for selector in read(target["expr"]).selectors:
        assert selector.is_rated == (selector.name in growing), selector.name


@by_panel(TARGETS)
def test_the_legend_names_only_labels_that_are_left(exported, panel, target):
    named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    reading = read(target["expr"])
    left = reading.grouped or exported[0][reading.selectors[0].name] | SCRAPE_LABELS
    assert named <= left


@by_panel([case for case in TARGETS if "histogram_quantile" in case[1]["expr"]])
def test_a_quantile_is_taken_over_buckets(panel, target):
    (selector,) = read(target["expr"]).selectors
    assert selector.name.endswith("_bucket")
    assert "le" in read(target["expr"]).grouped


def test_the_dashboard_shows_what_an_operator_asks_for(exported):
    """Requests, TTFT, ITL, batch, KV use, hand-off bytes and exposed time, acceptance, drafts found, errors, losses."""
    read_names = {selector.name for _, target in TARGETS for selector in read(target["expr"]).selectors}
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
    } <= read_names


def test_grafanas_own_model_knows_every_field():
    """What its model leaves out on the way through is misspelt, or stands in the wrong place."""
    through = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert list(_lost(DASHBOARD, through, "dashboard")) == []


def _lost(before, after, path):
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from _lost(value, after[key], f"{path}.{key}") if key in after else [f"{path}.{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


def test_panels_have_titles_descriptions_and_units_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_all_of_it_asks_the_data_source_that_is_provisioned():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    assert all(panel["datasource"] == wanted for panel in PANELS)
    assert all(target["datasource"] == wanted for _, target in TARGETS)
    assert all(variable["datasource"] == wanted for variable in DASHBOARD["templating"]["list"])
