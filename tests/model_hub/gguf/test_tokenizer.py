from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.errors import ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.gguf.tokenizer import GgufVocabulary
from outrider.model_hub.locate import locate_model
from tests.model_hub.gguf.hard_texts import TEXTS
from tests.model_hub.gguf.vocabularies import PRES, vocabularies
from tests.support.tiny_gguf import open_gguf

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_bytes())
GEMMA = os.environ.get("OUTRIDER_GEMMA_GGUF", "")
_MARKS = {text for text in TEXTS if text.startswith(("nai\u0308ve", "Z\u0351", "नमस्ते", "สวัสดี"))}
OWN = {
    "tekken": _MARKS | {text for text in TEXTS if text.startswith("Größe")},
    "gpt-4o": _MARKS,
    "deepseek-coder": {text for text in TEXTS if text.startswith("\u2003em")},
}
"""Texts that llama.cpp splits otherwise than the models' own tokenizers do: it knows no combining marks in these
patterns and no spaces outside ASCII. The models' own splits hold."""


@functools.cache  # not made when the tests are collected, as training takes a second
def trained() -> dict[str, dict[str, Any]]:
    return dict(vocabularies(TEXTS))


def vocabulary(**values) -> GgufVocabulary:
    return GgufVocabulary.of({f"tokenizer.ggml.{name}": value for name, value in values.items()})


def test_there_are_enough_texts():
    assert trained().keys() == {*PRES, "sentencepiece", "sentencepiece without prefix"}
    assert len(TEXTS) >= 60
    assert {len(ids) for ids in RECORDED.values()} == {len(TEXTS)}
    assert len({json.dumps(ids) for ids in RECORDED.values()}) == len(RECORDED)  # no kind is like another


@pytest.mark.parametrize("name", [*PRES, "sentencepiece", "sentencepiece without prefix"])
def test_token_ids_equal_llama_cpps(name):
    assert different_texts(vocabulary(**trained()[name]).make_tokenizer(), name) == OWN.get(name, set())


def test_the_default_models_token_ids_equal_llama_cpps():
    tokenizer = Tokenizer.from_file(str(locate_model(ModelConfig()).directory / "tokenizer.json"))
    assert different_texts(tokenizer, "smollm2 file") == set()


@pytest.mark.skipif(not GEMMA, reason="OUTRIDER_GEMMA_GGUF names no file")
def test_gemmas_token_ids_equal_llama_cpps(tmp_path):
    directory = open_gguf(Path(GEMMA), tmp_path).directory
    assert different_texts(Tokenizer.from_file(str(directory / "tokenizer.json")), "gemma file") == set()


def different_texts(tokenizer: Tokenizer, name: str) -> set[str]:
    found = (tokenizer.encode(text).ids for text in TEXTS)
    return {text for text, ours, theirs in zip(TEXTS, found, RECORDED[name], strict=True) if ours != theirs}


@pytest.mark.parametrize("name", ["qwen2", "sentencepiece", "sentencepiece without prefix"])
def test_decoding_returns_the_text(name):
    tokenizer = vocabulary(**trained()[name]).make_tokenizer()
    for text in TEXTS:
        if "<" not in text and "▁" not in text and "    " not in text:  # a prefix follows each special token
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(ModelError, match="'t5', which is not supported"):
        vocabulary(model="t5", tokens=["a"])
    with pytest.raises(ModelError, match="'viking', which is not supported"):
        vocabulary(model="gpt2", pre="viking", tokens=["a"], merges=[]).make_tokenizer()
    with pytest.raises(ModelError, match="no vocabulary"):
        vocabulary(model="gpt2")
    with pytest.raises(ModelError, match="adds a token bos that the file does not name"):
        vocabulary(model="gpt2", pre="llama-bpe", tokens=["a"], merges=[]).make_tokenizer()


def test_texts_end_at_every_token_that_ends_a_turn():
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<stop>", "<more>", "</s>"]
    found = vocabulary(model="gpt2", tokens=tokens, merges=[], eos_token_id=3, eom_token_id=4)
    assert found.eos_ids() == [1, 2, 3, 4]
    harmony = ["<|return|>", "<|call|>", "<|end|>"]
    assert vocabulary(model="gpt2", tokens=harmony, merges=[]).eos_ids() == [0, 1]


def test_phi_3_strips_spaces_after_its_special_tokens():
    tokens, types = ["<|user|>", "<s>", "a", "Ġ"], [3, 3, 1, 1]
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (("model", "gpt2"), ("tokens", tokens))}
    metadata |= {"tokenizer.ggml.token_type": types, "general.name": "Phi-3 mini"}
    tokenizer = GgufVocabulary.of(metadata).make_tokenizer()
    assert tokenizer.encode("<|user|> a<s> a").ids == [0, 2, 1, 3, 2]
