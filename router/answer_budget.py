"""How much memory answers may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.errors import CapacityError, InvalidRequestError, OutriderError
from outrider.request import Request
from outrider.wire.answer import most_logprobs_bytes

BYTES_PER_ANSWER = 10_240
BYTES_PER_SAMPLE = 2_048
"""The objects around an answer, its timeline included: measured, 11.0 kB for one sample of one token."""
_BYTES_PER_TOKEN = 96  # an entry in two lists, the id, its piece of text
_BYTES_PER_LOGPROB = 160
RETRY_SECONDS = 1.0
STALLED_SECONDS = 1.0
"""A client that has not taken a message for so long loses its answer, when others need the memory."""
LEFT_SECONDS = 30.0
"""So does one that has been away for so long: as long as the Python client asks an answer to be kept by default."""
SPARE_SHARE = 64
"""Of the limit, one part in so many is made free at once."""


class AnswerBudget:
    """Bytes that all answers may take: what they have, not what they might grow to."""

    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._accounts: set[AnswerAccount] = set()
        self.reserved_bytes = 0

    def open(
        self, request: Request, *, is_idle: Callable[[], bool], give_up: Callable[[OutriderError], None]
    ) -> AnswerAccount:
        """For the objects around the answer, the prompt and its logprobs, and each sample's first token.

        Raises: CapacityError when there is no room now; InvalidRequestError when there never is.
        """
        account = AnswerAccount(self, _bytes_per_token(request), is_idle, give_up)
        num_bytes = BYTES_PER_ANSWER + _BYTES_PER_TOKEN * len(request.prompt_token_ids)
        if request.options.prompt_logprobs is not None:
            num_bytes += most_logprobs_bytes(len(request.prompt_token_ids), request.options.prompt_logprobs)
        num_bytes += (BYTES_PER_SAMPLE + account.bytes_per_token) * request.options.sampling.n
        self._accounts.add(account)
        try:
            self.take(account, num_bytes)
        except OutriderError:
            account.close()
            raise
        return account

    def take(self, account: AnswerAccount, num_bytes: int) -> None:
        if account not in self._accounts:  # its flow is about to be cancelled
            return
        if account.num_bytes + num_bytes > self._limit_bytes:
            raise InvalidRequestError(
                f"an answer of more than {self._limit_bytes} bytes fits no journal of this router",
                field="sampling.max_tokens",
                reason="ANSWER_TOO_LARGE",
            )
        if self.reserved_bytes + num_bytes > self._limit_bytes:
            self._make_room(num_bytes, besides=account)
        account.num_bytes += num_bytes
        self.reserved_bytes += num_bytes

    def _make_room(self, num_bytes: int, *, besides: AnswerAccount) -> None:
        """Drops answers until this fits: delivered ones first, then of clients that stalled, then of those that left.

        A little more than is needed, so that not every token has to look. Raises: CapacityError.
        """
        missing = self.reserved_bytes + num_bytes - self._limit_bytes
        dropped: list[AnswerAccount] = []
        num_dropped_bytes = 0
        for _, account in sorted(self._expendable(besides), key=lambda item: item[0]):
            if num_dropped_bytes >= missing + self._limit_bytes // SPARE_SHARE:
                break
            dropped.append(account)
            num_dropped_bytes += account.num_bytes
        if num_dropped_bytes < missing:
            raise CapacityError(
                f"{self.reserved_bytes} of {self._limit_bytes} journal bytes are taken, {num_bytes} more needed",
                retry_after_seconds=RETRY_SECONDS,
                reason="JOURNAL_FULL",
            )
        for account in dropped:
            account.give_up(
                CapacityError(
                    "the answer was not read, and others need its memory",
                    retry_after_seconds=RETRY_SECONDS,
                    reason="NOT_READING",
                )
            )
            account.close()

    def _expendable(self, besides: AnswerAccount) -> Iterator[tuple[tuple[int, float], AnswerAccount]]:
        """((rank, since when nobody reads it), account): the smallest goes first."""
        now = self._clock()
        for account in self._accounts - {besides}:
            if account.delivered_at is not None:
                yield (0, account.delivered_at), account
            elif account.stalled_since is not None and account.stalled_since <= now - STALLED_SECONDS:
                yield (1, account.stalled_since), account
            elif account.left_at is not None and account.left_at <= now - LEFT_SECONDS and account.is_idle():
                yield (2, account.left_at), account

    def close(self, account: AnswerAccount) -> None:
        if account in self._accounts:
            self._accounts.remove(account)
            self.reserved_bytes -= account.num_bytes


@dataclass(slots=True, eq=False)
class AnswerAccount:
    """What one answer takes of the budget. It grows with the answer, and is closed when that is dropped.

    Who has the answer says who reads it, in monotonic seconds.
    """

    budget: AnswerBudget
    bytes_per_token: int
    is_idle: Callable[[], bool]  # nothing is computed, and nobody reads
    give_up: Callable[[OutriderError], None]  # the answer ends with this error and is dropped
    num_bytes: int = 0
    stalled_since: float | None = None  # since then a message is left untaken; None: its client reads, or is away
    delivered_at: float | None = None  # it was read to its end then, and nobody reads now: it is kept for its window
    left_at: float | None = None  # since then its client is away

    def grow(self, num_tokens: int) -> None:
        """Nothing once it is closed.

        Raises: CapacityError when there is no room now; InvalidRequestError when this answer alone fills the budget.
        """
        self.budget.take(self, num_tokens * self.bytes_per_token)

    def close(self) -> None:
        """Idempotent."""
        self.budget.close(self)


def _bytes_per_token(request: Request) -> int:
    """An upper bound of what a generated token takes."""
    if request.options.logprobs is None:
        return _BYTES_PER_TOKEN
    return _BYTES_PER_TOKEN + _BYTES_PER_LOGPROB * (1 + request.options.logprobs.num_top)
