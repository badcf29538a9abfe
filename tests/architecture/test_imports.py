from __future__ import annotations

import functools
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.processes import run_python

HEAVY = {"torch", "transformers"}
SERVER_MODULES = {"outrider.service", "outrider.v1.session_pb2", "outrider.v1.node_pb2", "router"}
"""Modules that a client does not import."""
ENGINES_LACK = {"outrider.service", "structlog", "prometheus_client", "tokenizers", "yaml", "vllm"}
"""Modules that another engine's environment may lack. It has grpcio, numpy, protobuf and xxhash."""
SUPERVISOR = ("outrider.cli.main", "outrider.cli.up", "outrider.cli.demo", "outrider.cli.config", "outrider.cluster")
CONFIGURATION_AND_IDENTITY = (
    *(f"outrider.model_hub.{name}" for name in ("config", "checkpoint_text", "fingerprint", "default_model")),
    *("outrider.model_hub.locate", "outrider.progress"),
    *("outrider.engine.kv_cache.config", "outrider.engine.model_spec"),
)
PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
GRPC_PACKAGES = {"grpcio-health-checking", "grpcio-reflection", "grpcio-tools", "typing-extensions"}
"""Packages that grpcio imports if they are installed."""

EVERY_MODULE = """
import importlib, pkgutil, sys
for package in map(importlib.import_module, {packages!r}):
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sys.modules)
"""


@functools.cache
def imported_with(*packages: str) -> set[str]:
    """Returns sys.modules after a fresh process has imported every module of these packages."""
    shown = run_python("-c", EVERY_MODULE.format(packages=packages))
    assert shown.returncode == 0, shown.stderr
    return set(shown.stdout.split())


@pytest.mark.parametrize(
    ("packages", "heavy"),
    [
        (("router", "router.__main__", "outrider.service", "outrider.client", "outrider.wire"), HEAVY),
        (SUPERVISOR, HEAVY),
        (CONFIGURATION_AND_IDENTITY, HEAVY),
        (("outrider.engine.scheduler", "outrider.engine.kv_cache.sequence_kv"), HEAVY | {"grpc"}),
        (("outrider.client",), HEAVY | SERVER_MODULES),
        (("outrider.rpc",), HEAVY | SERVER_MODULES),
        (("outrider.drafting", "outrider.integrations"), HEAVY | ENGINES_LACK),
    ],
    ids=["router", "supervisor", "configuration", "scheduler", "client", "rpc", "drafting"],
)
def test_what_computes_nothing_imports_without_torch_and_a_client_without_a_server(packages, heavy):
    """A client's installation lacks these packages, and `outrider --help` must answer at once."""
    reached = imported_with(*packages)
    assert set(packages) <= reached
    assert heavy & reached == set()


def installed_with(*extras: str) -> set[str]:
    """Returns the names of the distributions that pyproject.toml requires for an installation with these extras."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {re.match(r"[\w-]+", line)[0].lower() for line in wanted}


@pytest.mark.parametrize(
    ("package", "extras"),
    [("outrider.client", ()), ("outrider.rpc", ()), ("outrider.cli.generate", ()), ("router", ("router",))]
    + [(package, ("drafting",)) for package in ("outrider.drafting", "outrider.integrations")],
)
def test_an_install_has_what_its_part_imports_and_nothing_more(package, extras):
    """Counts only the distributions that pyproject.toml names, since what those import in turn does not matter here."""
    ours = installed_with(*PROJECT["optional-dependencies"]) - GRPC_PACKAGES - {"outrider"}
    owners = packages_distributions()
    modules = imported_with(package)
    reached = {name.partition(".")[0] for name in modules} - {"google", "opentelemetry"}
    needed = {owner.lower() for name in reached for owner in owners.get(name, ())} & ours
    if any(name.startswith("opentelemetry.") for name in modules):
        needed.add("opentelemetry-api")  # several distributions share this top-level name
    assert not any(name.startswith(("opentelemetry.exporter", "opentelemetry.sdk")) for name in modules)
    elsewhere = {"valkey", "smg-grpc-proto"}  # packages of the extras `store` and `openai`
    elsewhere |= {"cryptography", "rich"}  # structlog and others import these if they are installed
    assert needed - elsewhere <= installed_with(*extras)
