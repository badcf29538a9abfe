"""Grammars that a node has compiled, and each sample's place in one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from outrider.constraints.base import ALL_ALLOWED, Masks
from outrider.constraints.grammar import compile_grammar, open_tokenizer
from outrider.errors import NotSupportedError, OutriderError
from outrider.request import Constraint

MAX_COMPILED = 32
"""Grammars that are kept compiled, of the most recent requests, besides those in use."""
MAX_CACHED_MASKS = 256
"""Of one sample, between two commits: 6 KB each with 49,152 tokens."""
MASK_SECONDS = 0.004
"""Processor time that the masks of one sample in one step may take on average; 0.00005 to 0.001 is usual."""
TOKEN_SECONDS = 0.0005
"""Processor time that a committed token, or the search for a forced one, may take; 0.00001 to 0.0001 is usual."""
MAX_DEBT_SECONDS = 0.1
"""How much more processor time all grammars of a node may take together, since other sequences wait for them."""
MAX_OWN_DEBT_SECONDS = 0.02
"""A grammar that owes less of that goes on."""
FORGIVEN_SHARE = 0.02
"""Share of wall-clock time by which debts shrink, so that a grammar that was too slow is served again later."""
_LEXER = "lexer error"
"""Marks errors of the lexer, whose states all samples of a grammar share: another sample may have caused them."""


class Debt:
    """Processor time beyond what is due, less what wall-clock time has forgiven. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._forgiven_at = clock()  # when there will be none

    @property
    def seconds(self) -> float:
        return max(0.0, (self._forgiven_at - self._clock()) * FORGIVEN_SHARE)

    def add(self, seconds: float) -> None:
        """`seconds`: negative for less than was due, which is not saved up."""
        with self._lock:
            self._forgiven_at = max(self._forgiven_at, self._clock()) + seconds / FORGIVEN_SHARE


class CompiledGrammar:
    """One grammar for all samples that follow it, and what they have cost. Thread-safe."""

    def __init__(
        self,
        compile: Callable[[], LLMatcher],  # noqa: A002
        *,
        own: Debt,
        common: Debt,
    ) -> None:
        """`common`: of all grammars of a node. Raises: what `compile` raises."""
        self._compile = compile
        self._lock = threading.Lock()
        self._own = own
        self._common = common
        self.beginning = compile()  # has consumed nothing; copied, never changed

    def renewed(self, failed: LLMatcher) -> LLMatcher:
        """The beginning with an empty lexer: compiles the grammar again, unless another sample has since `failed`."""
        with self._lock:
            if self.beginning is failed:
                self.beginning = self._compile()
            return self.beginning

    def spend(self, seconds: float, *, due: float) -> None:
        """Counts work that took `seconds` of a processor and should take `due`."""
        self._own.add(seconds - due)
        if seconds > due:
            self._common.add(seconds - due)

    @property
    def is_too_slow(self) -> bool:
        return self._own.seconds > MAX_OWN_DEBT_SECONDS and self._common.seconds > MAX_DEBT_SECONDS


class GrammarCompiler:
    """A `ConstraintCompiler` for one tokenizer. Its first use reads the tokenizer, which takes about 0.4 s."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: width of the logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._debt = Debt()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()  # most recently used last
        self._in_use: WeakValueDictionary[Constraint, CompiledGrammar] = WeakValueDictionary()  # those, and others
        self._thread: ThreadPoolExecutor | None = None  # from the first `is_ready` on
        self._tried: OrderedDict[Constraint, bool] = OrderedDict()  # by `is_ready`; True: it cannot be compiled

    def warm_up(self) -> None:
        with self._lock, suppress(NotSupportedError):
            self._open_tokenizer()

    def prepare(self, constraint: Constraint) -> CompiledGrammar:
        with self._lock:
            grammar, tokenizer = self._in_use.get(constraint), self._open_tokenizer()
        if grammar is None:
            grammar = CompiledGrammar(lambda: compile_grammar(tokenizer, constraint), own=Debt(), common=self._debt)
        with self._lock:
            grammar = self._in_use.setdefault(constraint, grammar)
            self._compiled[constraint] = grammar
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def is_ready(self, constraint: Constraint) -> bool:
        with self._lock:
            if constraint in self._in_use:
                return True
            if constraint in self._tried:
                return False
            self._tried[constraint] = False
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._thread.submit(self._prepare_beside, constraint)
        return False

    def _prepare_beside(self, constraint: Constraint) -> None:
        try:
            self.prepare(constraint)
        except OutriderError:
            with self._lock:
                self._tried[constraint] = True
                while len(self._tried) > MAX_COMPILED:
                    self._tried.popitem(last=False)
        else:
            with self._lock:
                self._tried.pop(constraint, None)

    def start(self, constraint: Constraint, generated_token_ids: Sequence[int] = ()) -> GrammarState:
        grammar, tokenizer = self.prepare(constraint), self._open_tokenizer()
        sequence = GrammarState(
            grammar, num_words=-(-tokenizer.vocab_size // 32), eos_token_ids=frozenset(tokenizer.eos_tokens)
        )
        sequence.commit(generated_token_ids)
        return sequence

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

    def __init__(self, grammar: CompiledGrammar, *, num_words: int, eos_token_ids: frozenset[int]) -> None:
        self.failure = ""
        self._grammar = grammar
        self._beginning = grammar.beginning
        self._matcher = self._beginning.deep_copy()
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids
        self._token_ids: list[int] = []  # consumed
        self._masks: dict[tuple[tuple[int, ...], tuple[int, ...]], Masks] = {}  # by assumed and draft tokens
        self._dead_ends: dict[tuple[int, ...], str] = {}  # paths after which there is no mask, and why

    def commit(self, token_ids: Sequence[int]) -> None:
        for path, error in self._dead_ends.items():
            if len(path) < len(token_ids) and path == tuple(token_ids[: len(path)]):
                self._fail(error)  # what follows was decided without a mask
        self._masks.clear()
        self._dead_ends.clear()
        for token_id in token_ids:
            self._fail_if_too_slow()
            if self.failure:
                return
            started = time.thread_time()
            self._commit(token_id)
            self._grammar.spend(time.thread_time() - started, due=TOKEN_SECONDS)

    def _commit(self, token_id: int) -> None:
        if self._consume(token_id):
            return
        error = self._take_error()
        if error and not self.failure and self._consume(token_id):  # it was of others' lexer states
            return
        if error:
            self._fail(error)
        else:
            self.failure = "the constraint allows no token that other parameters, such as min_tokens, leave"

    def masks(self, assumed_token_ids: tuple[int, ...], draft_token_ids: tuple[int, ...]) -> Masks:
        key = assumed_token_ids, draft_token_ids
        masks = self._masks.get(key)
        if masks is None:
            if len(self._masks) >= MAX_CACHED_MASKS:
                self._masks.clear()
            masks = self._masks[key] = np.full((len(draft_token_ids) + 1, self._num_words), ALL_ALLOWED, dtype=np.int32)
            self._fail_if_too_slow()
            if not self.failure:
                started = time.thread_time()
                self._fill(masks, (*assumed_token_ids, *draft_token_ids), num_assumed=len(assumed_token_ids))
                self._grammar.spend(time.thread_time() - started, due=MASK_SECONDS)
        return masks

    def forced_tokens(self) -> list[int]:
        if self.failure or self._matcher.is_stopped() or self._grammar.is_too_slow:
            return []
        started = time.thread_time()
        token_ids = self._matcher.compute_ff_tokens()
        self._grammar.spend(time.thread_time() - started, due=TOKEN_SECONDS)
        return [] if self._take_error() else token_ids

    def _consume(self, token_id: int) -> bool:
        """False: it is not allowed here, or an error."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return token_id in self._eos_token_ids
        if not self._matcher.try_consume_tokens([token_id]):
            return False
        self._token_ids.append(token_id)
        return True

    def _fill(self, masks: Masks, path: tuple[int, ...], *, num_assumed: int) -> None:
        """The rows that can be reached, of those after `num_assumed` tokens of the path."""
        num_tokens, error = self._follow(masks, path, num_assumed=num_assumed)
        if error and _LEXER in error and not self.failure:  # perhaps of what others, or earlier drafts, came by
            num_tokens, error = self._follow(masks, path, num_assumed=num_assumed)
        if error:
            masks[max(num_tokens - num_assumed, 0) :] = 0
            self._dead_ends[path[:num_tokens]] = error
            if not num_tokens:
                self._fail(error)

    def _follow(self, masks: Masks, path: tuple[int, ...], *, num_assumed: int) -> tuple[int, str]:
        """Tokens of the path after which no further mask can be made, and the matcher's error if that is why."""
        matcher, num_committed, num_tokens = self._matcher, len(self._token_ids), 0
        while True:
            if num_tokens >= num_assumed:
                row = masks[num_tokens - num_assumed]
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                if matcher.is_error():
                    break
            if num_tokens == len(path) or not self._consume(path[num_tokens]):
                num_tokens += matcher.is_error()
                break
            num_tokens += 1
        num_consumed = len(self._token_ids) - num_committed
        del self._token_ids[num_committed:]
        error = self._take_error()
        if not error:
            matcher.rollback(num_consumed)
        return num_tokens, error

    def _take_error(self) -> str:
        """The matcher's error, or "". A matcher never leaves its error state, so a new one takes its place."""
        if not self._matcher.is_error():
            return ""
        error: str = self._matcher.get_error().splitlines()[0]
        if _LEXER in error:
            self._beginning = self._grammar.renewed(self._beginning)
        self._matcher = self._beginning.deep_copy()
        if not self._matcher.consume_tokens(self._token_ids):
            self._fail(error)
        return error

    def _fail_if_too_slow(self) -> None:
        if not self.failure and self._grammar.is_too_slow:
            self._fail(f"more than {MASK_SECONDS * 1e3:g} ms a mask, or {TOKEN_SECONDS * 1e3:g} ms a token")

    def _fail(self, error: str) -> None:
        self.failure = f"the constraint takes too much work: {error}"
