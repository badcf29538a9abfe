"""`outrider fetch` with models that are local directories, so that nothing is downloaded."""

from __future__ import annotations

import json

import pytest

from outrider.cli.main import main
from outrider.model_hub.default_model import MANIFEST


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_model_is_found_and_named(model, capsys):
    assert main(["fetch", "--model", str(model)]) == 0
    assert capsys.readouterr().err == f"model      {model.name} is in {model}\n"


def test_a_file_that_is_not_what_was_converted_is_an_error_with_the_fix(model, capsys):
    recorded = {"config.json": {"size": 2, "sha256": "00"}}
    (model / MANIFEST).write_text(json.dumps({"files": recorded}))
    assert main(["fetch", "--model", str(model)]) == 1
    shown = capsys.readouterr().err
    assert shown.endswith(
        f"outrider fetch: {model}/config.json is not what was converted: delete {model} and start again\n"
    )


def test_the_draft_model_is_fetched_as_well(model, capsys):
    draft = ["--set", "draft_node.proposer=draft_model", "--set", f"draft_node.model={model}"]
    assert main(["fetch", "--model", str(model), *draft]) == 0
    assert f"draft model {model.name} is in {model}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OUTRIDER_DECODE_NODE__MAX_RUNNING_SEQUENCES", "many", "OUTRIDER_DECODE_NODE__MAX_RUNNING_SEQUENCES"),
        ("OUTRIDER_ROUTER__MAX_WAITNG", "1", "the nearest is router.max_waiting"),
        (
            "OUTRIDER_MODEL__ID",
            "/nowhere",
            "model.id '/nowhere' is neither a directory, a GGUF file nor a Hugging Face id",
        ),
    ],
)
def test_a_wrong_setting_of_any_role_is_one_clear_line(model, monkeypatch, capsys, variable, value, message):
    monkeypatch.setenv(variable, value)
    assert main(["fetch", *([] if variable.endswith("MODEL__ID") else ["--model", str(model)])]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith("outrider fetch: ")
    assert shown.count("\n") == 1


def test_a_wrong_line_of_the_file_is_named(model, tmp_path, capsys):
    file = tmp_path / "outrider.yaml"
    file.write_text("telemetry:\n  log_level: info\nserver: {port: 70000}\n")
    assert main(["fetch", "--model", str(model), "--config", str(file)]) == 1
    shown = capsys.readouterr().err
    assert f"{file}:3" in shown
    assert "server.port = 70000 is out of range" in shown
