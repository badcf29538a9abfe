"""All errors, with the gRPC status that a caller gets for each.

OutriderError
├── InvalidRequestError      INVALID_ARGUMENT     names the field
├── NotFoundError            NOT_FOUND
├── OutOfRangeError          OUT_OF_RANGE         a position that the answer does not have
├── AlreadyRunningError      ALREADY_EXISTS
├── CapacityError            RESOURCE_EXHAUSTED   carries retry_after_seconds
├── NotSupportedError        UNIMPLEMENTED        a later version may support it
├── UnauthenticatedError     UNAUTHENTICATED      no token, or an unknown one
├── NotAllowedError          PERMISSION_DENIED    a known caller without this permission
├── MismatchError            FAILED_PRECONDITION  two sides that do not match; names both
├── AbortedError             ABORTED              work taken over or given up
├── PeerLostError            UNAVAILABLE          carries the node and retry_after_seconds
│   └── StoreError           UNAVAILABLE          the router's store
├── ConfigError              (none)               an invalid setting; names it and the fix
├── ModelError               (none)               a model that cannot be served; names the file
└── InternalError            INTERNAL             a bug; logged with its traceback

`outrider.rpc.status` maps this tree to gRPC statuses with rich details, and
back in the client. Nothing else knows status codes.
"""

from __future__ import annotations

MAX_DESCRIPTION = 500


class OutriderError(Exception):
    """Base class of all errors. `reason` is the ErrorInfo reason, UPPER_SNAKE_CASE."""

    reason = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


def describe_error(error: BaseException) -> str:
    """Returns the error on one line of a few hundred characters, with its type unless it is an OutriderError."""
    text = " ".join(str(error).split())
    if not isinstance(error, OutriderError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1]}…"


class InvalidRequestError(OutriderError):
    """A request that can never be served; `field` is its path, such as "sampling.top_p"."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class NotFoundError(OutriderError):
    """A model, file or request that does not exist here."""

    reason = "NOT_FOUND"


class OutOfRangeError(OutriderError):
    """A position or sample that an answer does not have."""

    reason = "OUT_OF_RANGE"


class AlreadyRunningError(OutriderError):
    """A request_id that is in use."""

    reason = "ALREADY_RUNNING"


class CapacityError(OutriderError):
    """A queue, pool or budget that is full at the moment."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_seconds = retry_after_seconds


class NotSupportedError(OutriderError):
    """A part of the public API that this version does not support yet; `field` is its path."""

    reason = "NOT_SUPPORTED"

    def __init__(self, message: str, *, field: str = "", reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class UnauthenticatedError(OutriderError):
    """A client without a valid token."""

    reason = "UNAUTHENTICATED"


class NotAllowedError(OutriderError):
    """A known caller that lacks the permission for a call."""

    reason = "NOT_ALLOWED"


class MismatchError(OutriderError):
    """Two sides with different fingerprints, vocabularies or protocol versions. The message names both."""

    reason = "MISMATCH"


class AbortedError(OutriderError):
    """Work that was given up on purpose."""

    reason = "ABORTED"


class PeerLostError(OutriderError):
    """A node that died, froze or drained away; `node` is its name."""

    reason = "NODE_LOST"

    def __init__(
        self, message: str, *, node: str = "", retry_after_seconds: float = 1.0, reason: str | None = None
    ) -> None:
        super().__init__(message, reason=reason)
        self.node = node
        self.retry_after_seconds = retry_after_seconds


POISON_REQUEST = "REQUEST_LOSES_NODES"
"""Reason of the PeerLostError for a request that may itself cause the loss of nodes and is therefore not retried."""
NO_ADAPTER = "NO_ADAPTER"
"""Reason of the MismatchError with which a prefill node refuses a prompt, because it has unloaded the adapter."""
RESUMED_ELSEWHERE = "RESUMED_ELSEWHERE"
"""Reason of the AbortedError that ends a stream if its answer continues in another stream or on another router."""


class StoreError(PeerLostError):
    """A failure of the router's store, which did not answer in time or refused the request."""

    reason = "STORE_LOST"


class ConfigError(OutriderError):
    """An invalid setting. The message names the setting, its source and the fix."""

    reason = "BAD_CONFIG"


class ModelError(OutriderError):
    """Weights, tokenizer or architecture that cannot be served; names the file or the class."""

    reason = "BAD_MODEL"


class InternalError(OutriderError):
    """A broken invariant, i.e. a bug."""

    reason = "INTERNAL"
