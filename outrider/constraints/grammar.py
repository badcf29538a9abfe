"""Constraints as llguidance's grammars over the bytes of a vocabulary's tokens. Needs neither torch nor numpy.

llguidance (https://github.com/guidance-ai/llguidance) parses with Earley's algorithm over derivatives of regular
expressions. Its limits count work, not time, so that all nodes refuse the same grammars. Some compilations have no such
limit (intersections of patterns). Routers therefore compile in a process that they can kill, and send nodes only those
constraints that compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.request import Constraint, ConstraintKind
from outrider.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

NUMERICS = f"llguidance {version('llguidance')}, compact"
"""Identifies how masks are computed: nodes with equal values allow the same tokens."""

MAX_MESSAGE_LENGTH = 500
MAX_SPELLINGS = 512
"""Maximum number of texts whose tokens are cached. The cache helps since samples of a grammar reach the same texts."""

# With these limits a mask takes at most about 0.1 s, even if only one long text can follow, and the states of one
# grammar's lexer take at most about 40 MB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000, step_max_items=3_000, max_lexer_states=20_000, verbose_errors=False
)

# Compact JSON, because a small model that is allowed whitespace between JSON's tokens may write nothing but whitespace.
# A schema's own "x-guidance" takes precedence.
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

_FORMAT_LENGTHS = {"date-time": 35, "time": 24, "duration": 40}
"""Maximum number of characters in a text of these formats, because their number of digits is otherwise unlimited."""
_FORMATS = (*_FORMAT_LENGTHS, "date", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_UNLIMITED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
"""Keywords that llguidance does not know, with their values that limit nothing. Schema generators write them."""
NAMED_SCHEMA_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map the user's own names to schemas."""
DATA_KEYWORDS = ("const", "enum", "default", "examples", "example", "x-guidance")
"""Keywords whose values are data, not schemas."""


def grammar_text(constraint: Constraint) -> str:
    """Returns the grammar for llguidance. Raises: InvalidRequestError for a schema that is not a JSON object."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                schema = _without_annotations(json.loads(constraint.text))
                text = json.dumps({} if schema is True else schema)  # `true` allows everything but is not an object
                return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
            except (ValueError, RecursionError) as error:
                raise invalid(constraint, str(error)) from error
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)
        case ConstraintKind.CHOICE:
            texts = (json.dumps(option, ensure_ascii=False) for option in constraint.options)
            options = " | ".join(text.replace("\x7f", "\\u007f") for text in texts)  # Lark rejects control characters
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}\n")


def _without_annotations(schema: Any, *, is_named: bool = False) -> Any:
    """Returns the schema without the parts that llguidance refuses although they constrain nothing. Limits texts to
    `_FORMAT_LENGTHS`.

    An unknown `format` is an annotation in JSON Schema. `is_named`: whether this is a mapping from names to schemas.
    """
    if isinstance(schema, list):
        return [_without_annotations(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if is_named:
        return {name: _without_annotations(part) for name, part in schema.items()}
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        match keyword:
            case "format" if value not in _FORMATS:
                continue
            case "$schema" if isinstance(value, str) and "//json-schema.org/" not in value:
                continue  # a dialect that llguidance would fetch
            case "$dynamicAnchor" | "$recursiveAnchor":
                continue  # such a keyword only names a part for references
        is_data = keyword in DATA_KEYWORDS
        part = value if is_data else _without_annotations(value, is_named=keyword in NAMED_SCHEMA_KEYWORDS)
        if part not in _UNLIMITED.get(keyword, ()):
            found[keyword] = part
    longest = _FORMAT_LENGTHS.get(found.get("format", ""))
    if longest is not None and isinstance(found.get("maxLength", longest), int):
        longest = max(longest, int(found.get("minLength", 0)))
        found["maxLength"] = min(found.get("maxLength", longest), longest)
    return found


def invalid(constraint: Constraint, message: str) -> InvalidRequestError:
    """Returns an error with llguidance's `message`, which may repeat the whole grammar or be a panic with backtrace."""
    message = message.partition("<backtrace>")[0].strip()
    return InvalidRequestError(
        f"the {constraint.kind} cannot be compiled: {message[:MAX_MESSAGE_LENGTH]}",
        field=f"sampling.{constraint.kind}",
        reason="INVALID_CONSTRAINT",
    )


def open_tokenizer(tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Opens a tokenizer, which takes about 0.4 s. `vocab_size`: width of the logits, which may differ from the
    tokenizer's number of ids.

    Raises: NotSupportedError.
    """
    if not eos_token_ids:
        raise NotSupportedError("no constraints with this model: it names no end-of-text token, so no answer could end")
    try:
        tokens: Any = _Tokens(tokenizer_json, vocab_size, eos_token_ids)
    except NotSupportedError as error:
        raise NotSupportedError(f"no constraints with this model's tokenizer: {error.message}") from error
    return LLTokenizer(tokens, eos_token=list(eos_token_ids))


_PREFIX_MARKS = ('"Prepend"', '"Metaspace"', '"add_prefix_space": true', '"add_prefix_space":true')
"""Text in a tokenizer.json that may mean that the tokenizer puts a space before a text."""


class _Tokens:
    """A model's tokens as llguidance expects them, and its tokenizer's encoding of forced text.

    llguidance's own reader assumes that each added token of the form <...> has no text. Here only special tokens have
    no text: clients do not see them, so a text that looks like a special token is spelled with other tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises: NotSupportedError if the tokens' bytes cannot be derived from the tokenizer's decoder."""
        if any(mark in tokenizer_json for mark in _PREFIX_MARKS):
            tokenizer_json = json.dumps(_without_prefix(json.loads(tokenizer_json)))
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        known = TokenBytes.of(self._tokenizer)
        special = known.special_ids | set(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = [token_id for token_id in sorted(special) if token_id < vocab_size]
        self.tokens = [*known.of_id[:vocab_size], *([b""] * (vocab_size - len(known.of_id)))]
        self._visible = [b"" if token_id in special else part for token_id, part in enumerate(self.tokens)]
        self._ids = {part: token_id for token_id, part in enumerate(self._visible)}
        self._longest = max(map(len, self._ids))
        self._spell = lru_cache(MAX_SPELLINGS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        return self._spell(text)

    def _encode(self, text: str) -> list[int]:
        """Returns the tokens of a text: the tokenizer's own, up to the first one that differs from the text or has no
        logit, and then the longest tokens for the remaining bytes.
        """
        wanted, num_bytes = text.encode(), 0
        found: list[int] = []
        for token_id in self._tokenizer.encode(text, add_special_tokens=False).ids:
            part = self._visible[token_id] if token_id < len(self._visible) else b""
            if not part or not wanted.startswith(part, num_bytes):
                break
            found.append(token_id)
            num_bytes += len(part)
        while num_bytes < len(wanted):  # for example, if the tokenizer normalized the text
            sizes = range(min(self._longest, len(wanted) - num_bytes), 0, -1)
            size = next((size for size in sizes if wanted[num_bytes : num_bytes + size] in self._ids), 0)
            found += [self._ids[wanted[num_bytes : num_bytes + size]]] if size else []
            num_bytes += size or 1  # skips a byte without a token, which can never be written
        return found


def _without_prefix(part: Any) -> Any:
    """Returns a tokenizer.json, or a part of it, changed to put no space before a text."""
    if isinstance(part, list):
        return [_without_prefix(each) for each in part]
    if not isinstance(part, dict):
        return part
    match part.get("type"):
        case "Prepend":
            return {"type": "Sequence", "normalizers": []}
        case "Metaspace":
            return part | {"prepend_scheme": "never"}
        case "ByteLevel":
            return part | {"add_prefix_space": False}
    return {key: part[key] if key == "model" else _without_prefix(part[key]) for key in part}


def compile_grammar(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Returns a matcher at the grammar's start. Releases the interpreter's lock.

    Raises: InvalidRequestError, also if the first mask takes too much work, so that no engine tries to compute it.
    """
    matcher = LLMatcher(tokenizer, grammar_text(constraint), log_level=0, limits=_LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise invalid(constraint, first.get_error())
    return matcher
