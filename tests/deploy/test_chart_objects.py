"""References between the chart's objects, and to files in the image."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.deploy.chart import ROOT, Manifests, component_of, container_of, value_sets

SETS = value_sets()


@pytest.fixture(scope="module", params=SETS)
def manifests(request):
    return Manifests(SETS[request.param])


def test_containers_run_what_is_in_the_image(manifests):
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[2]
    assert re.search(r"^outrider = ", scripts, re.MULTILINE)
    for workload in manifests.workloads().values():
        program, *flags, module = container_of(workload)["command"]
        assert [program, *flags] == ["python", "-P", "-m"]
        is_package = (ROOT / module).is_dir()
        assert importlib.util.find_spec(f"{module}.__main__" if is_package else module) is not None


def test_a_headless_service_shows_pods_that_are_not_ready_and_others_do_not(manifests):
    """Clients find out which pods serve by health checks, since DNS would be slower."""
    shown = {}
    for service in manifests.of_kind("Service"):
        is_headless = service["spec"].get("clusterIP") == "None"
        assert service["spec"].get("publishNotReadyAddresses", False) == is_headless
        shown.setdefault(component_of(service), []).append(is_headless)
    assert {name for name, kinds in shown.items() if True not in kinds} <= {"openai"}
    assert {name for name, kinds in shown.items() if False in kinds} == {"router", "openai"} & shown.keys()


def test_a_disruption_budget_lets_one_pod_of_its_role_go_however_few_there_are(manifests):
    budgets = {component_of(found): found["spec"] for found in manifests.of_kind("PodDisruptionBudget")}
    workloads = manifests.workloads()
    assert budgets.keys() == workloads.keys()
    for component, budget in budgets.items():
        assert budget["selector"] == workloads[component]["spec"]["selector"]
        assert (budget["maxUnavailable"], "minAvailable" in budget) == (1, False)


def test_autoscalers_scale_workloads_that_there_are():
    for engine in ("hpa", "keda"):
        manifests = Manifests({"autoscaling": {"engine": engine}})
        for found in manifests.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
            target = found["spec"]["scaleTargetRef"]
            workload = manifests.get(target["kind"], target["name"])
            assert workload["apiVersion"] == target["apiVersion"]
            assert "replicas" not in workload["spec"]


def test_prometheus_reads_a_port_that_every_pod_has():
    manifests = Manifests({"metrics": {"podMonitor": {"enabled": True}}, "openai": {"enabled": True}})
    (monitor,) = manifests.of_kind("PodMonitor")
    ((port,),) = [[endpoint["port"]] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    for workload in manifests.workloads().values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {item["name"]: item["containerPort"] for item in container_of(workload)["ports"]}
        assert port == "metrics"
        assert ports[port] == 9464


def test_the_gateway_may_call_routers_whoever_else_may():
    values = {"openai": {"enabled": True}, "networkPolicy": {"clientsFrom": [{"podSelector": {}}]}}
    manifests = Manifests(values)
    calls = manifests.get("NetworkPolicy", "outrider-router")["spec"]["ingress"][0]["from"]
    labels = manifests.workloads()["openai"]["spec"]["template"]["metadata"]["labels"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in calls[1:])


def test_nodes_without_egress_still_reach_each_other_and_dns():
    manifests = Manifests({"networkPolicy": {"denyEgress": True}})
    workloads = manifests.workloads()
    for policy in manifests.of_kind("NetworkPolicy"):
        if component_of(policy) == "router":
            assert policy["spec"]["policyTypes"] == ["Ingress"]
            continue
        ours, dns = policy["spec"]["egress"]
        (peer,) = ours["to"]
        for workload in workloads.values():
            labels = workload["spec"]["template"]["metadata"]["labels"]
            assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert dns == {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def test_the_file_of_tokens_is_where_the_router_looks_for_it():
    manifests = Manifests({"tls": {"enabled": True, "secretName": "x"}, "tokens": {"secretName": "y", "key": "z"}})
    (config,) = manifests.of_kind("ConfigMap")
    router = manifests.workloads()["router"]
    (mount,) = (mount for mount in container_of(router)["volumeMounts"] if mount["name"] == "tokens")
    (volume,) = (found for found in router["spec"]["template"]["spec"]["volumes"] if found["name"] == "tokens")
    ((item,),) = [volume["secret"]["items"]]
    assert f"token_file: {mount['mountPath']}/{item['path']}" in config["data"]["router.yaml"]
