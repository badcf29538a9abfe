"""Checks the Helm chart: lint, the rendered objects, its schema of settings, and docs/helm-values.md.

    python -m checks.chart            # checks
    python -m checks.chart --write    # writes tests/deploy/golden, the settings in values.schema.json, and the table

For each set of values in deploy/helm/outrider/ci, it runs Helm's own lint, validates the rendered objects against the
schemas of two versions of Kubernetes (kubernetes-validate, strict) or, for other kinds, those in checks/schemas, and
compares them with the reviewed golden renders. It needs no cluster.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

from outrider.cli.config import sections_of
from outrider.config.schema import config_schema
from tests.deploy.chart import CHART, NAMESPACE, ROOT, Manifests, render_text, value_sets

GOLDEN = ROOT / "tests" / "deploy" / "golden"
PAGE = ROOT / "docs" / "helm-values.md"
SCHEMA = CHART / "values.schema.json"
BEGIN, END = "<!-- made by `make chart` -->", "<!-- end -->"
VERSIONS = ("1.27", "1.37")
"""Kubernetes versions: the oldest one that has everything the chart uses, and the newest one that has schemas."""
OTHERS = {
    "ScaledObject": "keda-scaledobject.json",
    "Certificate": "cert-manager-certificate.json",
    "PodMonitor": "podmonitor.json",
}
"""Kinds that do not belong to Kubernetes, and their files in checks/schemas."""
ICON = "icon is recommended"
INFO = 1
"""Helm's severity of an informational message, the highest that is acceptable."""

# Without this cache, kubernetes_validate reads a file of one megabyte for every object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def faults() -> Iterator[str]:
    """Yields faults, one per line."""
    for name, values in value_sets().items():
        report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
        yield from (f"{name}: lint: {error}" for error in report["errors"])
        for message in report["messages"]:
            if message["severity"] > INFO or message["error"] != ICON:
                yield f"{name}: lint: {message['path']}: {message['error']}"
        for found in Manifests(values).objects:
            yield from (f"{name}: {fault}" for fault in faults_of(found))
        golden = GOLDEN / f"{name}.yaml"
        if not golden.exists() or golden.read_text(encoding="utf-8") != render_text(values):
            yield f"{golden.relative_to(ROOT)} is not what the chart renders: look at the change, and run make chart"
    stale = {path.stem for path in GOLDEN.glob("*.yaml")} - value_sets().keys()
    yield from (f"tests/deploy/golden/{name}.yaml has no values in deploy/helm/outrider/ci" for name in sorted(stale))
    if SCHEMA.read_text(encoding="utf-8") != schema_text():
        yield "deploy/helm/outrider/values.schema.json: what it says of settings is stale: run make chart"
    if page(PAGE.read_text(encoding="utf-8")) != PAGE.read_text(encoding="utf-8"):
        yield "docs/helm-values.md: the table of values is stale: run make chart"


def faults_of(found: dict[str, Any]) -> Iterator[str]:
    """Yields the differences between one object and its schema."""
    what = f"{found['kind']} {found['metadata']['name']}"
    if found["kind"] in OTHERS:
        schema = json.loads((ROOT / "checks" / "schemas" / OTHERS[found["kind"]]).read_text(encoding="utf-8"))
        for error in jsonschema.Draft202012Validator(schema).iter_errors(found):
            yield f"{what}: {error.json_path}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{what} (Kubernetes {version}): {'.'.join(map(str, error.path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{what}: {error.message}"


def schema_text() -> str:
    """Returns the chart's schema, with the schema of our settings for `settings` and each role's `extraSettings`."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    settings = {name: value for name, value in config_schema(sections_of(None)).items() if name != "$schema"}
    schema["$defs"]["settings"] = settings
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- the table of values


def page(text: str) -> str:
    """Returns the document with regenerated tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def tables() -> str:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    roles = [name for name, found in schema["properties"].items() if "resources" in found.get("properties", {})]
    lines = ["| key | default | meaning |", "| -- | -- | -- |"]
    for name, found in schema["properties"].items():
        if name in roles:
            lines.append(_row(name, "", found["description"]))
            for key, value in found["properties"].items():
                lines += [] if "$ref" in value else _rows(f"{name}.{key}", value, defaults[name][key])
        elif name != "global":
            lines += _rows(name, found, defaults[name])
    lines += [
        "",
        "Keys of roles. Where not every role has a key, or the same default, the roles that have it are named:",
    ]
    lines += ["", "| key | default | meaning |", "| -- | -- | -- |"]
    for key, found in schema["$defs"].items():
        if key == "settings":  # documented in docs/settings.md
            continue
        by_role = {role: defaults[role][key] for role in roles if key in schema["properties"][role]["properties"]}
        lines.append(_row(f"ROLE.{key}", _default_of(by_role, roles), found["description"]))
    return "\n".join(lines)


def _rows(name: str, found: dict[str, Any], default: Any) -> Iterator[str]:
    inner = found.get("properties")
    if not inner:
        yield _row(name, f"`{json.dumps(default)}`", found["description"])
        return
    for key, value in inner.items():
        yield from _rows(f"{name}.{key}", value, default[key])


def _default_of(by_role: dict[str, Any], roles: list[str]) -> str:
    """Formats a default: one value if it is the same for all roles, otherwise each value with its roles."""
    texts: dict[str, list[str]] = {}
    for role, value in by_role.items():
        texts.setdefault(json.dumps(value), []).append(role)
    if list(texts.values()) == [roles]:
        return f"`{next(iter(texts))}`"
    return "; ".join(f"{', '.join(names)}: `{text}`" for text, names in texts.items())


def _row(*cells: str) -> str:
    key, default, meaning = (cell.replace("|", "\\|") for cell in cells)
    return f"| `{key}` | {default} | {meaning} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the golden renders and the table of values")
    if parser.parse_args().write:
        SCHEMA.write_text(schema_text(), encoding="utf-8")  # first, since a render validates its values against it
        GOLDEN.mkdir(exist_ok=True)
        for name, values in value_sets().items():
            (GOLDEN / f"{name}.yaml").write_text(render_text(values), encoding="utf-8")
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    found = list(faults())
    sys.stdout.writelines(f"chart: {fault}\n" for fault in found)
    if not found:
        sys.stdout.write(f"chart: {len(value_sets())} sets of values rendered, valid and as expected\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
