from __future__ import annotations

import pytest

from outrider.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--form", "eagle9"], "--form 'eagle9' is not one of eagle3, dspark"),
        (["--minutes", "-1"], "--minutes -1"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl cannot be read"),
        (["--prompts", "a", "--from-traffic", "b"], "give one of them"),
        (["--from-traffic", "nowhere"], "decode_node.keep_answers=nowhere"),
        (["--init-from", "nowhere"], "nowhere has no config.json"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(tiny_model, tmp_path, capsys, arguments, said):
    command = ["train-head", "--out", str(tmp_path / "head"), "--model", str(tiny_model), *arguments]
    assert main(command) == 1
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tiny_model, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "prompts.jsonl").write_text('{"text": "why"}')
    command = ["train-head", "--out", str(tmp_path / "file"), "--model", str(tiny_model)]
    assert main([*command, "--prompts", str(tmp_path / "prompts.jsonl")]) == 1
    assert "cannot be written to" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_in_one_line(tiny_model, tmp_path, capsys, monkeypatch):
    def fill(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.training.run.train_head", fill)
    assert main(["train-head", "--out", str(tmp_path / "head"), "--model", str(tiny_model)]) == 1
    assert "No space left on device; once this is fixed, the same command continues" in capsys.readouterr().err


def test_a_folder_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["train-head"])
    assert "--out" in capsys.readouterr().err


@pytest.mark.usefixtures("light_training")
def test_the_command_trains_from_traffic(tiny_model, tmp_path, capsys):
    from outrider.training.answer_files import AnswerWriter, KeptAnswer

    writer = AnswerWriter(tmp_path / "kept", max_bytes=1 << 20)
    for number in range(30):
        writer.append(KeptAnswer([3, 4, number + 5], [number + 5] * 20, 0.0, "traffic"))
    command = ["train-head", "--out", str(tmp_path / "head"), "--model", str(tiny_model), "--minutes", "0.05"]
    options = ["--from-traffic", str(tmp_path / "kept"), "--draft-vocab", "64", "--set", "model.num_threads=1"]
    assert main([*command, *options]) == 0
    assert "Expected speedup" in capsys.readouterr().out
    assert (tmp_path / "head" / "config.json").is_file()
