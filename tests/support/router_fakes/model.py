"""A model without weights: its identity, and a byte-level tokenizer with a chat template."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers

from outrider.model_hub.checkpoint_text import read_text, resolved_files
from outrider.node import ModelInfo

EOS_TOKEN_ID = 256
VOCAB_SIZE = 264  # 256 bytes, three special tokens, one added plain one, padding

CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('unknown role ' + message['role']) }}\n"
    "    {% endif %}\n"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ '<|start|>assistant\n' -}}\n"
    "{% endif %}\n"
    "{% if thought is defined %}\n"
    "{{ thought ~ '' -}}\n"
    "{% endif %}\n"
)


def fake_tokenizer_files() -> dict[str, bytes]:
    """Returns a byte-level tokenizer: id = byte; 256 end of text, 257 <|start|>, 258 <|end|>, 259 an added word."""
    return dict(_tokenizer_files())


@functools.cache  # every fake node has these files
def _tokenizer_files() -> dict[str, bytes]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by_byte = {_character_of(byte): byte for byte in range(256)}
    assert sorted(by_byte) == alphabet, "the alphabet is GPT-2's"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=by_byte, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|start|>", "<|end|>"])
    tokenizer.add_tokens(["plain added"])
    config = {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"temperature": 0.5, "top_k": 20}',
    }


def files_for_gateways() -> dict[str, bytes]:
    files = fake_tokenizer_files()
    return resolved_files(files, read_text(files))


def _character_of(byte: int) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in printable))


def fake_model_info(**changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "name": "fake-model",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "eos_token_ids": (EOS_TOKEN_ID,),
        "dtype": "float32",
        "fingerprint": "f" * 64,
        "vocabulary_fingerprint": "a" * 64,
        "proposer": "ngram",
        "num_speculative_tokens": 4,
        "numerics": "exact (fake)",
        "can_blend": True,
    }
    return ModelInfo(**values | changes)
