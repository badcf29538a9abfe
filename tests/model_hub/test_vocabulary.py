from __future__ import annotations

import json

from outrider.model_hub.checkpoint_text import read_vocabulary, vocabulary_fingerprint
from outrider.model_hub.loaded_model import known_token_ids


def tokenizer_json(vocab, added=(), **model):
    tokens = [{"id": token_id, "content": content, "special": True} for token_id, content in added]
    return json.dumps({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab, **model}}).encode()


def fingerprint(content):
    return vocabulary_fingerprint(read_vocabulary(content))


def test_added_tokens_are_part_of_the_read_vocabulary():
    assert read_vocabulary(tokenizer_json({"a": 0, "b": 1}, [(2, "<end>"), (1, "b")])) == {0: "a", 1: "b", 2: "<end>"}


def test_a_unigram_vocabulary_is_a_list():
    assert read_vocabulary(tokenizer_json([["<unk>", 0.0], ["a", -1.5]])) == {0: "<unk>", 1: "a"}


def test_the_fingerprint_tells_vocabularies_and_nothing_else_apart():
    one = fingerprint(tokenizer_json({"a": 0, "b": 1}, [(2, "<end>")]))
    assert one == fingerprint(tokenizer_json({"b": 1, "a": 0, "<end>": 2}, merges=["a b"]))
    assert one != fingerprint(tokenizer_json({"a": 1, "b": 0}, [(2, "<end>")]))
    assert one != fingerprint(tokenizer_json({"a": 0, "b": 1}))
    assert fingerprint(tokenizer_json({"ab": 0, "c": 1})) != fingerprint(tokenizer_json({"a": 0, "bc": 1}))
    assert len(one) == 64


def test_rows_without_an_entry_are_not_known():
    content = tokenizer_json({"a": 0, "c": 2, "far": 9})
    assert known_token_ids(read_vocabulary(content), 8).nonzero()[0].tolist() == [0, 2]
