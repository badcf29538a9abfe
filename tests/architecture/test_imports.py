from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    "package",
    ["router", "router.__main__", "outrider.service", "outrider.client", "outrider.request", "outrider.wire"],
)
def test_router_and_client_import_without_torch(package):
    """Every module of the package, in a fresh process: what is in sys.modules is what was reached."""
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {package!r} + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(",".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_the_command_line_imports_without_torch():
    """`outrider --help` must answer at once, and a client has no torch."""
    program = f"""
import sys
import outrider.cli.main
print(",".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
