"""Whose call it is."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import NotAllowedError

OWNER_MARK = "·"
"""Between a client's name and its name for a request. A request_id is ASCII, so no client can write it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A client, as far as it is known."""

    name: str = ""  # of its token; empty where nobody is asked for tokens
    share: str = ""  # whose share of queue and threads it counts against
    most_priority: int | None = None  # None: any
    cache_salt: bytes = b""  # seeds the block hashes of its prompts; empty: one tenant, or nobody is asked

    def key_of(self, request_id: str) -> str:
        """The request's key on this router and in its store: under one id, every client has its own request."""
        return f"{self.name}{OWNER_MARK}{request_id}" if self.name else request_id

    def check_priority(self, priority: int) -> None:
        """Raises: NotAllowedError."""
        if self.most_priority is not None and priority > self.most_priority:
            raise NotAllowedError(
                f"{self.name} may ask for priority {self.most_priority} at most, not {priority}", reason="PRIORITY"
            )


def split_key(key: str) -> tuple[str, str]:
    """(client's name, request_id)"""
    name, _, request_id = key.rpartition(OWNER_MARK)
    return name, request_id
