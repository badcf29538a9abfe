"""Adapters (LoRA) on real processes: tokens are those of merged weights, after hand-offs, prefix hits and failovers."""

from __future__ import annotations

import json
import re
import signal
import time

import openai
import pytest

from outrider.cli.main import main
from outrider.client import ChatMessage
from outrider.cluster.config import ClusterConfig
from outrider.errors import MismatchError, NotFoundError
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.tiny_model import tiny_tokenizer

PROMPT = [(i * 13) % 250 + 20 for i in range(150)]
WAIT_SECONDS = 60.0
CONTROL_KEY = "control"  # of the gateway
CUT = "\ufffd"  # a character that the answer's last token has not completed; the gateway omits it from streams
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0.9, "seed": 3, "max_tokens": 1200, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "law", "tax"), start=1):
        make_adapter(folder / name, tiny_model, seed=seed)
    return folder


@pytest.fixture(scope="module")
def adapted(start_cluster, folder, tmp_path_factory):
    """A prefill node and two decode nodes with two adapters, and the permission to load others."""
    receipts = tmp_path_factory.mktemp("receipts")
    settings = [
        f"model.adapters=sql={folder}/sql,law={folder}/law",
        f"model.adapter_directory={folder}",
        f"gateway.extra_arguments=--control-plane-api-keys,test:test:admin:{CONTROL_KEY}",
    ]
    with start_cluster(
        ClusterConfig(port=0, decode_nodes=2, openai_port=0), *settings, f"router.receipts={receipts}"
    ) as cluster:
        cluster.wait_serving(START_SECONDS)
        running = RunningCluster(cluster, receipts=receipts)
        running.wait_until_all_serve()
        yield running


@pytest.fixture(scope="module")
def merged_tokens(tiny_model, folder):
    """merged_tokens(name, answer) → the likeliest token before each of the answer's, by transformers with merged
    weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    def tokens(name, answer):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if name:
            merge_adapter(model, folder / name)
        logits = model(torch.tensor([[*PROMPT, *answer[:-1]]])).logits[0, len(PROMPT) - 1 :]
        return tuple(logits[:, : tiny_tokenizer().get_vocab_size()].argmax(-1).tolist())

    return tokens


def test_answers_are_those_of_merged_weights_after_a_hand_off(adapted, merged_tokens):
    tokens, summaries = {}, {}
    for name in ("", "sql", "law"):
        tokens[name], summaries[name] = adapted.generate(PROMPT, model=name, **GREEDY)
        assert tokens[name] == merged_tokens(name, tokens[name])
        assert summaries[name].metrics.kv_transfer.bytes > 0
        assert summaries[name].usage.num_cached_tokens == 0, "nothing is shared with another adapter"
    for name, expected in tokens.items():
        again, summary = adapted.generate(PROMPT, model=name, **GREEDY)
        assert again == expected
        assert summary.usage.num_cached_tokens > 100, "all but the end is in its own prefix cache"


def test_the_model_describes_its_adapters_and_the_answer_names_its_own(adapted):
    model = adapted.client.model()
    assert [adapter.name for adapter in model.adapters] == ["law", "sql"]
    with adapted.client.generate("a", model="sql", max_tokens=1) as stream:
        list(stream)
        assert stream.started.model == "sql"
    with pytest.raises(NotFoundError, match="with the adapters 'law', 'sql'"):
        adapted.client.complete("a", model="tax")


@pytest.mark.parametrize("constraint", [{"choice": ["yes", "no"]}, {"regex": "[0-9]{8}"}])
def test_a_constraint_holds_for_an_adapter(adapted, constraint):
    texts = [
        adapted.client.complete("a", model=name, temperature=0.0, **constraint, **speculation).text
        for name in ("sql", "law")
        for speculation in ({}, {"speculation": False})
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert all(text in ("yes", "no") if "choice" in constraint else re.fullmatch("[0-9]{8}", text) for text in texts)


def test_an_answer_goes_on_on_another_node(adapted):
    adapted.wait_until_all_serve()
    expected, before = adapted.generate(PROMPT, model="sql", **LONG)
    # The next answer comes from the same node, which has the prompt's blocks.
    (serving,) = [node.name for node in adapted.cluster.nodes if f"decode@{node.address}" in before.metrics.nodes]
    with adapted.client.generate(PROMPT, model="sql", **LONG) as stream:
        parts = iter(stream)
        next(parts)
        adapted.cluster.kill(serving, signal.SIGKILL)
        assert len(list(parts)) > 0
        assert stream.token_ids() == expected
        assert stream.summary.metrics.attempts == 2
    adapted.wait_until_all_serve()


def receipts_of(adapted, *request_ids):
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        lines = [json.loads(line) for path in adapted.receipts.glob("*") for line in path.read_bytes().splitlines()]
        found = {line["request_id"]: line for line in lines}
        if found.keys() >= set(request_ids):
            return [found[request_id] for request_id in request_ids]
        assert time.monotonic() < deadline, found.keys()
        time.sleep(0.05)


def test_a_receipt_has_the_adapter_and_its_replay_checks_it(adapted, tmp_path, capsys):
    adapted.client.complete(PROMPT, model="law", request_id="of-law", seed=1, max_tokens=20)
    adapted.client.complete(PROMPT, request_id="of-base", seed=1, max_tokens=20)
    of_law, of_base = receipts_of(adapted, "of-law", "of-base")
    law = next(adapter for adapter in adapted.client.model().adapters if adapter.name == "law")
    assert (of_law["request"]["model"], of_law["request"]["adapter_fingerprint"]) == ("law", law.fingerprint)
    assert "adapter_fingerprint" not in of_base["request"]
    assert of_law["samples"] != of_base["samples"]
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (of_law, of_base)))
    assert main(["replay", str(path), f"--against={adapted.router_address}"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.count(": identical: ") == 2
    of_law["request"]["adapter_fingerprint"] = "0" * 64
    path.write_text(json.dumps(of_law) + "\n")
    assert main(["replay", str(path), f"--against={adapted.router_address}"]) == 1
    assert "was answered with the adapter 'law' (000000000000)" in capsys.readouterr().out


def test_openai_clients_name_adapters(adapted):
    adapted.wait_until_all_serve()
    base = adapted.client.model().name
    sampling = {"seed": 5, "max_tokens": 12}
    with openai.OpenAI(base_url=adapted.cluster.openai_url, api_key="none", max_retries=5, timeout=WAIT_SECONDS) as sdk:

        def wait_until_listed(*names):
            adapted.wait_for(lambda _status: {model.id for model in sdk.models.list()} == set(names), what=names)

        wait_until_listed(base, "sql", "law")  # the SDK repeats 503, which means that a tokenizer is still loading
        texts = {}
        for name in (base, "sql", "law"):
            ours = adapted.client.complete([ChatMessage("user", "hello")], model=name, **sampling)
            answer = sdk.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hello"}], **sampling
            )
            assert answer.model == name
            texts[name] = answer.choices[0].message.content
            assert texts[name].rstrip(CUT) == ours.text.rstrip(CUT)
            chunks = sdk.completions.create(model=name, prompt="once", stream=True, **sampling)
            streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            whole = adapted.client.complete("once", model=name, **sampling).text
            assert streamed.rstrip(CUT) == whole.rstrip(CUT)
        assert len(set(texts.values())) == 3
        adapted.client.load_adapter("tax", "tax")
        wait_until_listed(base, "sql", "law", "tax")
        expected = adapted.client.complete("once", model="tax", **sampling).text
        text = sdk.completions.create(model="tax", prompt="once", **sampling).choices[0].text
        assert text.rstrip(CUT) == expected.rstrip(CUT)
        stream = sdk.completions.create(
            model="tax", prompt="once", stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
        )
        next(stream)
        adapted.client.unload_adapter("tax")
        with pytest.raises(openai.NotFoundError, match="tax"):
            sdk.completions.create(model="tax", prompt="once", **sampling)
        wait_until_listed(base, "sql", "law")
        assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"
        with pytest.raises(openai.NotFoundError, match="No worker available for model 'tax'"):
            sdk.completions.create(model="tax", prompt="once", **sampling)
        control = sdk.with_options(api_key=CONTROL_KEY)

        def are_freed(_status):
            listed = control.get("/tokenizers", cast_to=object)["tokenizers"]
            return {tokenizer["name"] for tokenizer in listed} == {base, "sql", "law"}

        adapted.wait_for(are_freed, what="the tokenizers of adapters that are loaded")


def test_an_adapter_is_loaded_on_demand_and_by_nodes_that_start_later(adapted, merged_tokens):
    adapted.wait_until_all_serve()
    tax = adapted.client.load_adapter("tax", "tax")
    assert tax in adapted.client.model().adapters
    expected, _ = adapted.generate(PROMPT, model="tax", **GREEDY)
    assert expected == merged_tokens("tax", expected)
    with pytest.raises(MismatchError, match="but names the adapter 'tax'"):
        adapted.client.complete("a", model="tax", adapter_fingerprint="0" * 64, max_tokens=1)
    for node in adapted.cluster.nodes:
        if node.role in ("decode_node", "prefill_node"):
            adapted.cluster.kill(node.name, signal.SIGKILL)
    adapted.wait_until_all_serve()
    assert adapted.generate(PROMPT, model="tax", **GREEDY)[0] == expected
    adapted.client.unload_adapter("tax")
    adapted.wait_for(lambda _status: tax not in adapted.client.model().adapters, what="no adapter")
    with pytest.raises(NotFoundError, match="is not served"):
        adapted.client.complete("a", model="tax")
