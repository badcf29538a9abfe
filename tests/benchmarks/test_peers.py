"""The comparison with other servers: who takes part in which dtype, and what is said of those that cannot."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.reference import _encode_one
from outrider.bench.prompts import BenchPrompt
from outrider.client import ChatMessage

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch):
    """Returns a function that imports a module of the folder, whose scripts import each other by name."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield import_module
    for name in {*sys.modules} - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def names(contestants):
    return [(one.peer.name, one.dtype) for one in contestants]


def test_all_with_a_dtype_is_every_peer_once(peers, tmp_path):
    contestants = peers("contestants")
    chosen = names(contestants.choose(["ours:int8", "all:int8", "all:int4"], tmp_path))
    assert chosen[0] == ("ours", "int8")
    assert len(chosen) == len(set(chosen))
    known = {make().name for makes in contestants.PEERS.values() for make in makes}
    assert {name for name, dtype in chosen if dtype == "int4"} == known


def test_a_gguf_file_is_measured_in_its_own_types_and_others_say_why_not(peers, gguf):
    contestants = peers("contestants")
    chosen = contestants.choose(["ours", "transformers", "vllm", "ours:int8"], gguf)
    assert names(chosen)[0] == ("ours", "gguf")
    installed, failures = contestants.install(chosen, gguf, tell=lambda _: None)
    assert names(installed) == [("ours", "gguf")]
    reasons = {(failure.peer, failure.dtype): failure.error for failure in failures}
    assert "gguf is none of its dtypes" in reasons["vllm", "gguf"]
    assert "is a GGUF file" in reasons["ours", "int8"]


def test_gguf_is_no_dtype_of_a_directory(peers, tmp_path):
    contestants = peers("contestants")
    installed, (failure,) = contestants.install(contestants.choose(["ours:gguf"], tmp_path), tmp_path, tell=lambda _: _)
    assert not installed
    assert "is no GGUF file" in failure.error


def test_a_peer_that_cannot_be_installed_in_one_dtype_stops_no_other(peers, tmp_path, monkeypatch):
    contestants, process = peers("contestants"), peers("process")

    def install(_, __, dtype):
        if dtype == "int4":
            raise process.PeerError("it did not compile")

    monkeypatch.setattr(contestants.CTranslate2, "all_dtypes", ("int4", "int8"))
    monkeypatch.setattr(contestants.CTranslate2, "install", install)
    chosen = contestants.choose(["ctranslate2:int4", "ctranslate2:int8", "ours:int4"], tmp_path)
    installed, failures = contestants.install(chosen, tmp_path, tell=lambda _: None)
    assert names(installed) == [("ctranslate2", "int8"), ("ours", "int4")]
    assert [failure.error for failure in failures] == ["it did not compile"]
    table = peers("table").as_text(failures)
    assert "failed: ctranslate2 int4 plain, round 0: it did not compile" in table


@pytest.mark.parametrize(
    ("dtype", "weights", "computed"),
    [("int4", "int4", "auto"), ("bfloat16", "auto", "bfloat16"), ("gguf", "auto", "auto")],
)
def test_ours_is_started_with_the_model_and_the_setting_of_its_weights(peers, gguf, dtype, weights, computed):
    setup = peers("peer").Setup(
        model=gguf,
        dtype=dtype,
        speculation=False,
        max_tokens=8,
        max_prompt_tokens=8,
        num_threads=1,
        log=gguf,
        start_seconds=1.0,
        answer_seconds=1.0,
    )
    command = peers("peer_ours")._command(setup, gguf)
    assert command[command.index("--model") + 1] == str(gguf)
    assert f"model.weights={weights}" in command
    assert command[command.index("--dtype") + 1] == computed


def test_gguf_peers_share_one_file_for_each_dtype(peers, gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_PEERS_DIR", str(tmp_path))
    files = peers("gguf_files")
    assert files.gguf_file(gguf, "gguf") == gguf
    assert files.gguf_file(Path("/models/small"), "int4") == tmp_path / "gguf" / "small-q4_k_m.gguf"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_compressed_checkpoint_is_within_half_a_step_of_the_weights(peers, bits):
    script = peers("compress_checkpoint")
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    tensors = script.compress({"a.q_proj.weight": weight, "norm.weight": weight[0]}, bits)
    assert torch.equal(tensors["norm.weight"], weight[0])
    scale = tensors["a.q_proj.weight_scale"]
    if bits == 8:
        values = tensors["a.q_proj.weight"]
    else:
        assert tensors["a.q_proj.weight_shape"].tolist() == [6, 128]
        words = tensors["a.q_proj.weight_packed"]
        assert words.shape == (6, 16)
        values = torch.stack([(words >> 4 * at & 15) - 8 for at in range(8)], -1).reshape(6, 128)
    step = scale.repeat_interleave(128 // scale.shape[1], 1)
    assert ((values * step - weight).abs() <= step / 2 * 1.001).all()
    assert script.quantization_config(bits)["config_groups"]["group_0"]["weights"]["num_bits"] == bits


def test_a_server_of_lines_reads_prompts_until_input_ends(peers, monkeypatch, capsys):
    lines = peers("serve_lines")
    monkeypatch.setattr(sys, "stdin", iter(['{"id": 3, "prompt": [1, 2]}\n']))
    inbox = lines.inbox_of_prompts()
    assert inbox.get(timeout=10) == (3, [1, 2])
    assert inbox.get(timeout=10) is None
    lines.say(id=3, tokens=[4])
    assert capsys.readouterr().out == '{"id": 3, "tokens": [4]}\n'


def test_messages_are_joined_for_a_model_without_a_chat_template():
    class Tokenizer:
        chat_template = None

        def __call__(self, text):
            return SimpleNamespace(input_ids=list(text.encode()))

    prompt = BenchPrompt(id="a", kind="chat", content=(ChatMessage("system", "a"), ChatMessage("user", "b")))
    assert _encode_one(Tokenizer(), prompt) == list(b"a\n\nb")
