"""Converts `outrider.errors` to gRPC statuses with rich details (google.rpc.Status), and back. No other module uses
status codes.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from outrider import errors

ERROR_DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"
UNREACHABLE = "UNREACHABLE"
"""Reason of a PeerLostError if gRPC itself made the status, because there was no answer or the connection broke."""
MAX_MESSAGE_BYTES = 1024
"""Maximum bytes of an error's message. It appears twice in the trailers, which clients limit to 8 KiB by default."""

_CODES: dict[type[errors.OutriderError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    errors.AlreadyRunningError: grpc.StatusCode.ALREADY_EXISTS,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotSupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AbortedError: grpc.StatusCode.ABORTED,
    errors.PeerLostError: grpc.StatusCode.UNAVAILABLE,
}
_KINDS: dict[grpc.StatusCode, type[errors.OutriderError]] = {
    **{code: kind for kind, code in _CODES.items()},
    grpc.StatusCode.CANCELLED: errors.AbortedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.AbortedError,
}


def status_code(error: BaseException) -> grpc.StatusCode:
    """Returns an error's status code. It is INTERNAL for internal errors and errors from outside `outrider.errors`."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error. A status INTERNAL reveals nothing about the error."""
    code = status_code(error)
    if not isinstance(error, errors.OutriderError) or code is grpc.StatusCode.INTERNAL:
        details = [_pack(error_details_pb2.ErrorInfo(reason=errors.InternalError.reason, domain=ERROR_DOMAIN))]
        return status_pb2.Status(code=code.value[0], message="internal error; see the server's log", details=details)
    message = _truncate(error.message)
    metadata: dict[str, str] = {}
    if isinstance(error, errors.PeerLostError) and error.node:
        metadata["node"] = error.node
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))]
    field = getattr(error, "field", "")
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, (errors.CapacityError, errors.PeerLostError)) and error.reason != errors.POISON_REQUEST:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code.value[0], message=message, details=details)


def from_rpc_error(error: grpc.RpcError, *, target: str = "") -> errors.OutriderError:
    """Returns the error that the other side raised.

    Statuses that gRPC itself makes have no details and are converted by their code: a cancelled call becomes an
    AbortedError, a passed deadline an AbortedError with reason DEADLINE_EXCEEDED, and an unreachable peer a
    PeerLostError with reason UNREACHABLE.
    """
    code = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    message = (error.details() if callable(getattr(error, "details", None)) else None) or code.name
    info, field, retry_after_seconds = _parse_details(error)
    kind = _KINDS.get(code, errors.InternalError)
    arguments: dict[str, Any] = {"reason": info.reason or None}
    if kind in (errors.InvalidRequestError, errors.NotSupportedError):
        arguments["field"] = field
    elif kind is errors.AbortedError:
        arguments["reason"] = info.reason or code.name
    elif kind is errors.InternalError:
        message = f"{code.name}: {message}"
    if kind in (errors.CapacityError, errors.PeerLostError):
        arguments["retry_after_seconds"] = 1.0 if retry_after_seconds is None else retry_after_seconds
    if kind is errors.PeerLostError:
        arguments["node"] = info.metadata.get("node", target)
        if not info.reason:  # gRPC itself made the status, because there was no answer
            arguments["reason"] = UNREACHABLE
            message = f"{target} cannot be reached: {message}" if target else message
    return kind(message, **arguments)


def _truncate(message: str) -> str:
    """Truncates a message, because it may contain names and values of any length from a client."""
    data = message.encode(errors="replace")
    return message if len(data) <= MAX_MESSAGE_BYTES else data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"


def _parse_details(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo, str, float | None]:
    """Returns (ErrorInfo, field, retry delay in seconds). Those that the status does not contain are empty or None."""
    info, field, retry_after_seconds = error_details_pb2.ErrorInfo(), "", None
    status = status_pb2.Status()
    read_trailing: Any = getattr(error, "trailing_metadata", None)
    trailing = read_trailing() if callable(read_trailing) else None
    try:
        for key, value in trailing or ():
            if key == DETAILS_KEY:
                status.MergeFromString(value if isinstance(value, bytes) else value.encode())
        for detail in status.details:
            bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
            else:
                detail.Unpack(info)
    except (ValueError, DecodeError):
        pass  # details that do not parse are ignored
    return info, field, retry_after_seconds


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
