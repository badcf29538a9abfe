from __future__ import annotations

import json

from outrider.cli.main import main


def test_bench_measures_a_running_cluster(cluster, tmp_path, capsys):
    file = tmp_path / "figures.json"
    command = ["bench", "compare", "--target", cluster.router_address, "--same-prompts", "--json", str(file)]
    command += ["--concurrency", "2", "--rate", "20", "--limit", "4", "--max-tokens", "12", "--temperature", "0.8"]
    assert main(command) == 0
    assert "TTFT ms" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [level["num_requests"] for level in figures["levels"]] == [4, 4, 4, 4]
    assert [level["errors"] for level in figures["levels"]] == [{}] * 4
    assert [one["num_identical_answers"] for one in figures["comparisons"]] == [4, 4]
    assert figures["machine"]["num_cores"] >= 1


def test_bench_against_nobody_is_one_clear_line(capsys):
    assert main(["bench", "load", "--target", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("outrider bench: ")
    assert shown.count("\n") == 1
