"""Constraints by llguidance: grammars over the bytes of a vocabulary's tokens, and each sample's place in one.

llguidance (https://github.com/guidance-ai/llguidance) parses with Earley's algorithm over derivatives of regular
expressions. Its limits count work, not time, so that nodes refuse the same grammars. Compiling one has no such limit
in some cases (intersections of patterns): routers compile in a process that they end after a time, and nodes only get
what a router has compiled.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.constraints.base import ALL_ALLOWED, Masks
from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.request import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

NUMERICS = f"llguidance {version('llguidance')}"
"""Two nodes allow the same tokens if theirs are equal."""

MAX_MESSAGE_LENGTH = 500
MAX_COMPILED = 32
"""Grammars that are kept compiled, of the most recent requests."""
MAX_CACHED_MASKS = 256
"""Of one sample, between two commits: 6 KB each with 49,152 tokens."""

# A mask takes at most about 0.2 s, and the states of one grammar's lexer about 40 MB.
_LIMITS = LLParserLimits(step_max_items=5_000, max_lexer_states=20_000, verbose_errors=False)

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
            options = " | ".join(json.dumps(option, ensure_ascii=False) for option in constraint.options)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}\n")


def invalid(constraint: Constraint, message: str) -> InvalidRequestError:
    """`message`: llguidance's. Some repeat the whole grammar, or are of a panic with its backtrace."""
    message = message.partition("<backtrace>")[0].strip()
    return InvalidRequestError(
        f"the {constraint.kind} cannot be compiled: {message[:MAX_MESSAGE_LENGTH]}",
        field=f"sampling.{constraint.kind}",
        reason="INVALID_CONSTRAINT",
    )


class GrammarCompiler:
    """A `ConstraintCompiler` for one tokenizer. Its first use reads the tokenizer, which takes about 0.4 s."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: width of the logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # most recently used last

    def open(self) -> None:
        """Reads the tokenizer. Raises: NotSupportedError."""
        with self._lock:
            self._open_tokenizer()

    def prepare(self, constraint: Constraint) -> None:
        self._compile(constraint)

    def start(self, constraint: Constraint, generated_token_ids: Sequence[int] = ()) -> GrammarState:
        beginning = self._compile(constraint)
        tokenizer = self._open_tokenizer()
        sequence = GrammarState(
            beginning, num_words=-(-tokenizer.vocab_size // 32), eos_token_ids=frozenset(tokenizer.eos_tokens)
        )
        sequence.commit(generated_token_ids)
        return sequence

    def _compile(self, constraint: Constraint) -> LLMatcher:
        """At the grammar's beginning; never changed."""
        with self._lock:
            matcher, tokenizer = self._compiled.get(constraint), self._open_tokenizer()
        if matcher is None:
            matcher = LLMatcher(tokenizer, grammar_text(constraint), log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise invalid(constraint, matcher.get_error())
        with self._lock:
            self._compiled[constraint] = matcher
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                )
            except ValueError as error:
                raise NotSupportedError(f"no constraints with this model's tokenizer: {error}") from error
        return self._tokenizer


class GrammarState:
    """A `SequenceConstraint`: a matcher that follows the committed tokens, goes along drafts, and comes back.

    After the grammar's end only end-of-text follows, as often as the request wants it.
    """

    def __init__(self, beginning: LLMatcher, *, num_words: int, eos_token_ids: frozenset[int]) -> None:
        """`beginning`: a matcher that has consumed nothing; not changed."""
        self.failure = ""
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids
        self._token_ids: list[int] = []  # consumed
        self._masks: dict[tuple[tuple[int, ...], tuple[int, ...]], Masks] = {}  # by assumed and draft tokens

    def commit(self, token_ids: Sequence[int]) -> None:
        self._masks.clear()
        for token_id in token_ids:
            if not self.failure and not self._consume(token_id):
                self.failure = "the constraint allows no token that other parameters, such as min_tokens, leave"

    def masks(self, assumed_token_ids: tuple[int, ...], draft_token_ids: tuple[int, ...]) -> Masks:
        key = assumed_token_ids, draft_token_ids
        masks = self._masks.get(key)
        if masks is None:
            if len(self._masks) >= MAX_CACHED_MASKS:
                self._masks.clear()
            masks = self._masks[key] = np.full((len(draft_token_ids) + 1, self._num_words), ALL_ALLOWED, dtype=np.int32)
            if not self.failure:
                self._fill(masks, [*assumed_token_ids, *draft_token_ids], num_assumed=len(assumed_token_ids))
        return masks

    def forced_tokens(self) -> list[int]:
        return [] if self.failure or self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _consume(self, token_id: int) -> bool:
        """False: it is not allowed here, and nothing has changed."""
        if self._matcher.is_stopped():
            return token_id in self._eos_token_ids
        if not self._matcher.try_consume_tokens([token_id]):
            return False
        self._token_ids.append(token_id)
        return True

    def _fill(self, masks: Masks, path: Sequence[int], *, num_assumed: int) -> None:
        """The rows that can be reached, of those after `num_assumed` tokens of the path."""
        matcher, num_committed = self._matcher, len(self._token_ids)
        row = -num_assumed
        for token_id in (*path, None):
            if row >= 0:
                matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.strides[0])
                if matcher.is_error():
                    break
            row += 1
            if token_id is None or not self._consume(token_id):
                break
        num_consumed = len(self._token_ids) - num_committed
        del self._token_ids[num_committed:]
        if not matcher.is_error():
            matcher.rollback(num_consumed)
            return
        masks[max(row, 0) :] = 0  # a text that comes here fails: no token that is decided is allowed
        # An error is for ever, and this one may be of a draft that is not accepted.
        error, is_of_text = matcher.get_error(), row == num_assumed == 0
        self._matcher = self._beginning.deep_copy()
        if is_of_text or not self._matcher.consume_tokens(self._token_ids):
            self.failure = f"the constraint takes too much work: {error.splitlines()[0]}"
