"""Unusual values and names of releases and namespaces give objects that Kubernetes accepts, or an error with the
reason.
"""

from __future__ import annotations

import re

import helm_python
import pytest

from tests.deploy.chart import Manifests, component_of, container_of

SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
EVERYTHING = {
    "image": {"pullSecrets": ["12"], "tag": "sha256:" + "a" * 64},
    "autoscaling": {"engine": "hpa"},
    "cache": {"type": "persistentVolumeClaim", "storageClass": "true"},
    "fetch": {"tokenSecret": {"name": "1", "key": "2"}},
    "metrics": {"podMonitor": {"enabled": True}},
    "store": {"url": "valkey://host", "passwordSecret": {"name": "1", "key": "null"}},
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "1"}, "dnsNames": ["1"]}},
    "tokens": {"secretName": "3", "key": "4"},
    "serviceAccount": {"name": "5"},
    "settings": {"security": {"peer_name": "1: {2"}},
    "router": {"priorityClassName": "6"},
    "decode_node": {"gpu": {"count": 2, "resource": "7"}},
}
"""Values, in which each string that may look like a number or a truth value does."""


@pytest.mark.parametrize("release", ["true", "a.b", "a" * 53, "a" * 38 + ".b-c"])
def test_names_are_names_whatever_the_release_is_called(release):
    manifests = Manifests(EVERYTHING, release=release, namespace="12")
    for found in manifests.objects:
        assert_all_strings(found["metadata"])
        if found["kind"] in ("Service", "Pod", "StatefulSet", "Deployment"):
            assert SERVICE_NAME.fullmatch(found["metadata"]["name"]), found["metadata"]["name"]
        assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    for service in manifests.of_kind("Service"):
        pods = manifests.workloads()[component_of(service)]["spec"]["template"]
        assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    for workload in manifests.workloads().values():
        assert_all_strings(workload["spec"]["template"]["metadata"])


def assert_all_strings(found):
    if isinstance(found, dict):
        for key, value in found.items():
            assert isinstance(key, str)
            assert_all_strings(value)
    else:
        assert isinstance(found, str), found


def test_what_looks_like_a_number_stays_text():
    manifests = Manifests(EVERYTHING, namespace="12")
    router, decode = (manifests.workloads()[name]["spec"]["template"]["spec"] for name in ("router", "decode-node"))
    (password,) = (item for item in router["containers"][0]["env"] if item["name"] == "OUTRIDER_STORE_PASSWORD")
    assert password["valueFrom"]["secretKeyRef"] == {"name": "1", "key": "null"}
    assert router["imagePullSecrets"] == [{"name": "12"}]
    assert router["serviceAccountName"] == "5"
    assert router["priorityClassName"] == "6"
    (tokens,) = (volume["secret"] for volume in router["volumes"] if volume["name"] == "tokens")
    assert (tokens["secretName"], tokens["items"]) == ("3", [{"key": "4", "path": "tokens"}])
    assert decode["tolerations"] == [{"key": "7", "operator": "Exists", "effect": "NoSchedule"}]
    assert "--server-name=1: {2" in decode["containers"][0]["livenessProbe"]["exec"]["command"]
    (claim,) = manifests.of_kind("PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "true"
    for scaler in manifests.of_kind("HorizontalPodAutoscaler"):
        external = scaler["spec"]["metrics"][1]["external"]
        assert external["metric"]["selector"]["matchLabels"] == {"namespace": "12"}


def test_the_pod_of_helm_test_may_pull_the_image_and_read_the_certificate():
    manifests = Manifests(EVERYTHING)
    (pod,) = manifests.of_kind("Pod")
    router = manifests.workloads()["router"]["spec"]["template"]["spec"]
    assert pod["spec"]["imagePullSecrets"] == router["imagePullSecrets"]
    assert pod["spec"]["securityContext"] == router["securityContext"]
    for key in ("image", "imagePullPolicy"):
        assert pod["spec"]["containers"][0][key] == router["containers"][0][key]
    assert router["containers"][0]["image"] == "outrider@sha256:" + "a" * 64


def test_annotations_and_variables_of_a_user_take_the_place_of_the_charts_but_for_its_hash():
    annotations = {"prometheus.io/scrape": "false", "outrider/settings": "mine"}
    environ = [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "OUTRIDER_MODEL__NUM_THREADS", "value": "3"}]
    ours = {"podAnnotations": annotations, "extraEnv": environ, "resources": {"limits": {"cpu": "4"}}}
    workload = Manifests({"decode_node": ours}).workloads()["decode-node"]
    found = workload["spec"]["template"]["metadata"]["annotations"]
    assert found["prometheus.io/scrape"] == "false"
    assert len(found["outrider/settings"]) == 64
    names = [item["name"] for item in container_of(workload)["env"]]
    assert len(names) == len(set(names))
    assert {item["name"]: item.get("value") for item in container_of(workload)["env"]}["HF_HUB_OFFLINE"] == "0"


def test_a_changed_setting_replaces_the_pods_that_read_it():
    def hashes(values):
        return {
            name: workload["spec"]["template"]["metadata"]["annotations"]["outrider/settings"]
            for name, workload in Manifests(values).workloads().items()
        }

    before, after = hashes({}), hashes({"decode_node": {"extraSettings": {"decode_node": {"draft_rows": "all"}}}})
    assert {name for name in before if before[name] != after[name]} == {"decode-node"}


CERTIFICATE = {"enabled": True, "issuerRef": {"name": "x"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode_nodes": {}}, "decode_nodes"),
        ({"router": {"replica": 2}}, "replica"),
        ({"router": {"replicas": "two"}}, "router/replicas"),
        ({"cache": {"type": "nfs"}}, "cache/type"),
        ({"store": {"url": "valkey://user:password@host"}}, "store/url"),
        (
            {"settings": {"router": {"max_wating": 3}}},
            "settings/router': additional properties 'max_wating' not allowed",
        ),
        ({"settings": {"model": {"dtype": "float8"}}}, "settings/model/dtype': value must be one of 'auto'"),
        ({"settings": {"nonsense": {}}}, "settings': additional properties 'nonsense' not allowed"),
        ({"decode_node": {"extraSettings": {"kv_cache": {"memry": "1GiB"}}}}, "extraSettings/kv_cache': additional"),
        ({"settings": {"server": {"port": 1}}}, "settings.server.port is set by the chart"),
        ({"router": {"extraSettings": {"router": {"store": "x"}}}}, "router.extraSettings.router.store is set by the"),
        ({"router": {"extraSettings": {"router": {"tls": {"certificate": "x"}}}}}, "router.tls is set by the chart"),
        (
            {"router": {"extraEnv": [{"name": "OUTRIDER_SERVER__DRAIN_SECONDS", "value": "600"}]}},
            "OUTRIDER_SERVER__DRAIN_SECONDS in router.extraEnv is set by the chart",
        ),
        ({"openai": {"enabled": True}, "tls": {"enabled": True, "secretName": "x"}}, "openai.enabled: the gateway"),
        ({"tls": {"enabled": True}}, "tls.secretName is empty"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name is empty"),
        ({"tls": {"certManager": {"enabled": True}}}, "without tls.enabled"),
        ({"tokens": {"secretName": "x"}}, "tokens.secretName without tls.enabled"),
        ({"nameOverride": "a: b"}, "nameOverride"),
        ({"fullnameOverride": "1x"}, "fullnameOverride"),
        ({"image": {"repository": "a b"}}, "image/repository"),
        ({"image": {"pullSecrets": ["a\nb: c"]}}, "image/pullSecrets/0"),
        ({"store": {"passwordSecret": {"key": "a, optional: true"}}}, "store/passwordSecret/key"),
        ({"router": {"extraEnv": [{"value": "x"}]}}, "router/extraEnv/0': missing property 'name'"),
        ({"router": {"extraEnv": [{"name": "X", "value": 1}]}}, "router/extraEnv/0/value"),
        (
            {"router": {"podLabels": {"app.kubernetes.io/component": "x"}}},
            "router.podLabels: app.kubernetes.io",
        ),
        ({"router": {"disruptionBudget": {"maxUnavailable": 0}}}, "router/disruptionBudget/maxUnavailable"),
        ({"router": {"disruptionBudget": {"maxUnavailable": "0%"}}}, "router/disruptionBudget/maxUnavailable"),
        ({"router": {"resources": {"limits": "x"}}}, "router/resources/limits"),
        ({"router": {"replicas": 0}, "openai": {"enabled": True}}, "openai.enabled with router.replicas=0"),
        ({"decode_node": {"rollingUpdate": {"maxSurge": "0%"}}}, "decode_node.rollingUpdate: maxSurge and maxUnav"),
        ({"decode_node": {"rollingUpdate": {"maxSurge": "one"}}}, "decode_node/rollingUpdate/maxSurge"),
        ({"decode_node": {"autoscaling": {"minReplicas": 9}}}, "decode_node.autoscaling: minReplicas 9 is more than"),
        ({"decode_node": {"gpu": {"resource": "a, b: c"}}}, "decode_node/gpu/resource"),
        ({"tls": {"enabled": True, "certManager": CERTIFICATE | {"duration": "720h"}}}, "renewBefore 720h is not less"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, message):
    with pytest.raises(helm_python.HelmError, match=message):
        Manifests(values)


def test_a_release_whose_name_begins_with_a_digit_needs_another_name_for_its_objects():
    with pytest.raises(helm_python.HelmError, match="123 begins with a digit"):
        Manifests({}, release="123")
    for found in Manifests({"fullnameOverride": "llm"}, release="123").objects:
        assert found["metadata"]["name"].startswith("llm")
