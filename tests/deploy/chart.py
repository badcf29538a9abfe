"""The Helm chart, rendered by Helm's own library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "outrider"
RELEASE, NAMESPACE = "outrider", "llm"
Object = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Rejects a mapping with a duplicate key, which parsers treat differently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


def value_sets() -> dict[str, dict[str, Any]]:
    """Returns the sets of values that the chart is tested with, by name."""
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CHART / "ci").glob("*.yaml"))
    }


def render_text(values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """Returns every object, ordered by file name. Raises: helm_python.HelmError for values that the chart rejects."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name=release, namespace=namespace)
    texts = {name: text.strip() for name, text in files.items() if name.endswith(".yaml")}
    parts = [f"# {name}\n{text.removeprefix('---').strip()}\n" for name, text in sorted(texts.items()) if text]
    return "---\n" + "---\n".join(parts)


class Manifests:
    """The objects that an installation of the chart would send to Kubernetes."""

    def __init__(self, values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        text = render_text(values, release=release, namespace=namespace)
        self.objects: list[Object] = [found for found in yaml.load_all(text, _Loader) if found]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        (found,) = (found for found in self.of_kind(kind) if found["metadata"]["name"] == name)
        return found

    def workloads(self) -> dict[str, Object]:
        """Returns Deployments and StatefulSets by component, such as decode-node."""
        return {component_of(found): found for found in self.of_kind("Deployment", "StatefulSet")}


def component_of(found: Object) -> str:
    return found["metadata"]["labels"]["app.kubernetes.io/component"]


def container_of(workload: Object) -> Object:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container
