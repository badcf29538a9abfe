"""The compiled grammars of a node, the state of each sample in its grammar, and the masks of allowed tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from outrider.constraints.grammar import compile_grammar, open_tokenizer
from outrider.errors import NotSupportedError
from outrider.request import Constraint

T = TypeVar("T")

Masks = npt.NDArray[np.int32]
"""[num_rows, num_words]: bit i of word w says whether token 32 w + i is allowed. Words cover the vocabulary."""
ALL_ALLOWED = -1
"""The word of a mask that allows all of its 32 tokens."""

NUM_THREADS = 2
"""Number of threads that compile constraints. With two, a slow constraint does not delay the next one."""
MAX_COMPILED = 32
"""Number of recently compiled grammars that are kept in addition to those in use."""
MAX_CACHED_MASKS = 256
"""Maximum number of cached masks of one sample between two commits. A mask for 49,152 tokens takes 6 KB."""
MASK_SECONDS = 0.004
"""Processor time in seconds that one sample's masks may take per step on average; 0.00005 to 0.001 is usual."""
TOKEN_SECONDS = 0.0005
"""Processor time in seconds that a committed token, or the search for a forced one, may take; 0.00001 to 0.0001 is
usual.
"""
MAX_DEBT_SECONDS = 0.07
"""Maximum debt in seconds of all grammars of a node together. A debt is the processor time taken beyond the allowances
above (see Debt), while other sequences had to wait.
"""
MAX_OWN_DEBT_SECONDS = 0.02
"""Debt in seconds up to which a grammar may always continue, however large the debt of the others is."""
FORGIVEN_SHARE = 0.02
"""Seconds by which a debt shrinks per second of wall-clock time, so that a grammar that was too slow is served again
later.
"""
CONSTRAINT_VIOLATED = "a generated token does not follow the constraint"
"""Start of the failure message for a forbidden token, sent by a client, or drawn when no token was allowed."""
_LEXER = "lexer error"
"""Text that all errors of the lexer contain. All samples of a grammar share the lexer's states, so another sample may
have caused an error.
"""


class Debt:
    """Processor time taken beyond allowances, minus FORGIVEN_SHARE of the wall-clock time since then. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._forgiven_at = clock()  # the time at which the debt will be 0

    @property
    def seconds(self) -> float:
        return max(0.0, (self._forgiven_at - self._clock()) * FORGIVEN_SHARE)

    def add(self, seconds: float) -> None:
        """Adds to the debt. A negative value, for work below the allowance, reduces it, but not below 0."""
        with self._lock:
            self._forgiven_at = max(self._forgiven_at, self._clock()) + seconds / FORGIVEN_SHARE


class CompiledGrammar:
    """A compiled grammar, shared by all samples that follow it, and its debt. Thread-safe."""

    def __init__(
        self,
        compile: Callable[[], LLMatcher],  # noqa: A002
        *,
        own: Debt,
        common: Debt,
    ) -> None:
        """`own`: this grammar's debt; `common`: that of all grammars of a node. Raises: any error of `compile`."""
        self._compile = compile
        self._lock = threading.Lock()
        self._own = own
        self._common = common
        self.beginning = compile()  # a matcher that has consumed nothing; it is copied, never changed

    def renewed(self, failed: LLMatcher) -> LLMatcher:
        """Returns the start state with an empty lexer, compiled anew unless another sample has replaced `failed`."""
        with self._lock:
            if self.beginning is failed:
                self.beginning = self._compile()
            return self.beginning

    def spend(self, seconds: float, *, due: float) -> None:
        """Accounts for work that took `seconds` of processor time and had an allowance of `due` seconds."""
        self._own.add(seconds - due)
        if seconds > due:
            self._common.add(seconds - due)

    @property
    def is_too_slow(self) -> bool:
        return self._own.seconds > MAX_OWN_DEBT_SECONDS and self._common.seconds > MAX_DEBT_SECONDS


class GrammarCompiler:
    """Compiles constraints for one tokenizer. The first use reads the tokenizer in about 0.4 s. Thread-safe."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: width of the logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="constraints")
        self._lock = threading.Lock()
        self._debt = Debt()
        self._newest: deque[Future[CompiledGrammar]] = deque(maxlen=MAX_COMPILED)  # finished ones
        # All compilations that are still referenced: those in `_newest`, unfinished ones, and those that samples use.
        self._compiled: WeakValueDictionary[Constraint, Future[CompiledGrammar]] = WeakValueDictionary()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The tokenizer. Raises: NotSupportedError."""
        return open_tokenizer(
            self._tokenizer_json.decode(), vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        )

    def warm_up(self) -> None:
        """Reads the tokenizer in advance, because that takes long and holds the interpreter's lock."""
        with suppress(NotSupportedError):
            _ = self._tokenizer

    def prepare(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """Compiles a constraint in another thread. Once that is done, `start` is quick as long as the result is kept.

        If the future has an exception, `start` raises the same one.
        """
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compiled[constraint] = self._threads.submit(self._compile, constraint)
                compiled.add_done_callback(self._newest.append)  # only finished compilations push out older ones
        return compiled

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        compile_again = partial(compile_grammar, self._tokenizer, constraint)
        return CompiledGrammar(compile_again, own=Debt(), common=self._debt)

    def start(self, constraint: Constraint, generated_token_ids: Sequence[int] = ()) -> GrammarState:
        """Returns the state of a sample that has generated these tokens so far.

        Raises: InvalidRequestError if the constraint cannot be compiled, NotSupportedError if the bytes of the
        tokenizer's tokens are not known.
        """
        sequence = GrammarState(self.prepare(constraint), self._tokenizer)
        sequence.commit(generated_token_ids)
        return sequence


class GrammarState:
    """The state of one sample in its grammar, determined by the tokens that the sample generated. Not thread-safe.

    A matcher follows the committed tokens. For masks it also follows drafts, and is then rolled back. After the
    grammar's end only end-of-text tokens are allowed, any number of them.
    """

    def __init__(self, compiled: Future[CompiledGrammar], tokenizer: LLTokenizer) -> None:
        self.failure = ""
        """Why the sample cannot continue; empty while it can. After a failure its masks are meaningless."""
        self._compiled = compiled  # kept, so that another sample's start does not compile it again
        self._grammar = compiled.result()
        self._beginning = self._grammar.beginning
        self._matcher = self._beginning.deep_copy()
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._eos_token_ids = frozenset(tokenizer.eos_tokens)
        self._token_ids: list[int] = []  # consumed
        self._masks: dict[tuple[tuple[int, ...], tuple[int, ...]], Masks] = {}  # by (assumed tokens, draft tokens)
        self._dead_ends: dict[tuple[int, ...], str] = {}  # by path of tokens: why there is no mask after it

    def commit(self, token_ids: Sequence[int]) -> None:
        """Consumes generated tokens. A token that the grammar does not allow is a failure."""
        for path, error in self._dead_ends.items():
            if len(path) < len(token_ids) and path == tuple(token_ids[: len(path)]):
                self._fail(error)  # the next token was decided without a mask
        self._masks.clear()
        self._dead_ends.clear()
        for token_id in token_ids:
            self._fail_if_too_slow()
            if self.failure:
                return
            started = time.thread_time()
            is_allowed, error = self._try(partial(self._consume, token_id))
            self._grammar.spend(time.thread_time() - started, due=TOKEN_SECONDS)
            if error:
                self._fail(error)
            elif not is_allowed:
                self.failure = f"{CONSTRAINT_VIOLATED}: {token_id}, after {len(self._token_ids)} others"

    def masks(self, assumed_token_ids: tuple[int, ...], draft_token_ids: tuple[int, ...]) -> Masks:
        """Returns the masks after the assumed tokens and after each draft that follows them.

        The result is [len(draft_token_ids) + 1, num_words]. A row after a token that the grammar forbids cannot be
        reached, so its mask allows everything. The result must not be changed, since calls may share it.
        """
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
        """Returns the tokens of the only text that can follow; empty if there is a choice."""
        if self.failure or self._matcher.is_stopped() or self._grammar.is_too_slow:
            return []
        started = time.thread_time()
        token_ids = self._matcher.compute_ff_tokens()
        error = self._take_error()
        self._grammar.spend(time.thread_time() - started, due=TOKEN_SECONDS)
        return [] if error else token_ids

    def _consume(self, token_id: int) -> bool:
        """Consumes a token. Returns False if it is not allowed here, or on an error."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return token_id in self._eos_token_ids
        if not self._matcher.try_consume_tokens([token_id]):
            return False
        self._token_ids.append(token_id)
        return True

    def _fill(self, masks: Masks, path: tuple[int, ...], *, num_assumed: int) -> None:
        """Fills the masks of reachable rows. The first row's mask applies after `num_assumed` tokens of the path."""
        num_tokens, error = self._try(lambda: self._follow(masks, path, num_assumed=num_assumed))
        if error:
            masks[max(num_tokens - num_assumed, 0) :] = 0
            self._dead_ends[path[:num_tokens]] = error
            if not num_tokens:
                self._fail(error)

    def _follow(self, masks: Masks, path: tuple[int, ...], *, num_assumed: int) -> int:
        """Fills masks until the path's end, a forbidden token or an error. Returns how many tokens it has followed."""
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
        if not matcher.is_error():
            matcher.rollback(num_consumed)
        return num_tokens

    def _try(self, action: Callable[[], T]) -> tuple[T, str]:
        """Performs an action of the matcher. Returns the action's result and the matcher's error; "" if there is none.

        If the lexer is full, the action is repeated with an empty lexer, because other samples or earlier drafts may
        have filled it.
        """
        result, error = action(), self._take_error()
        if _LEXER in error and not self.failure:
            result, error = action(), self._take_error()
        return result, error

    def _take_error(self) -> str:
        """Returns the matcher's error; "" if there is none. Replaces a failed matcher, which cannot recover."""
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
            self._fail(f"more than {MASK_SECONDS * 1e3:g} ms per mask, or {TOKEN_SECONDS * 1e3:g} ms per token")

    def _fail(self, error: str) -> None:
        self.failure = f"the constraint takes too much work: {error}"
