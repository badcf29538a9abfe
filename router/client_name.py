"""Whose call it is, for shares: clients name themselves in the metadata."""

from __future__ import annotations

from typing import Any

import grpc.aio

CLIENT_ID_KEY = "client_id"
MAX_CLIENT_ID_LENGTH = 128


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The call's `client_id`; clients without one share the empty name."""
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY and isinstance(value, str):
            return value[:MAX_CLIENT_ID_LENGTH]
    return ""
