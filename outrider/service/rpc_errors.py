"""Turns a servicer's exceptions into RPC statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Never

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider import errors
from outrider.rpc.status import DETAILS_KEY, status_code, to_status
from outrider.service.telemetry.logging import get_logger

Context = grpc.aio.ServicerContext[Any, Any]
"""The context of a call with any message types."""

_log = get_logger("status")


async def abort_with(context: Context, error: BaseException) -> Never:
    """Ends the RPC with the error's status; INTERNAL errors are logged with a traceback.

    Trailers that the servicer has set are kept; the error details follow them.
    Raises: grpc.aio.AbortError, always.
    """
    status = to_status(error)
    if status.code == grpc.StatusCode.INTERNAL.value[0]:
        _log.error("internal error", error=str(error), exc_info=error)
    trailers = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(status_code(error), status.message, trailing_metadata=trailers)
    raise AssertionError("abort returned")


@asynccontextmanager
async def rpc_errors(context: Context) -> AsyncIterator[None]:
    """Wraps a servicer's body so that any exception ends the RPC with its status (see `abort_with`).

    Cancellation and an earlier abort pass through.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except DecodeError as error:  # a peer sent invalid bytes, which is not a bug of this process
        _log.warning("message refused", error=str(error), peer=context.peer())
        await abort_with(context, errors.InvalidRequestError("a message does not parse", field=""))
    except Exception as error:  # noqa: BLE001 the process boundary: every exception becomes a status
        await abort_with(context, error)
