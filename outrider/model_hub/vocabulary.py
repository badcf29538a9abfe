"""A tokenizer's ids beside a model's rows: fingerprint, known ids, end-of-text ids. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import CheckpointText


def vocabulary_fingerprint(strings: Mapping[int, str]) -> str:
    """SHA-256 in hexadecimal over every (id, string) of a vocabulary, ids rising.

    Draft and target models fit together if and only if these are equal, of what their tokenizer.json says: a special
    token that only one of them adds, such as one for padding, is never drafted. Padded ids, which no entry names, do
    not count either.
    """
    digest = hashlib.sha256()
    for token_id, string in sorted(strings.items()):
        encoded = string.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def known_token_ids(strings: Mapping[int, str], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which of a model's `vocab_size` rows a vocabulary has an entry for; the others are padding."""
    known = np.zeros(vocab_size, dtype=np.bool_)
    known[[token_id for token_id in strings if 0 <= token_id < vocab_size]] = True
    return known


def row_eos_token_ids(text: CheckpointText, vocab_size: int) -> tuple[int, ...]:
    """Those of its end-of-text ids that a model with so many rows can draw."""
    return tuple(token_id for token_id in text.eos_token_ids if token_id < vocab_size)


def grammar_compiler(text: CheckpointText, vocab_size: int) -> GrammarCompiler:
    """For a model with logits of this width."""
    eos_token_ids = row_eos_token_ids(text, vocab_size)
    return GrammarCompiler(text.tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when the file is absent. Raises ModelError when it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
