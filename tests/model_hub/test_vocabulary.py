from __future__ import annotations

import json

import pytest

from outrider.errors import ModelError
from outrider.model_hub.vocabulary import (
    eos_token_ids,
    known_token_ids,
    read_tokenizer_files,
    vocabulary,
    vocabulary_fingerprint,
)


def tokenizer_json(vocab, added=(), **model):
    tokens = [{"id": token_id, "content": content, "special": True} for token_id, content in added]
    return json.dumps({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab, **model}}).encode()


def fingerprint(content):
    return vocabulary_fingerprint(vocabulary(content))


def test_added_tokens_are_part_of_the_vocabulary():
    assert vocabulary(tokenizer_json({"a": 0, "b": 1}, [(2, "<end>"), (1, "b")])) == {0: "a", 1: "b", 2: "<end>"}


def test_a_unigram_vocabulary_is_a_list():
    assert vocabulary(tokenizer_json([["<unk>", 0.0], ["a", -1.5]])) == {0: "<unk>", 1: "a"}


def test_the_fingerprint_tells_vocabularies_and_nothing_else_apart():
    one = fingerprint(tokenizer_json({"a": 0, "b": 1}, [(2, "<end>")]))
    assert one == fingerprint(tokenizer_json({"b": 1, "a": 0, "<end>": 2}, merges=["a b"]))
    assert one != fingerprint(tokenizer_json({"a": 1, "b": 0}, [(2, "<end>")]))
    assert one != fingerprint(tokenizer_json({"a": 0, "b": 1}))
    assert fingerprint(tokenizer_json({"ab": 0, "c": 1})) != fingerprint(tokenizer_json({"a": 0, "bc": 1}))
    assert len(one) == 64


def test_rows_without_an_entry_are_not_known():
    content = tokenizer_json({"a": 0, "c": 2, "far": 9})
    assert known_token_ids(vocabulary(content), 8).nonzero()[0].tolist() == [0, 2]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"model": {"vocab": 3}}', b'{"model": {"vocab": {"a": "x"}}}']
)
def test_what_is_no_tokenizer_is_refused(content):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        vocabulary(content)


def test_every_end_that_either_configuration_names_counts():
    assert eos_token_ids({"eos_token_id": 2}, {}) == (2,)
    assert eos_token_ids({"eos_token_id": 7}, {"eos_token_id": [5, 7]}) == (5, 7)
    assert eos_token_ids({"text_config": {"eos_token_id": [1]}}, {"eos_token_id": 0}) == (0, 1)
    assert eos_token_ids({"eos_token_id": None}, {}) == ()


def test_a_model_without_a_fast_tokenizer_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ModelError, match="save_pretrained"):
        read_tokenizer_files(tmp_path)
