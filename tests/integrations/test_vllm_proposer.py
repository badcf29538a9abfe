"""The proposer behind a copy of what vLLM 0.32 does with a class of `custom_class`. `make vllm-proposer-test` runs it
in vLLM itself.
"""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.drafting import vocabulary_of
from outrider.integrations.vllm import DRAFT_NODES_VARIABLE, Proposer, client_options
from tests.decode_node.drafting.streams import draft_node, unused_port
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.waiting import wait_for

MAX_MODEL_LEN = 64
VOCAB_SIZE = 100
TEXT = [1, 2, 3, 4, 5, 6, 7, 8] * 8
OTHER = [11, 12, 13, 14, 15] * 12
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}


class Runner:
    """A batch as in vllm/v1/worker/gpu_model_runner.py: buffers of token ids, and rows that change places."""

    def __init__(self, vllm_config) -> None:
        """As `create_custom_proposer` in vllm/v1/spec_decode/custom_class_proposer.py, and `load_model`."""
        module, _, name = vllm_config.speculative_config.model.rpartition(".")
        self.drafter = getattr(importlib.import_module(module), name)(vllm_config)
        assert callable(self.drafter.propose)
        self.drafter.load_model(object())
        self.token_ids_cpu = np.zeros((8, MAX_MODEL_LEN), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(8, dtype=np.int32)

    def place(self, row, text):
        self.token_ids_cpu[row] = 0
        self.token_ids_cpu[row, : len(text)] = text
        self.num_tokens_no_spec[row] = len(text)

    def propose(self, *sampled_token_ids):
        """As `propose_draft_token_ids`, after `_bookkeeping_sync` has put the sampled tokens into the buffers."""
        return self.drafter.propose(
            list(sampled_token_ids), self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None
        )


def config(additional, folder="", num_speculative_tokens=3):
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(
            method="custom_class",
            model="outrider.integrations.vllm.Proposer",
            num_speculative_tokens=num_speculative_tokens,
        ),
        model_config=SimpleNamespace(
            tokenizer=str(folder),
            tokenizer_revision=None,
            max_model_len=MAX_MODEL_LEN,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return tmp_path


@pytest.fixture
def start(folder, monkeypatch):
    runners = []

    def begin(*ports, **settings):
        monkeypatch.setenv(DRAFT_NODES_VARIABLE, ", ".join(f"127.0.0.1:{port}" for port in ports))
        runners.append(Runner(config({"outrider": settings} if settings else {}, folder)))
        return runners[-1]

    yield begin
    for runner in runners:
        runner.drafter._client.close()


def test_rows_get_drafts_and_prompts_that_are_not_read_get_none(nodes, start):
    runner = start(nodes.serve(draft_node(ScriptedProposer([TEXT, OTHER]))))
    runner.place(0, TEXT[:20])
    runner.place(1, OTHER[:10])
    runner.place(2, OTHER[:20])
    wait_for(lambda: runner.propose([TEXT[19]], [], [OTHER[19]]) == [TEXT[20:23], [], OTHER[20:23]])


def test_rows_that_change_places_keep_their_drafts(nodes, start):
    proposer = ScriptedProposer([TEXT, OTHER])
    runner = start(nodes.serve(draft_node(proposer)))
    runner.place(0, TEXT[:20])
    runner.place(1, OTHER[:20])
    wait_for(lambda: all(runner.propose([TEXT[19]], [OTHER[19]])))
    runner.place(0, OTHER[:22])
    wait_for(lambda: runner.propose(OTHER[20:22]) == [OTHER[22:25]])
    assert len({request.sequence_id for request in proposer.requests}) == 2


def test_drafts_are_plain_lists_of_integers(nodes, start):
    runner = start(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    runner.place(0, TEXT[:20])
    wait_for(lambda: runner.propose([TEXT[19]])[0])
    drafts = runner.propose([TEXT[19]])
    assert type(drafts) is list
    assert {type(token_id) for token_id in drafts[0]} == {int}


def test_a_draft_model_with_the_tokenizer_of_the_target_is_taken(nodes, start):
    proposer = ScriptedProposer([TEXT])
    vocabulary = vocabulary_of(json.dumps(TOKENIZER).encode())
    proposer.info = type(proposer.info)(name="scripted", vocabulary_fingerprint=vocabulary)
    port = nodes.serve(draft_node(proposer))
    runner = start(port)
    runner.place(0, TEXT[:20])
    wait_for(lambda: runner.propose([TEXT[19]])[0])
    other = start(port, vocabulary="another")
    wait_for(lambda: other.drafter._client.status().refused)


def test_without_a_tokenizer_file_only_lookups_are_taken(nodes, folder, start, caplog):
    (folder / "tokenizer.json").unlink()
    runner = start(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    assert "setting `vocabulary`" in caplog.text
    runner.place(0, TEXT[:20])
    wait_for(lambda: runner.propose([TEXT[19]])[0])


def test_no_draft_node_means_no_drafts(start):
    runner = start(unused_port())
    runner.place(0, TEXT[:20])
    assert runner.propose([TEXT[19]]) == [[]]
    assert runner.propose() == []


def test_the_engine_outlives_a_bug_in_the_client(start, monkeypatch, caplog):
    runner = start(unused_port())

    def fail(*_arguments, **_options):
        raise IndexError("a bug")

    monkeypatch.setattr(runner.drafter._client, "propose", fail)
    runner.place(0, TEXT[:20])
    assert runner.propose([TEXT[19]]) == [[]]
    assert runner.propose([TEXT[19]]) == [[]]
    assert caplog.text.count("no more drafts") == 1


def test_unknown_settings_are_named(monkeypatch):
    monkeypatch.setenv(DRAFT_NODES_VARIABLE, "h:1")
    with pytest.raises(ValueError, match="has nodes"):
        Proposer(config({"outrider": {"nodes": 1}}))


@pytest.mark.parametrize("value", ["", " , "])
def test_the_variable_with_the_draft_nodes_must_be_set(monkeypatch, value):
    monkeypatch.setenv(DRAFT_NODES_VARIABLE, value)
    with pytest.raises(ValueError, match=DRAFT_NODES_VARIABLE):
        Proposer(config(None))


def test_certificates_are_given_together():
    files = {"certificate": "ours.pem", "private_key": "ours.key", "authority": "cluster.pem"}
    assert client_options({"tls": files, "max_wait_seconds": 0.0})["security"].is_enabled
    assert not client_options({})["security"].is_enabled
    with pytest.raises(ValueError, match="go together"):
        client_options({"tls": {"authority": "cluster.pem"}})
