"""The configs in benchmarks/ghz against four processes, if ghz is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "benchmarks" / "ghz").glob("*.json"))
PROTO = ("protos/outrider/v1/router.proto", "protos")

needs_ghz = pytest.mark.skipif(shutil.which("ghz") is None, reason="ghz is not on PATH")


def run(command):
    """Runs ghz in the repository's root, from which it resolves the paths of a config."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_ghz
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("proto", [(), ("--proto", PROTO[0], "--import-paths", PROTO[1])], ids=["reflection", "proto"])
def test_two_hundred_calls_at_sixteen_have_no_error_with_ghz(running, config, proto):
    command = ["ghz", "--config", f"benchmarks/ghz/{config}", "--format", "json", *proto, running.router_address]
    report = json.loads(run(command))
    assert (report["count"], report["statusCodeDistribution"]) == (200, {"OK": 200})
    running.wait_until_nothing_is_held()
