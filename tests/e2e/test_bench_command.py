from __future__ import annotations

import json
import subprocess
import sys


def test_bench_measures_a_running_cluster(cluster, tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "outrider.cli.main", "bench", "compare", "--target"]
    command += [cluster.router_address, "--same-prompts", "--concurrency", "2", "--rate", "20", "--limit", "4"]
    command += ["--max-tokens", "12", "--temperature", "0.8", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "TTFT ms" in result.stdout
    figures = json.loads(file.read_text())
    assert [level["num_requests"] for level in figures["levels"]] == [4, 4, 4, 4]
    assert [level["errors"] for level in figures["levels"]] == [{}] * 4
    assert [one["num_identical_answers"] for one in figures["comparisons"]] == [4, 4]
    assert figures["machine"]["num_cores"] >= 1


def test_bench_against_nobody_is_one_clear_line():
    command = [sys.executable, "-m", "outrider.cli.main", "bench", "load", "--target", "127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("outrider bench: ")
    assert len(result.stderr.strip().splitlines()) == 1
