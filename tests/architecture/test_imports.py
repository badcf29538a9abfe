from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers"}
OF_A_SERVER = {
    *("outrider.service", "outrider.v1.session_pb2", "outrider.v1.node_pb2", "router"),
    *("jinja2", "prometheus_client", "psutil", "structlog", "tokenizers", "uvloop"),
    *("xxhash", "yaml"),
}
"""What a client does without."""

EVERY_MODULE = """
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {package!r} + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def imported_by(program: str) -> set[str]:
    """What is in sys.modules after the program, in a fresh process, is what was reached."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return set(shown.stdout.split())


@pytest.mark.parametrize(
    "package",
    ["router", "router.__main__", "outrider.service", "outrider.client", "outrider.request", "outrider.wire"],
)
def test_router_and_client_import_without_torch(package):
    assert HEAVY & imported_by(EVERY_MODULE.format(package=package)) == set()


def test_the_command_line_imports_without_torch():
    """`outrider --help` must answer at once, and a client has no torch."""
    assert HEAVY & imported_by("import outrider.cli.main") == set()


@pytest.mark.parametrize("package", ["outrider.client", "outrider.rpc"])
def test_a_client_imports_nothing_of_a_server(package):
    reached = imported_by(EVERY_MODULE.format(package=package))
    assert package in reached
    assert (HEAVY | OF_A_SERVER) & reached == set()
