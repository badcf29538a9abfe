"""Prometheus finds every container and answers every expression of the dashboard; Grafana shows it."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import urllib.parse
import urllib.request

import pytest

from outrider.client import Client
from tests.compose.project import BUILD_SECONDS, ROLES, ROOT, Project, docker, free_port, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

STAND_IN = "outrider-prometheus-stand-in"
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/outrider.json").read_text(encoding="utf-8"))
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
QUIET = {"Preemptions", "Failed requests", "Nodes lost", "Refused"}
"""Panels that stay empty unless there are errors."""
COUNTERS = (
    'vllm:generation_tokens_total{service="router"}',
    "vllm:request_success_total",
    'outrider:kv_transfer_bytes_total{service="prefill_node"}',
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


def has_image(name: str) -> bool:
    """Returns whether the image is on this machine or in a registry."""
    for command in (["docker", "image", "inspect", name], ["docker", "pull", "--quiet", name]):
        if subprocess.run(command, capture_output=True, timeout=BUILD_SECONDS, check=False).returncode == 0:
            return True
    return False


@pytest.fixture(scope="module")
def observed(models, tmp_path_factory):
    """A cluster with Prometheus."""
    directory = tmp_path_factory.mktemp("observability")
    with Project(directory, override=with_models(models), profiles=("observability",)) as project:
        project.environ |= {"PROMETHEUS_PORT": str(free_port()), "GRAFANA_PORT": str(free_port())}
        images = json.loads(project.run("config", "--format", "json").stdout)["services"]
        if not has_image(images["prometheus"]["image"]):
            docker("build", "--tag", STAND_IN, "--file", str(ROOT / "tests/compose/prometheus.Dockerfile"),
                   str(ROOT / "tests/compose"), timeout=BUILD_SECONDS)  # fmt: skip
            project.override({"services": {"prometheus": {"image": STAND_IN, "pull_policy": "never"}}})
        project.has_grafana = has_image(images["grafana"]["image"])
        project.up("router", "prometheus", *(["grafana"] if project.has_grafana else []))
        yield project


@pytest.fixture(scope="module")
def ask(observed):
    base = f"http://127.0.0.1:{observed.environ['PROMETHEUS_PORT']}/api/v1"

    def ask(path, **parameters):
        with urllib.request.urlopen(f"{base}/{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
            said = json.loads(answer.read())
        assert said["status"] == "success"
        return said["data"]

    return ask


@pytest.fixture(scope="module")
def loaded(observed, ask):
    """Sends requests until two scrapes have seen each kind of work grow."""
    words = "one two three four " * 12  # too long for a decode node to compute, and easy to draft
    with Client(observed.target) as client:

        def is_seen():
            client.complete(f"{secrets.token_hex(4)} {words}", max_tokens=24, temperature=0, timeout_seconds=300)
            return all(ask("query", query=f"sum(rate({counter}[1m])) > 0")["result"] for counter in COUNTERS)

        wait_for(is_seen, timeout_seconds=150, what="the requests in Prometheus")


def test_promtool_takes_the_configuration(observed):
    said = observed.exec("prometheus", "promtool", "check", "config", "/etc/prometheus/prometheus.yaml")
    assert "SUCCESS" in said.stdout + said.stderr


def test_every_role_is_found_and_up(ask):
    def found():
        targets = ask("targets", state="active")["activeTargets"]
        return {target["labels"]["service"]: target["health"] for target in targets}

    wait_for(lambda: found() == dict.fromkeys(ROLES, "up"), timeout_seconds=90, what="every role up in Prometheus")


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{target['refId']}" for title, target in TARGETS])
def test_an_expression_of_the_dashboard_has_an_answer(loaded, ask, title, target):
    expression = target["expr"].replace("$__rate_interval", "2m").replace("$model", ".*")
    result = ask("query", query=expression)["result"]
    assert result or title in QUIET


def test_grafana_serves_the_dashboard(observed):
    if not observed.has_grafana:
        pytest.skip("no registry has grafana's image here; its files are checked in tests/deploy")
    request = urllib.request.Request(
        f"http://127.0.0.1:{observed.environ['GRAFANA_PORT']}/api/dashboards/uid/{DASHBOARD['uid']}",
        headers={"Authorization": "Basic " + base64.b64encode(b"admin:admin").decode()},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        shown = json.loads(answer.read())["dashboard"]
    assert [panel["title"] for panel in shown["panels"]] == [panel["title"] for panel in DASHBOARD["panels"]]
