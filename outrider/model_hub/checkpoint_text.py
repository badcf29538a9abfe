"""A checkpoint's text settings, read from all of its files with transformers' precedence. Torch-free.

Tokens, special tokens and templates are in up to eight files, and newer kinds of files may exist together with those
that they replace. Only `read_text` knows their precedence: nodes, routers, constraints and gateways use its result.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from outrider.errors import ModelError
from outrider.heap import collection_paused

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FOLDER = "additional_chat_templates"
TEXT_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
"""Files that, with templates in TEMPLATE_FOLDER, define a checkpoint's text settings. Only the first is required."""
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""The template for chats with tools, if a checkpoint has a separate one."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ID_AND_LENGTH = struct.Struct("<II")
_MIN_FLOAT32 = 1.2e-38
_MAX_FLOAT32 = 3.4e38
_SAMPLING_RANGES: dict[str, tuple[type[float], float, float]] = {
    "temperature": (float, 0.0, _MAX_FLOAT32),
    "top_p": (float, _MIN_FLOAT32, 1.0),
    "top_k": (int, 0, 2**32 - 1),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, _MIN_FLOAT32, _MAX_FLOAT32),
}
"""The type, smallest and largest value of each parameter of a generation_config.json, according to the public API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointText:
    """A checkpoint's text settings. Ids are the tokenizer's; a model may have fewer or more rows."""

    tokenizer_json: bytes  # tokenizer.json with the added tokens of all files
    vocabulary: Mapping[int, str]  # every id with an entry in `tokenizer_json`, added tokens included
    own_vocabulary: Mapping[int, str]  # of the original tokenizer.json, without other files' additions
    special_tokens: Mapping[str, str]  # by name, such as "bos_token"
    chat_templates: Mapping[str, str]  # by name, such as "default"
    eos_token_ids: tuple[int, ...]  # ids that end a text, ascending
    default_sampling: Mapping[str, float]  # fields of SamplingParams set in generation_config.json


def open_text(directory: Path) -> tuple[dict[str, bytes], CheckpointText]:
    """Returns (the files by path within the checkpoint, their text settings). Raises: ModelError."""
    names = [*TEXT_FILES, *(f"{TEMPLATE_FOLDER}/{path.name}" for path in (directory / TEMPLATE_FOLDER).glob("*.jinja"))]
    files = {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise ModelError(
            f"{directory} has no {TOKENIZER_FILE}: save a fast tokenizer there "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return files, read_text(files)
    except ModelError as error:
        raise ModelError(f"in {directory}, {error.message}; copy or download it again") from error


@collection_paused()
def read_text(files: Mapping[str, bytes]) -> CheckpointText:
    """Reads the text settings from `files` (see `open_text`). Raises: ModelError that names a damaged file."""
    if TOKENIZER_FILE not in files:
        raise ModelError(f"the node's tokenizer has no {TOKENIZER_FILE}", reason="NO_TOKENIZER")
    config = _read_object(files, "tokenizer_config.json")
    # If a checkpoint has the newer key, the older file is ignored.
    older = {} if "added_tokens_decoder" in config else _read_object(files, "special_tokens_map.json")
    named, extra = _special_tokens(config, older)
    special_tokens = {name: _content(value) for name, value in named.items()}
    description = _parse(files[TOKENIZER_FILE])
    vocabulary = own_vocabulary = _vocabulary(description)
    tokenizer_json = _with_added_tokens(files, description, config, named, extra)
    if tokenizer_json != files[TOKENIZER_FILE]:
        vocabulary = read_vocabulary(tokenizer_json)
    eos_token_ids = {token_id for token_id, token in vocabulary.items() if token == special_tokens.get("eos_token")}
    model, generation = (_read_object(files, name) for name in ("config.json", "generation_config.json"))
    return CheckpointText(
        tokenizer_json=tokenizer_json,
        vocabulary=vocabulary,
        own_vocabulary=own_vocabulary,
        special_tokens=special_tokens,
        chat_templates=_chat_templates(files, config),
        eos_token_ids=tuple(sorted(eos_token_ids.union(*map(_eos_token_ids, (model, generation))))),
        default_sampling=_default_sampling(generation),
    )


def resolved_files(files: Mapping[str, bytes], text: CheckpointText) -> dict[str, bytes]:
    """Returns the files, changed so that programs that give other files precedence also get the resolved settings."""
    config = _read_object(files, "tokenizer_config.json")
    config = {name: value for name, value in config.items() if name not in SPECIAL_TOKENS} | dict(text.special_tokens)
    resolved = dict(files) | {TOKENIZER_FILE: text.tokenizer_json, "tokenizer_config.json": json.dumps(config).encode()}
    if "special_tokens_map.json" in files:
        resolved["special_tokens_map.json"] = json.dumps(dict(text.special_tokens)).encode()
    if DEFAULT_TEMPLATE in text.chat_templates:
        resolved["chat_template.jinja"] = _one_template(text.chat_templates).encode()
    return resolved


def _one_template(templates: Mapping[str, str]) -> str:
    """Returns the default template, extended to render TOOL_TEMPLATE if there are tools."""
    if TOOL_TEMPLATE not in templates:
        return templates[DEFAULT_TEMPLATE]
    for_tools, for_others = (templates[name].removesuffix("\n") for name in (TOOL_TEMPLATE, DEFAULT_TEMPLATE))
    # Jinja trims the newline after a block tag, so each template begins a line. Jinja trims spaces before block tags,
    # but not before the empty outputs.
    return f"{{% if tools %}}\n{for_tools}{{{{ '' }}}}{{% else %}}\n{for_others}{{{{ '' }}}}{{% endif %}}"


def read_vocabulary(tokenizer_json: bytes) -> dict[int, str]:
    """Returns the token of every id in a tokenizer.json, added tokens included. Raises: ModelError if it is invalid."""
    return _vocabulary(_parse(tokenizer_json))


def _parse(tokenizer_json: bytes) -> Any:
    """Parses a tokenizer.json, which takes a third of a second for 262,144 tokens. Raises: ModelError."""
    try:
        return json.loads(tokenizer_json)
    except ValueError as error:
        raise ModelError(f"{TOKENIZER_FILE} is not a tokenizer: {error!r}") from error


def _vocabulary(description: Any) -> dict[int, str]:
    try:
        entries = description["model"]["vocab"]
        if isinstance(entries, Mapping):
            strings = {int(token_id): str(string) for string, token_id in entries.items()}
        else:  # unigram: [[string, score], …], indexed by id
            strings = {token_id: str(entry[0]) for token_id, entry in enumerate(entries)}
        strings.update({int(token["id"]): str(token["content"]) for token in description.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"{TOKENIZER_FILE} is not a tokenizer: {error!r}") from error
    return strings


def vocabulary_fingerprint(strings: Mapping[int, str]) -> str:
    """Returns the SHA-256 in hexadecimal over every (id, string) of a vocabulary, ids ascending.

    Draft and target models are compatible if and only if the fingerprints of their original tokenizer.json are equal. A
    special token that other files add to only one of the models, e.g. for padding, is never drafted. Padding ids, which
    have no entry, do not count.
    """
    parts: list[bytes] = []
    for token_id, string in sorted(strings.items()):
        encoded = string.encode("utf-8", "surrogatepass")
        parts += (_ID_AND_LENGTH.pack(token_id, len(encoded)), encoded)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _with_added_tokens(
    files: Mapping[str, bytes],
    description: Mapping[str, Any],
    config: Mapping[str, Any],
    named: Mapping[str, Any],
    extra: Sequence[Any],
) -> bytes:
    """Returns tokenizer.json with the tokens that other files declare; those in `named` and `extra` are special.

    As in transformers, a token that the tokenizer has keeps its id, and a new one gets the next free id.
    """
    try:
        entries = description.get("added_tokens") or ()
        known = [_token(entry) for entry in entries]
        if "added_tokens_decoder" in config:
            declared = {int(token_id): _token(entry) for token_id, entry in config["added_tokens_decoder"].items()}
        else:
            names = {*map(_content, named.values()), *map(_content, extra)}
            added = _read_object(files, "added_tokens.json").items()
            declared = {int(token_id): _token({"content": name, "special": name in names}) for name, token_id in added}
            declared |= {entry["id"]: token for entry, token in zip(entries, known, strict=True)}
        by_content = {token.content: token for token in declared.values()}
        special = [
            by_content.get(_content(value), _token(value)) if name in SPECIAL_TOKENS else _token(value)
            for name, value in (*named.items(), *(("", value) for value in extra))
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the added tokens of {TOKENIZER_FILE} or tokenizer_config.json: {error!r}") from error
    known_tokens = set(map(repr, known))
    always_special = {*(token.content for token in known if token.special), *map(_content, named.values())}
    for token in (*declared.values(), *special):
        token.special |= token.content in always_special
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in known_tokens]
    contents = {token.content for token in (*known, *missing)}
    missing += [token for token in special if token.content not in contents]
    if not missing:
        return files[TOKENIZER_FILE]
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
    tokenizer.add_tokens(missing)
    return tokenizer.to_str().encode()


def _special_tokens(config: Mapping[str, Any], older: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Returns (special tokens by name, transformers' names first, then the checkpoint's; special tokens without names).

    `older`: special_tokens_map.json, which takes precedence over tokenizer_config.json for transformers' names only.
    """
    extra = config.get("extra_special_tokens")
    if not extra and "additional_special_tokens" in config:
        extra = config["additional_special_tokens"]
    has_list = not isinstance(extra, dict) and not config.keys().isdisjoint(_LISTS)
    own = [{name: source[name] for name in source if name.endswith("_token")} for source in (older, config)]
    every = dict.fromkeys(SPECIAL_TOKENS) | own[0] | own[1]
    every |= {name: older[name] for name in SPECIAL_TOKENS if name in older}
    every |= _mapping(extra) | _mapping(older.get("extra_special_tokens"))
    found = list(extra) if isinstance(extra, list) else []
    for name in _LISTS[:1] if has_list else _LISTS:
        values = older.get(name)
        found += [value for value in values if value not in found] if isinstance(values, list) else []
    named = {name: token for name, token in every.items() if isinstance(token, str) or "content" in _mapping(token)}
    return named, found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _token(value: Any) -> tokenizers.AddedToken:
    """Converts a file's entry: a string, which is a special token, or an object."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return tokenizers.AddedToken(value["content"], **flags)


def _content(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _chat_templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Returns templates by name: from separate files, else tokenizer_config.json, else the older chat_template.json."""
    found: Any = {
        Path(name).stem: source.decode(errors="replace")
        for name, source in files.items()
        if Path(name).parent.name == TEMPLATE_FOLDER
    }
    if "chat_template.jinja" in files:
        found[DEFAULT_TEMPLATE] = files["chat_template.jinja"].decode(errors="replace")
    found = found or config.get("chat_template") or _read_object(files, "chat_template.json").get("chat_template") or {}
    try:
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        return {DEFAULT_TEMPLATE: found} if isinstance(found, str) else {str(key): str(found[key]) for key in found}
    except (KeyError, TypeError) as error:
        raise ModelError(f"the chat template of tokenizer_config.json: {error!r}") from error


def _eos_token_ids(config: Mapping[str, Any]) -> set[int]:
    """Returns a configuration's end-of-text ids.

    transformers' `generate` reads only the generation_config, which is made from the model's configuration if the
    checkpoint has no such file. Chat models often name the end of a turn in one file and the end of a text in
    another; a server must use all these ids.
    """
    found: set[int] = set()
    for source in (config, _mapping(config.get("text_config"))):
        value = source.get("eos_token_id")
        if value is not None:
            try:
                found.update(int(token_id) for token_id in (value if isinstance(value, list) else (value,)))
            except (TypeError, ValueError) as error:
                raise ModelError(f"eos_token_id of a config.json is a token id or several, not {value!r}") from error
    return {token_id for token_id in found if token_id >= 0}


def _default_sampling(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling defaults that the public API allows. `do_sample` is ignored, as in vLLM."""
    found: dict[str, float] = {}
    for name, (kind, smallest, largest) in _SAMPLING_RANGES.items():
        value = generation_config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and smallest <= value <= largest:
            found[name] = kind(value)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; {} if the file is absent. Raises: ModelError if it contains anything else."""
    return _object(path.read_bytes(), str(path)) if path.is_file() else {}


def _read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Reads a JSON object like `read_json`, from the files in memory."""
    return _object(files.get(name, b"{}"), name)


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ModelError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object")
    return value
