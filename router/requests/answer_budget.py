"""The memory budget of answers."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import CapacityError, InvalidRequestError, OutriderError
from outrider.request import Request
from outrider.wire.answer import max_logprobs_bytes

BYTES_PER_ANSWER = 10_240
BYTES_PER_SAMPLE = 2_048
"""Bytes of objects per answer (including its record) and per sample. An answer of one token was measured at 11.0 kB."""
_BYTES_PER_TOKEN = 96  # the entries in two lists, the token id, and its piece of text
_BYTES_PER_LOGPROB = 160
RETRY_SECONDS = 1.0
STALLED_SECONDS = 1.0
"""Seconds that a client may leave a message unread before its answer can be evicted to free memory."""
LEFT_SECONDS = 30.0
"""Seconds after which an absent client's ended answer can be evicted: the Python client's default resume window."""
MAX_FIRST_TOKENS = 512
"""Number of tokens expected of a sample before any answer has ended, unless `max_tokens` is lower."""
MIN_EXPECTED_TOKENS = 128
"""Lower bound of the tokens expected of a sample, however short the last answers were."""
RISE_WEIGHT, FALL_WEIGHT = 1 / 4, 1 / 64
"""Weights in the moving average of answers' lengths: of an answer that is longer than expected, and of any other."""
MAX_EXPECTED_SHARE = 4
"""Divisor of the budget's limit. The quotient is the most that is set aside for one answer's expected growth."""
TICK_SECONDS = 0.1


class LoopClock:
    """A clock in seconds. It stands still while the event loop is blocked, so blocking makes no client seem late."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tick()

    def __call__(self) -> float:
        return self._seconds

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._seconds += TICK_SECONDS
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


class AnswerBudget:
    """The budget of bytes for all answers.

    A new answer is admitted if it and all running ones fit with their expected lengths. If answers grow beyond
    these lengths and no unread answer can be evicted, the newest answers are evicted, which loses the least work.
    """

    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes = limit_bytes
        self.clock = clock
        self._accounts: dict[AnswerAccount, None] = {}  # the oldest first
        self._num_expected_tokens = float(MAX_FIRST_TOKENS)  # expected per sample; few of the last answers were longer
        self._num_expected_bytes = 0  # expected growth of all answers
        self.reserved_bytes = 0  # bytes held by all answers

    def open(self, request: Request, *, num_known_tokens: int = 0) -> AnswerAccount:
        """Opens an account for the answer's objects, the prompt, its logprobs, and each sample's first token.

        `num_known_tokens`: tokens that another router has already generated, in all samples.

        Raises: CapacityError if there is no room now; InvalidRequestError if there never will be.
        """
        sampling = request.options.sampling
        account = AnswerAccount(_bytes_per_token(request))
        num_given = len(request.generated_token_ids)
        num_bytes = BYTES_PER_ANSWER + _BYTES_PER_TOKEN * (len(request.prompt_token_ids) + num_given)
        if request.options.prompt_logprobs is not None:
            num_bytes += max_logprobs_bytes(len(request.prompt_token_ids), request.options.prompt_logprobs)
        num_bytes += (BYTES_PER_SAMPLE + account.bytes_per_token) * sampling.n
        num_bytes += account.bytes_per_token * num_known_tokens
        num_left = sampling.max_tokens - num_given - num_known_tokens // sampling.n
        num_tokens = max(min(num_left, round(self._num_expected_tokens)) - 1, 0)
        self._check_alone(num_bytes)
        max_expected = min(self._limit_bytes // MAX_EXPECTED_SHARE, self._limit_bytes - num_bytes)
        num_expected = min(num_tokens * sampling.n * account.bytes_per_token, max_expected)
        num_missing = self.reserved_bytes + self._num_expected_bytes + num_bytes + num_expected - self._limit_bytes
        if num_missing > 0:
            self._make_room(num_missing, older=None)
        self._accounts[account] = None
        self._add(account, num_bytes, num_expected)
        return account

    def _check_alone(self, num_bytes: int) -> None:
        """Raises: InvalidRequestError if an answer does not fit even alone."""
        if num_bytes > self._limit_bytes:
            raise InvalidRequestError(
                f"the answer needs {num_bytes} bytes; all answers together may have {self._limit_bytes}",
                field="sampling.max_tokens",
                reason="ANSWER_TOO_LARGE",
            )

    def _make_room(self, num_missing: int, *, older: AnswerAccount | None) -> None:
        """Evicts answers to free memory: delivered ones first, then those of stalled or absent clients.

        `older`: the running answer that needs the memory. Running answers that are newer are evicted last. None: a new
        answer needs the memory, and no running answer is evicted for it. Raises: CapacityError.
        """
        unread = dict.fromkeys(self._unread(excluding=older))
        newer = itertools.takewhile(lambda account: account is not older, reversed(self._accounts)) if older else ()
        dropped: dict[AnswerAccount, None] = {}
        num_dropped_bytes = 0
        for account in itertools.chain(unread, newer):
            if num_dropped_bytes >= num_missing:
                break
            if account not in dropped:
                dropped[account] = None
                num_dropped_bytes += account.num_bytes
        full = CapacityError(
            f"the memory for answers is full: {self.reserved_bytes} of {self._limit_bytes} bytes are in use,"
            f" {self._num_expected_bytes} reserved for running answers, and {num_missing} more are needed",
            retry_after_seconds=RETRY_SECONDS,
            reason="JOURNAL_FULL",
        )
        if num_dropped_bytes < num_missing:
            raise full
        not_reading = CapacityError(
            "the client stopped reading, and its answer was evicted to free memory",
            retry_after_seconds=RETRY_SECONDS,
            reason="NOT_READING",
        )
        for account in dropped:
            account.give_up(not_reading if account in unread else full)

    def _unread(self, *, excluding: AnswerAccount | None) -> list[AnswerAccount]:
        """Returns the answers that may be evicted because nobody reads them, in the order of eviction."""
        now, found = self.clock(), []
        for account in self._accounts:
            if account is not excluding and account.unread is not None:
                why, since = account.unread
                patience = (0.0, STALLED_SECONDS, LEFT_SECONDS)[why]
                if since <= now - patience and (account.has_ended or why is not Unread.LEFT):
                    found.append((why, since, account))
        return [account for _, _, account in sorted(found, key=lambda item: item[:2])]

    def _add(self, account: AnswerAccount, num_bytes: int, num_expected: int) -> None:
        account.num_bytes += num_bytes
        account.num_expected_bytes += num_expected
        self.reserved_bytes += num_bytes
        self._num_expected_bytes += num_expected

    def grow(self, account: AnswerAccount, num_tokens: int) -> None:
        """Charges an answer for `num_tokens` more tokens. Does nothing once its account is closed.

        Raises: CapacityError if there is no room now; InvalidRequestError if this answer alone fills the budget.
        """
        if account not in self._accounts:
            return
        num_bytes = num_tokens * account.bytes_per_token
        num_missing = self.reserved_bytes + num_bytes - self._limit_bytes
        if num_missing > 0:
            self._check_alone(account.num_bytes + num_bytes)
            self._make_room(num_missing, older=account)
        self._add(account, num_bytes, -min(account.num_expected_bytes, num_bytes))

    def settle(self, account: AnswerAccount, num_tokens: float | None) -> None:
        """Records the end of an answer. `num_tokens`: tokens per sample; None: the answer failed, or its client left.

        The number changes the moving average of lengths, which rises fast and falls slowly.
        """
        account.has_ended = True
        if account in self._accounts:
            self._add(account, 0, -account.num_expected_bytes)
        if num_tokens is not None:
            more = num_tokens - self._num_expected_tokens
            self._num_expected_tokens += more * (RISE_WEIGHT if more > 0 else FALL_WEIGHT)
            self._num_expected_tokens = max(self._num_expected_tokens, MIN_EXPECTED_TOKENS)

    def close(self, account: AnswerAccount) -> None:
        """Closes the account of a dropped answer. Idempotent."""
        if account in self._accounts:
            del self._accounts[account]
            self._add(account, -account.num_bytes, -account.num_expected_bytes)


class Unread(enum.IntEnum):
    """Why nobody reads an answer, in the order of eviction."""

    DELIVERED = 0  # the answer was read to its end, and is kept for its resume window
    STALLED = 1  # its client does not take a message that is being written
    LEFT = 2  # its client is absent


@dataclass(slots=True, eq=False)
class AnswerAccount:
    """One answer's share of the budget."""

    bytes_per_token: int
    give_up: Callable[[OutriderError], None] = lambda _error: None  # ends the answer with this error and drops it
    num_bytes: int = 0
    num_expected_bytes: int = 0  # expected growth that has not happened yet
    has_ended: bool = False
    unread: tuple[Unread, float] | None = None  # why, and since when (by the budget's clock); None: it is being read


def _bytes_per_token(request: Request) -> int:
    """Returns an upper bound of the bytes of a generated token."""
    if request.options.logprobs is None:
        return _BYTES_PER_TOKEN
    return _BYTES_PER_TOKEN + _BYTES_PER_LOGPROB * (1 + request.options.logprobs.num_top)
