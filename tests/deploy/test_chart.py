"""Agreement of the Helm chart's objects with each other and with the services; checks/chart.py checks their form."""

from __future__ import annotations

import argparse
import json

import pytest
import yaml
from prometheus_client import CollectorRegistry

from outrider.cli import probe
from outrider.cli.config import ROLES, sections_of
from outrider.cli.connection import read_tls
from outrider.config.resolve import load_config
from outrider.rpc.tls import SecurityConfig
from outrider.service.config import GatewayConfig, ServerConfig, TelemetryConfig
from outrider.service.health import LIVENESS
from outrider.service.server import DRAIN_SLACK_SECONDS, STOP_SECONDS
from outrider.service.telemetry.metrics import EngineMetrics, PrefillMetrics, RouterMetrics
from tests.deploy.chart import CHART, Manifests, component_of, container_of, value_sets

SETS = value_sets()
END_SECONDS = DRAIN_SLACK_SECONDS + STOP_SECONDS
GATEWAY_SECTIONS = {"server": ServerConfig, "telemetry": TelemetryConfig, "gateway": GatewayConfig}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
NODES = ("prefill-node", "decode-node", "draft-node")


@pytest.fixture(scope="module")
def rendered():
    return {name: Manifests(values) for name, values in SETS.items()}


@pytest.fixture(params=SETS)
def manifests(request, rendered):
    return rendered[request.param]


@pytest.fixture
def load(tmp_path):
    """load(manifests, component) → the settings sections that the component's container would read."""

    def load(manifests, component):
        (config,) = manifests.of_kind("ConfigMap")
        role = component.replace("-", "_")
        file = tmp_path / f"{role}.yaml"
        file.write_text(config["data"][file.name], encoding="utf-8")
        env = {item["name"]: item.get("value", "1") for item in container_of(manifests.workloads()[component])["env"]}
        assert env.pop("OUTRIDER_CONFIG") == f"/etc/outrider/{file.name}"
        sections = sections_of(role) if role in ROLES else GATEWAY_SECTIONS
        return load_config(sections, file=file, environ=env, role=role).sections

    return load


def test_every_role_can_read_its_settings_and_finds_the_others(manifests, load):
    ports = {
        service["metadata"]["name"]: {item["port"] for item in service["spec"]["ports"]}
        for service in manifests.of_kind("Service")
    }
    workloads = manifests.workloads()
    for component in workloads:
        sections = load(manifests, component)
        assert sections["server"].host == "0.0.0.0"
        container_ports = {item["name"]: item["containerPort"] for item in container_of(workloads[component])["ports"]}
        assert sections["server"].port == container_ports["http" if component == "openai" else "grpc"]
        assert sections["server"].metrics_port == container_ports["metrics"]
        if component == "decode-node":
            assert sections["kv_transfer"].port == container_ports["kv"]
            targets = sections["decode_node"].draft_targets
        elif component == "router":
            router = sections["router"]
            targets = router.prefill_targets + router.decode_targets + router.draft_targets
            assert len(targets) == len([name for name in NODES if name in workloads])
        elif component == "openai":
            router = workloads["router"]
            names = [f"{router['metadata']['name']}-{number}" for number in range(router["spec"]["replicas"])]
            service = router["spec"]["serviceName"]
            assert sections["gateway"].router_targets == tuple(f"{name}.{service}:50051" for name in names)
            continue
        else:
            continue
        for target in targets:
            name, _, port = target.rpartition(":")
            assert int(port) in ports[name]


def test_what_fetches_the_model_can_read_the_settings_of_its_pod(manifests, tmp_path):
    (config,) = manifests.of_kind("ConfigMap")
    for component, workload in manifests.workloads().items():
        for container in workload["spec"]["template"]["spec"].get("initContainers", []):
            assert component in NODES
            assert container["command"] == ["outrider", "fetch"]
            (path,) = (item["value"] for item in container["env"] if item["name"] == "OUTRIDER_CONFIG")
            file = tmp_path / path.rpartition("/")[2]
            file.write_text(config["data"][file.name], encoding="utf-8")
            sections = load_config(sections_of(None), file=file, environ={}).sections
            assert sections["model"].id == yaml.safe_load(config["data"][file.name])["model"]["id"]
            assert component != "draft-node" or sections["draft_node"].proposer != "ngram"


def test_a_service_has_the_pods_of_one_role_and_their_ports(manifests):
    workloads = manifests.workloads()
    for service in manifests.of_kind("Service"):
        pods = workloads[component_of(service)]
        assert service["spec"]["selector"].items() <= pods["spec"]["template"]["metadata"]["labels"].items()
        assert service["spec"]["selector"] == pods["spec"]["selector"]["matchLabels"]
        named = {item["name"]: item["containerPort"] for item in container_of(pods)["ports"]}
        assert all(named[item["targetPort"]] == item["port"] for item in service["spec"]["ports"])
    names = {service["metadata"]["name"] for service in manifests.of_kind("Service")}
    assert workloads["router"]["spec"]["serviceName"] in names


def test_a_pod_is_killed_only_after_its_drain(manifests, load):
    for component, workload in manifests.workloads().items():
        drain = load(manifests, component)["server"].drain_seconds
        before = container_of(workload).get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
        program, seconds = before["exec"]["command"]
        assert program == "sleep"
        assert (component in ("router", "openai")) == (float(seconds) > 0)
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > drain + END_SECONDS + float(seconds)


def test_probes_ask_for_the_health_that_they_are_for(rendered):
    for component, workload in rendered["default"].workloads().items():
        assert "initContainers" in workload["spec"]["template"]["spec"] or component not in NODES[:2]
        asked = {name: container_of(workload)[name]["grpc"] for name in PROBES}
        startup = LIVENESS if component == "router" else ""  # it may start before its nodes
        assert [asked[name]["service"] for name in PROBES] == [startup, "", LIVENESS]
        assert {found["port"] for found in asked.values()} == {50051}


def test_with_tls_probes_are_a_command_that_has_what_tls_needs(rendered, load):
    manifests = rendered["secured"]
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    for component, workload in manifests.workloads().items():
        ours = load(manifests, component)["security"].tls
        mounts = {mount["name"]: mount["mountPath"] for mount in container_of(workload)["volumeMounts"]}
        assert {path.parent.as_posix() for path in (ours.certificate, ours.private_key, ours.authority)} == {
            mounts["tls"]
        }
        services = []
        for name in PROBES:
            command = container_of(workload)[name]["exec"]["command"]
            assert command[:2] == ["outrider", "probe"]
            arguments = parser.parse_args(command[2:])
            assert read_tls(arguments) == ours
            assert arguments.server_name == SecurityConfig().peer_name
            services.append(arguments.service)
        assert services == [LIVENESS if component == "router" else "", "", LIVENESS]
    (certificate,) = manifests.of_kind("Certificate")
    assert {SecurityConfig().peer_name, "outrider-router", "outrider-router-1.outrider-routers.llm.svc"} < set(
        certificate["spec"]["dnsNames"]
    )


def test_pods_may_as_little_as_they_can(manifests):
    templates = [workload["spec"]["template"]["spec"] for workload in manifests.workloads().values()]
    for spec in [*templates, *(pod["spec"] for pod in manifests.of_kind("Pod"))]:
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["fsGroup"] == 10001  # the group of Secrets' files
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_secret_reaches_only_who_uses_it(manifests):
    readers = {"HF_TOKEN": set(), "OUTRIDER_STORE_PASSWORD": set()}
    for component, workload in manifests.workloads().items():
        spec = workload["spec"]["template"]["spec"]
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            for variable in container["env"]:
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    readers[variable["name"]].add((component, container["name"]))
        assert ("tokens" in {volume["name"] for volume in spec["volumes"]}) <= (component == "router")
    assert readers["OUTRIDER_STORE_PASSWORD"] <= {("router", "router")}
    assert {name for _, name in readers["HF_TOKEN"]} <= {"fetch"}


def test_nodes_are_reached_by_those_that_call_them_only(rendered):
    manifests = rendered["secured"]
    callers = {}
    for policy in manifests.of_kind("NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= policy["metadata"]["labels"].items()
        (calls, metrics) = policy["spec"]["ingress"]
        assert metrics["ports"] == [{"port": "metrics"}]
        assert metrics["from"] == SETS["secured"]["networkPolicy"]["metricsFrom"]
        component = component_of(policy)
        named = {item["name"] for item in container_of(manifests.workloads()[component])["ports"]}
        assert {item["port"] for item in calls["ports"]} == named - {"metrics"}
        if component == "router":
            assert calls["from"][:1] == SETS["secured"]["networkPolicy"]["clientsFrom"]
            (pod,) = manifests.of_kind("Pod")  # of `helm test`
            labels = pod["metadata"]["labels"]
            assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in calls["from"][1:])
        if component in NODES:
            selectors = [peer["podSelector"]["matchLabels"] for peer in calls["from"]]
            callers[component] = {selector["app.kubernetes.io/component"] for selector in selectors}
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert callers == {
        "prefill-node": {"router"},
        "decode-node": {"router", "prefill-node", "draft-node"},
        "draft-node": {"router", "decode-node"},
    }


def test_autoscaling_asks_for_metrics_that_there_are(rendered):
    registries = [CollectorRegistry() for _ in range(3)]
    kinds = (RouterMetrics, EngineMetrics, PrefillMetrics)
    for kind, registry in zip(kinds, registries, strict=True):
        kind(model_name="m", registry=registry)
    of_router, *of_nodes = ({family.name for family in registry.collect()} for registry in registries)
    names = {"routers": of_router, "pods": set().union(*of_nodes)}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for role in ("prefill_node", "decode_node"):
        asked = defaults[role]["autoscaling"]["metrics"]
        assert all(metric["name"] in names[metric["from"]] for metric in asked)
        workload = rendered["gpu"].workloads()[role.replace("_", "-")]
        assert "replicas" not in workload["spec"]
        scaled = rendered["gpu"].get("ScaledObject", workload["metadata"]["name"])["spec"]
        assert scaled["scaleTargetRef"]["name"] == workload["metadata"]["name"]
        assert [trigger["metadata"]["query"].split("{")[0] for trigger in scaled["triggers"]] == [
            f"sum({metric['name']}" for metric in asked
        ]


# ---------------------------------------------------------------- values


def test_every_value_is_described_and_has_a_default():
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def check(found, default, path):
        if "$ref" in found and "description" not in found:  # settings are described in their schema
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
        assert found["description"].endswith((".", ")")), path
        if "properties" not in found:
            return
        assert found["additionalProperties"] is False, path
        if path not in ("", *(f".{role}.image" for role in (*ROLES, "openai"))):
            assert found["properties"].keys() == default.keys(), path
        for key, inner in found["properties"].items():
            if key != "global":
                check(inner, (default or {}).get(key), f"{path}.{key}")

    check(schema, defaults, "")
    assert schema["properties"].keys() == {*defaults, "global"}
