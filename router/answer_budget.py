"""How much memory answers may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from outrider.errors import CapacityError, InvalidRequestError, OutriderError
from outrider.request import Request

_BYTES_PER_TOKEN = 96  # an entry in two lists, the id, its piece of text
_BYTES_PER_LOGPROB = 160
RETRY_SECONDS = 1.0
STALLED_SECONDS = 1.0
"""A client that has not taken a message for so long loses its answer, when others need the memory."""


class Holder(Protocol):
    """Who has an answer (`router.running_requests.RunningRequest`)."""

    stalled_since: float | None
    """Monotonic seconds: since then its client has left a message untaken. None: it reads, or is away."""

    def give_up(self, error: OutriderError) -> None:
        """The answer ends with this error and is dropped; its account is closed."""


class AnswerBudget:
    """Bytes that all answers may take: what they have, not what they might grow to."""

    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._accounts: set[AnswerAccount] = set()
        self.reserved_bytes = 0

    def open(self, request: Request, holder: Holder) -> AnswerAccount:
        """For the prompt and each sample's first token.

        Raises: CapacityError when there is no room now; InvalidRequestError when there never is.
        """
        account = AnswerAccount(self, holder, _bytes_per_token(request))
        num_bytes = _BYTES_PER_TOKEN * len(request.prompt_token_ids) + account.bytes_per_token * request.sampling.n
        self._accounts.add(account)
        try:
            self._take(account, num_bytes)
        except OutriderError:
            account.close()
            raise
        return account

    def _take(self, account: AnswerAccount, num_bytes: int) -> None:
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
        """Drops answers whose clients have stalled, longest first, if that is enough. Raises: CapacityError."""
        horizon = self._clock() - STALLED_SECONDS
        stalled = [
            (since, account)
            for account in self._accounts
            if account is not besides and (since := account.holder.stalled_since) is not None and since <= horizon
        ]
        dropped: list[AnswerAccount] = []
        missing = self.reserved_bytes + num_bytes - self._limit_bytes
        for _, account in sorted(stalled, key=lambda item: item[0]):
            if missing > 0:
                dropped.append(account)
                missing -= account.num_bytes
        if missing > 0:
            raise CapacityError(
                f"{self.reserved_bytes} of {self._limit_bytes} journal bytes are taken, {num_bytes} more needed",
                retry_after_seconds=RETRY_SECONDS,
                reason="JOURNAL_FULL",
            )
        for account in dropped:
            account.holder.give_up(
                CapacityError(
                    "the answer was not read, and others need its memory",
                    retry_after_seconds=RETRY_SECONDS,
                    reason="NOT_READING",
                )
            )
            account.close()

    def _close(self, account: AnswerAccount) -> None:
        if account in self._accounts:
            self._accounts.remove(account)
            self.reserved_bytes -= account.num_bytes


class AnswerAccount:
    """What one answer takes of the budget. It grows with the answer, and is closed when that is dropped."""

    def __init__(self, budget: AnswerBudget, holder: Holder, bytes_per_token: int) -> None:
        self._budget = budget
        self.holder = holder
        self.bytes_per_token = bytes_per_token
        self.num_bytes = 0

    def grow(self, num_tokens: int) -> None:
        """Nothing once it is closed.

        Raises: CapacityError when there is no room now; InvalidRequestError when this answer alone fills the budget.
        """
        self._budget._take(self, num_tokens * self.bytes_per_token)  # noqa: SLF001 one module, one thing

    def close(self) -> None:
        """Idempotent."""
        self._budget._close(self)  # noqa: SLF001


def _bytes_per_token(request: Request) -> int:
    """An upper bound of what a generated token takes."""
    if request.output.logprobs is None:
        return _BYTES_PER_TOKEN
    return _BYTES_PER_TOKEN + _BYTES_PER_LOGPROB * (1 + request.output.logprobs.num_top)
