"""What a model's tokenizer files say: vocabulary, known ids, end-of-text ids. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
"""What a router needs to turn text into ids and back; all but the first are optional."""


def read_tokenizer_files(directory: Path) -> tuple[dict[str, bytes], dict[int, str]]:
    """The files of TOKENIZER_FILES that exist, and the `vocabulary` that they say.

    Raises ModelError without a tokenizer.json, or when it is damaged.
    """
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise ModelError(
            f"{directory} has no {TOKENIZER_FILE}: save a fast tokenizer there "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return files, vocabulary(files[TOKENIZER_FILE])
    except ModelError as error:
        raise ModelError(f"in {directory}, {error.message}; copy or download it again") from error


def vocabulary(tokenizer_json: bytes) -> dict[int, str]:
    """Every id that has an entry in a tokenizer.json, added tokens included. Raises ModelError for anything else."""
    try:
        tokenizer: dict[str, Any] = json.loads(tokenizer_json)
        entries = tokenizer["model"]["vocab"]
        if isinstance(entries, Mapping):
            strings = {int(token_id): str(string) for string, token_id in entries.items()}
        else:  # unigram: [[string, score], …], the id is the index
            strings = {token_id: str(entry[0]) for token_id, entry in enumerate(entries)}
        strings.update({int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"{TOKENIZER_FILE} is not a tokenizer: {error!r}") from error
    return strings


def vocabulary_fingerprint(strings: Mapping[int, str]) -> str:
    """SHA-256 in hexadecimal over every (id, string) of a `vocabulary`, ids rising.

    Draft and target models fit together if and only if these are equal; padded ids,
    which no tokenizer entry names, do not count.
    """
    digest = hashlib.sha256()
    for token_id, string in sorted(strings.items()):
        encoded = string.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def known_token_ids(strings: Mapping[int, str], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which of a model's `vocab_size` rows a `vocabulary` has an entry for; the others are padding."""
    known = np.zeros(vocab_size, dtype=np.bool_)
    known[[token_id for token_id in strings if 0 <= token_id < vocab_size]] = True
    return known


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: those of both configurations, rising.

    transformers' `generate` looks at generation_config alone, which is made from the
    model's configuration where a checkpoint has none. Chat models often name the end of
    a turn in one of them and the end of a text in the other; a server must heed both.
    """
    found: set[int] = set()
    for source in (config, config.get("text_config") or {}, generation_config):
        value = source.get("eos_token_id")
        if value is not None:
            found.update(int(token_id) for token_id in (value if isinstance(value, Iterable) else (value,)))
    return tuple(sorted(found))


def grammar_compiler(files: Mapping[str, bytes], vocab_size: int) -> GrammarCompiler:
    """For a model with logits of this width. `files`: as of `read_tokenizer_files`."""
    configs = (json.loads(files.get(name, b"{}")) for name in ("config.json", "generation_config.json"))
    return GrammarCompiler(files[TOKENIZER_FILE], vocab_size=vocab_size, eos_token_ids=eos_token_ids(*configs))


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
