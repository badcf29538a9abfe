"""What the comparison with vLLM calls a fault."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    for folder in (BENCHMARKS, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield import_module("vllm_proposer")
    for name in {*sys.modules} - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "speed", "tokens", "fault"),
    [
        ("dead", 99.0, (1, 2), ""),
        ("dead", 97.0, (1, 2), "dead: 0.970 of the same server's speed"),
        ("ngram", 97.0, (1, 2), ""),
        ("ngram", 150.0, (1, 3), "1 of 2 answers have other tokens"),
    ],
)
def test_other_tokens_and_lost_speed_without_drafts_are_faults(script, capsys, name, speed, tokens, fault):
    right = {"a": (1, 2), "b": (5, 6)}
    plain, off = (script.Measured(tokens_per_second, 5.0, right, 0, 0) for tokens_per_second in (105.0, 100.0))
    found = script.Measured(speed, 5.0, {**right, "a": tokens}, 4, 2)
    measured = {script.PLAIN: [plain], script.SWITCHED_OFF: [off], name: [found]}
    assert script.report(measured, must_be_equal=True) == bool(fault)
    assert fault in capsys.readouterr().out


def test_tokens_may_differ_where_steps_with_drafts_are_rounded_differently(script):
    plain, found = (script.Measured(100.0, 5.0, {"a": tokens}, 0, 0) for tokens in ((1, 2), (1, 3)))
    measured = {script.PLAIN: [plain], script.SWITCHED_OFF: [plain], "ngram": [found]}
    assert script.report(measured, must_be_equal=False) == 0


def test_a_proposer_that_is_switched_off_asks_nobody(script, monkeypatch, tmp_path):
    from outrider.integrations import vllm

    asked = []
    monkeypatch.setattr(vllm.Proposer, "__init__", lambda self, config: None)
    monkeypatch.setattr(vllm.Proposer, "propose", lambda self, sampled, *_: asked.append(sampled) or [[1]])
    monkeypatch.setenv(script.SWITCH_VARIABLE, str(tmp_path / "off"))
    proposer = sys.modules["switched_proposer"].SwitchedProposer(None)
    (tmp_path / "off").touch()
    assert proposer.propose([[7], [8]], None, None) == [[], []]
    assert not asked
    (tmp_path / "off").unlink()
    assert proposer.propose([[7]], None, None) == [[1]]
    assert asked == [[[7]]]
