"""Invalid command lines: they start nothing, and the error is one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.cli.main import main, parse
from outrider.cli.sampling_arguments import with_defaults_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m"], "there is no command serve; `outrider up`"),
        (["up", "--prot", "3"], "unknown argument --prot; the nearest is --port"),
        (["up", "a", "b"], "unknown argument b"),
        (["up", "a", "--model", "b"], "unknown argument a"),
        (["bench", "load", "--concurency", "3"], "unknown argument --concurency; the nearest is --concurrency"),
        (["bench", "load", "--concurrency", "x"], "--concurrency: x is not a number of at least 1"),
        (["bench", "load", "--rate", "1,x"], "--rate: 1,x: rates are numbers above 0"),
        (["generate", "hi", "--target", ","], "--target: a client needs at least one target"),
        (["probe", "--target", "https://h"], "--target: https://h: a target must be HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as wrong:
        main(arguments)
    assert wrong.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_what_is_not_given_is_the_models_own():
    model = SimpleNamespace(default_sampling={"temperature": 0.6, "top_k": 20})
    assert with_defaults_of(model, {"top_k": 5, "seed": 1}) == {"temperature": 0.6, "top_k": 5, "seed": 1}


@pytest.mark.parametrize("arguments", [["up", "tiny"], ["up", "--port", "0", "tiny"], ["up", "tiny", "--port", "0"]])
def test_a_model_may_stand_alone(arguments):
    assert getattr(parse(arguments, "up"), "model.id") == "tiny"


def test_config_prints_every_section_with_sources(capsys, tmp_path, monkeypatch):
    file = tmp_path / "outrider.yaml"
    file.write_text("router:\n  max_waiting: 5\n")
    monkeypatch.setenv("OUTRIDER_TELEMETRY__LOG_LEVEL", "debug")
    assert main(["config", "--config", str(file), "--set", "decode_node.max_running_sequences=3"]) == 0
    shown = capsys.readouterr().out
    assert f"  max_waiting: 5  # {file}:2" in shown
    assert "  log_level: debug  # environment variable OUTRIDER_TELEMETRY__LOG_LEVEL" in shown
    assert "  max_running_sequences: 3  # --set decode_node.max_running_sequences=3" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    monkeypatch.delenv("OUTRIDER_TELEMETRY__LOG_LEVEL")
    assert main(["config", "--config", str(again)]) == 0


def test_an_unknown_command_and_help(capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["generat"])
    assert wrong.value.code == 2
    with pytest.raises(SystemExit) as helped:
        main(["--help"])
    assert helped.value.code == 0
    assert "start a local cluster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--top-k", "-1"], "sampling.top_k: Value out of range: -1"),
        (["load", "--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: No such file or directory"),
        (["compare", "--prompts", "/nowhere/prompts.jsonl"], "No such file or directory"),
        (["compare", "--tls", "certificates"], "omit the TLS flags"),
    ],
)
def test_bench_says_what_cannot_work_before_it_starts(capsys, arguments, message):
    assert main(["bench", *arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
