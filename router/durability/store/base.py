"""The store of requests with a resume window, from which another router can continue them.

A request with its seed determines its tokens: the stored request is the durable state, and the stored tokens
are a cache. Tokens may be missing but are never wrong. A request has one owner, the router that created or
claimed it last; the store drops writes of others. Two routers that compute one request for a moment compute the
same tokens, so a claim does not need to be certain that the old owner is dead.

Call order in a router, for each request with a resume window:

1. `create`, before Started. AlreadyRunningError: the id is in use on another router.
   StoreError: refuse the request, or serve it without the store, according to `router.store_lost`.
2. Off the token path, for all requests together: `append` new tokens every
   `router.store_append_seconds`, and `renew` every third of `router.store_lease_seconds`. After a
   StoreError of `append`, send tokens again from the last acknowledged position. `renew` returns
   - `taken`: another router has the request. End the attached stream with AbortedError, stop
     the work, and make no more calls for this id.
   - `missing`: the store has lost the request. `create` it again, then `append` everything.
   - `aborted`: another router got an Abort. Abort here.
   Renew while the answer is unfinished, and after that while a client's stream is attached.
3. `finish`, when the answer has ended and no stream is attached any more (after the last
   `append`). The resume window starts then. Call `delete` instead if the request ended without
   an answer to resume (refused after `create`, failed, or window over).

For Resume of an id that this router does not have, call `claim`. A new Resume ends a previously
attached stream anyway, and a client comes here because it cannot reach the owner. If `claim` returns
None, answer NOT_FOUND. Otherwise open the answer with the known tokens (none if logprobs are wanted,
since those are not stored), and end it at once if `is_aborted`. For Abort of such an id, call
`request_abort`. `read` does not claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import AlreadyRunningError, MismatchError, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """Everything that determines an answer. Positions count from the prompt's first token, as in `router.proto`."""

    request_id: str  # 1 to 128 characters of printable ASCII, preceded by the client's name and "·" if known
    fingerprint: str  # of the model
    resume_window_seconds: float
    start_position: int  # position of the first token that the answer generates; the same for all samples
    request: bytes  # a GenerateRequest with its seed, and its prompt as token ids; opaque to the store
    numerics: str = ""  # the numerics of all nodes when the request began, if exact; empty otherwise


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sample."""

    request_id: str
    sample: int
    start_position: int
    token_ids: Sequence[int]  # uint32

    @property
    def end_position(self) -> int:
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """A stored request and the known part of its answer."""

    request: StoredRequest
    token_ids: Mapping[int, tuple[int, ...]]  # by sample, from start_position, without gaps
    is_ours: bool  # whether this router is the owner
    is_aborted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The states of renewed requests. Requests in none of the sets are still owned by this router."""

    taken: frozenset[str] = frozenset()  # another router is the owner
    missing: frozenset[str] = frozenset()  # the store has no such request any more
    aborted: frozenset[str] = frozenset()  # owned by this router, and Abort was requested


class SpansRefusedError(StoreError):
    """The store refused the tokens of these requests, but has stored all others."""

    def __init__(self, message: str, request_ids: frozenset[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class AnswerStore(Protocol):
    """One router's access to the store. Owned by the event loop.

    Every method ends within the store's timeout, and raises StoreError if the store has not answered by then. The
    operation may still take effect. Every method may be repeated.
    """

    name: str
    """The store's name for logs, without a password."""

    async def create(self, stored: StoredRequest) -> None:
        """Stores a request, owned by this router. A request of the same id and owner is replaced.

        Raises: AlreadyRunningError if another router has the id; StoreError.
        """

    async def append(self, spans: Iterable[TokenSpan]) -> None:
        """Adds tokens of any number of requests. Drops tokens of requests that this router does not own.

        Raises: SpansRefusedError, StoreError.
        """

    async def renew(self, request_ids: Iterable[str]) -> Renewal:
        """Extends the expiry of requests and tokens. Raises: StoreError."""

    async def finish(self, request_ids: Iterable[str]) -> None:
        """Starts the resume windows. Requests that this router does not own are skipped. Raises: StoreError."""

    async def delete(self, request_ids: Iterable[str]) -> None:
        """Removes requests; those that this router does not own are skipped. Raises: StoreError."""

    async def read(self, request_id: str) -> StoredAnswer | None:
        """Returns a request without claiming it; None if there is no such request. Raises: StoreError."""

    async def claim(self, request_id: str, *, fingerprint: str) -> StoredAnswer | None:
        """Makes this router the owner. Returns None if there is no such request.

        A claimed request is retained like a running one until `finish`.

        Raises: MismatchError if the request was stored for another model and stays with its owner; StoreError.
        """

    async def request_abort(self, request_id: str) -> bool:
        """Asks the owner to abort the request. Returns False if it is unknown, finished or already asked to abort.

        Raises: StoreError.
        """

    async def close(self) -> None:
        """Disconnects. Requests stay until they expire. Raises: StoreError."""


class TokenLog:
    """Joins the spans of one answer, in the order of arrival, to the known tokens of each sample.

    Repeated tokens count once. A span after a gap is dropped.
    """

    def __init__(self, start_position: int) -> None:
        self._start_position = start_position
        self._known: dict[int, list[int]] = {}

    def add(self, sample: int, start_position: int, token_ids: Sequence[int]) -> None:
        known = self._known.setdefault(sample, [])
        num_repeated = self._start_position + len(known) - start_position
        if 0 <= num_repeated < len(token_ids):
            known.extend(token_ids[num_repeated:])

    def token_ids(self) -> dict[int, tuple[int, ...]]:
        return {sample: tuple(known) for sample, known in sorted(self._known.items()) if known}


def already_running(request_id: str) -> AlreadyRunningError:
    return AlreadyRunningError(f"request {request_id!r} is running on another router", reason="DUPLICATE_REQUEST_ID")


def model_mismatch(request_id: str, *, stored: str, served: str) -> MismatchError:
    return MismatchError(f"request {request_id!r} was made for model {stored}, but this router serves {served}")
