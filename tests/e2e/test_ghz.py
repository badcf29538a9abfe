"""The configs in benchmarks/ghz against four processes: with ghz where there is one, and simulated everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = Path(__file__).with_name("simulated_ghz.py")
CONFIGS = sorted(path.name for path in (ROOT / "benchmarks" / "ghz").glob("*.json"))
PROTO = ("protos/outrider/v1/router.proto", "protos")

needs_ghz = pytest.mark.skipif(shutil.which("ghz") is None, reason="ghz is not on PATH; the simulated runs stand in")


def run(command):
    """In the repository's root: ghz takes a config's paths from there."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def simulate(config, address, *options):
    shown = run([sys.executable, SIMULATED, f"benchmarks/ghz/{config}", address, *options])
    assert shown.startswith("simulated ghz, not ghz itself")
    return json.loads(shown.splitlines()[-1])


@pytest.mark.parametrize("config", CONFIGS)
def test_calls_at_sixteen_have_no_error_simulated(running, config, is_full):
    num_calls = 200 if is_full else 48  # the config's own number, or three for each worker
    seen = simulate(config, running.router_address, *(() if is_full else ("--total", str(num_calls))))
    assert seen["statusCodeDistribution"] == {"OK": num_calls}
    assert seen["messages"] >= num_calls
    running.wait_until_nothing_is_held()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_configs_need_no_reflection_where_the_proto_is_at_hand_simulated(running, config):
    seen = simulate(config, running.router_address, "--total", "24", "--proto", *PROTO)
    assert seen["statusCodeDistribution"] == {"OK": 24}


@needs_ghz
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("proto", [(), ("--proto", PROTO[0], "--import-paths", PROTO[1])], ids=["reflection", "proto"])
def test_two_hundred_calls_at_sixteen_have_no_error_with_ghz(running, config, proto):
    command = ["ghz", "--config", f"benchmarks/ghz/{config}", "--format", "json", *proto, running.router_address]
    report = json.loads(run(command))
    assert (report["count"], report["statusCodeDistribution"]) == (200, {"OK": 200})
    running.wait_until_nothing_is_held()


def test_bench_sends_the_same_load_and_shows_what_ghz_cannot_see(running, tmp_path):
    report, figures = tmp_path / "ghz.json", tmp_path / "figures.json"
    latencies = [{"percentage": share, "latency": share * 10**7} for share in (10, 25, 50, 75, 90, 95, 99)]
    report.write_text(
        json.dumps(
            {"count": 32, "rps": 9.5, "errorDistribution": {"full": 2}, "latencyDistribution": latencies, "total": 1}
        )
    )
    command = [sys.executable, "-m", "outrider.cli.main", "bench", "--target", running.router_address, "--limit", "32"]
    command += ["--ghz", "benchmarks/ghz/mixed.json", "--ghz-report", str(report), "--json", str(figures)]
    shown = run(command)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "500 / 900 / 990" in rows["ghz"]
    (level,) = json.loads(figures.read_text())["levels"]
    assert (level["level"], level["num_requests"], level["errors"]) == ("16", 32, {})
    assert level["ttft_seconds"]["p50"] > 0
    # Of every eight requests one asks for three samples of 24 tokens.
    assert level["num_generated_tokens"] > 32 * 8
    assert rows["bench,"].split()[2:4] == ["32", "0"]
