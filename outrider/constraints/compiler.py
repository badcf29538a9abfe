"""Grammars that a node has compiled, and each sample's place in one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from outrider.constraints.base import ALL_ALLOWED, Masks
from outrider.constraints.grammar import compile_grammar, open_tokenizer
from outrider.request import Constraint

MAX_COMPILED = 32
"""Grammars that are kept compiled, of the most recent requests."""
MAX_CACHED_MASKS = 256
"""Of one sample, between two commits: 6 KB each with 49,152 tokens."""


class GrammarCompiler:
    """A `ConstraintCompiler` for one tokenizer. Its first use reads the tokenizer, which takes about 0.4 s."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: width of the logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # most recently used last

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
            matcher = compile_grammar(tokenizer, constraint)
        with self._lock:
            self._compiled[constraint] = matcher
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(
                self._tokenizer_json.decode(), vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
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
