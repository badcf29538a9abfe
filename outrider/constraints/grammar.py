"""Constraints by llguidance: grammars over the bytes of a vocabulary's tokens. Needs neither torch nor numpy.

llguidance (https://github.com/guidance-ai/llguidance) parses with Earley's algorithm over derivatives of regular
expressions. Its limits count work, not time, so that nodes refuse the same grammars. Compiling one has no such limit
in some cases (intersections of patterns): routers compile in a process that they end after a time, and nodes only get
what a router has compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.request import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

NUMERICS = f"llguidance {version('llguidance')}"
"""Two nodes allow the same tokens if theirs are equal."""

MAX_MESSAGE_LENGTH = 500

# A mask takes at most about 0.1 s, also where only one long text can follow; the states of one grammar's lexer take
# about 40 MB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000, step_max_items=3_000, max_lexer_states=20_000, verbose_errors=False
)

# Whitespace between JSON's tokens has no end by itself: a small model may write nothing else. A schema's own
# "x-guidance" comes before this.
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


def grammar_text(constraint: Constraint) -> str:
    """As llguidance takes it. Raises: InvalidRequestError for a schema that is no JSON object."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            text = "{}" if constraint.text.strip() == "true" else constraint.text  # which is no object
            try:
                return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
            except ValueError as error:
                raise invalid(constraint, str(error)) from error
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)
        case ConstraintKind.CHOICE:
            texts = (json.dumps(option, ensure_ascii=False) for option in constraint.options)
            options = " | ".join(text.replace("\x7f", "\\u007f") for text in texts)  # Lark has no control characters
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}\n")


def invalid(constraint: Constraint, message: str) -> InvalidRequestError:
    """`message`: llguidance's. Some repeat the whole grammar, or are of a panic with its backtrace."""
    message = message.partition("<backtrace>")[0].strip()
    return InvalidRequestError(
        f"the {constraint.kind} cannot be compiled: {message[:MAX_MESSAGE_LENGTH]}",
        field=f"sampling.{constraint.kind}",
        reason="INVALID_CONSTRAINT",
    )


def open_tokenizer(tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Takes about 0.4 s. `vocab_size`: width of the logits. Raises: NotSupportedError."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        raise NotSupportedError(f"no constraints with this model's tokenizer: {error}") from error


def compile_grammar(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """At the grammar's beginning. Without the interpreter's lock.

    Raises: InvalidRequestError, also where its first mask takes too much work: no engine is to try that.
    """
    matcher = LLMatcher(tokenizer, grammar_text(constraint), log_level=0, limits=_LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise invalid(constraint, first.get_error())
    return matcher
