"""Identifies clients by a `client_id` in the metadata, or by a token whose hash is in a file."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from outrider.errors import CapacityError, ConfigError, NotAllowedError, UnauthenticatedError
from outrider.rpc.tls import file_stamp
from outrider.service.telemetry.logging import get_logger
from router.observe.records import Trailers

CLIENT_ID_KEY = "client_id"
MAX_CLIENT_ID_LENGTH = 128
TOKEN_KEY = "authorization"  # noqa: S105 a metadata key
SCHEME = "bearer "
LINE_FORMAT = "NAME sha256:HEX [priority=N] [rate=N] [adapters]"
CHECK_SECONDS = 1.0
"""Minimum seconds between checks for a changed token file. Checks are made during calls."""
OWNER_MARK = "·"
"""Separates a client's name from its request_id, which is ASCII and therefore cannot contain the mark."""

Metadata = Iterable[tuple[str, str | bytes]]

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_log = get_logger("clients")


class Call(Protocol):
    """A client's call as the services see it, with the method names of gRPC's contexts."""

    def invocation_metadata(self) -> Metadata | None:
        """Returns the metadata, which identify the caller."""

    def set_trailing_metadata(self, trailers: Trailers, /) -> object:
        """Sets the trailers, which are sent when the call ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client of a call, as far as it is known."""

    name: str = ""  # the name of the client's token; empty without authentication
    share: str = ""  # the name in the fair queues; clients with the same name share a turn
    max_priority: int | None = None  # None: any priority
    cache_salt: bytes = b""  # seeds its prompts' block hashes; empty with one tenant or without authentication
    may_change_adapters: bool = True  # whether it may load and unload them

    def key_of(self, request_id: str) -> str:
        """Returns the request's key on this router and in its store, since each client has its own request ids."""
        return f"{self.name}{OWNER_MARK}{request_id}" if self.name else request_id

    def check_priority(self, priority: int) -> None:
        """Checks a request's priority. Raises: NotAllowedError if it is too high."""
        if self.max_priority is not None and priority > self.max_priority:
            raise NotAllowedError(
                f"priority {priority} exceeds the maximum of {self.max_priority} for {self.name}", reason="PRIORITY"
            )

    def check_adapters(self) -> None:
        """Checks that the client may load and unload adapters. Raises: NotAllowedError."""
        if not self.may_change_adapters:
            message = f"{self.name} may not load or unload adapters: its line in the token file lacks `adapters`"
            raise NotAllowedError(message, reason="ADAPTERS_NOT_ALLOWED")


def split_key(key: str) -> tuple[str, str]:
    """Splits a key into (client's name, request_id)."""
    name, _, request_id = key.rpartition(OWNER_MARK)
    return name, request_id


class Clients:
    """Identifies clients by an unverified `client_id`; calls without one share a name. Owned by the event loop."""

    def identify(self, metadata: Metadata | None) -> Caller:
        """Returns the client that sent this metadata. Raises: UnauthenticatedError."""
        return Caller(share=_text_of(metadata, CLIENT_ID_KEY)[:MAX_CLIENT_ID_LENGTH])

    def charge(self, caller: Caller) -> None:
        """Counts one call. Raises: CapacityError above the client's rate."""

    def named(self, name: str) -> Caller:
        """Returns the client whose request was started on another router."""
        return Caller(name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The limits of one client, common to all tokens of its name."""

    max_priority: int = 0
    calls_per_minute: int | None = None  # None: no limit
    may_change_adapters: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """The content of a token file."""

    names: dict[bytes, str]  # by the SHA-256 of the token
    limits: dict[str, TokenLimits]  # by name


class TokenFile(Clients):
    """Identifies clients by tokens. The file has a hash per line: `NAME sha256:HEX [priority=N] [rate=N] [adapters]`.

    `priority` is the highest priority that a request may have (default 0), `rate` the maximum calls per minute, and
    `adapters` allows the client to load and unload adapters. Several tokens of one name are one client, so that a token
    can be replaced. The file is reloaded when it changes. A file that does not parse is rejected, and the previous
    tokens stay valid.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises: ConfigError."""
        self._path = path
        self._clock = clock
        self._allowances: dict[str, _TokenBucket] = {}
        self._stamp = file_stamp(path)
        self._checked_at = clock()
        self._tokens = read_tokens(path)

    def identify(self, metadata: Metadata | None) -> Caller:
        shown = _text_of(metadata, TOKEN_KEY)
        if not shown.lower().startswith(SCHEME):
            raise UnauthenticatedError(
                "a token is required: send the metadata authorization: Bearer TOKEN", reason="NO_TOKEN"
            )
        self._reload_if_changed()
        # The lookup's timing reveals at most how a hash begins, and no token can be guessed from a hash.
        name = self._tokens.names.get(hashlib.sha256(shown[len(SCHEME) :].strip().encode()).digest())
        if name is None:
            raise UnauthenticatedError("the token is not in the router's token file", reason="UNKNOWN_TOKEN")
        limits = self._tokens.limits[name]
        return replace(
            self.named(name), max_priority=limits.max_priority, may_change_adapters=limits.may_change_adapters
        )

    def charge(self, caller: Caller) -> None:
        limits = self._tokens.limits.get(caller.name)
        if limits is None or limits.calls_per_minute is None:
            return
        rate = limits.calls_per_minute
        allowance = self._allowances.setdefault(caller.name, _TokenBucket(rate, self._clock()))
        wait_seconds = allowance.take(rate, self._clock())
        if wait_seconds > 0:
            raise CapacityError(
                f"rate limit of {rate} calls per minute exceeded for {caller.name}",
                retry_after_seconds=wait_seconds,
                reason="RATE_LIMIT",
            )

    def named(self, name: str) -> Caller:
        has_others = bool(self._tokens.limits.keys() - {name})
        return Caller(name=name, share=name, cache_salt=name.encode() if has_others else b"")

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._tokens = read_tokens(self._path)
            except ConfigError as error:
                _log.error("changed token file is invalid; the previous tokens stay valid", error=error.message)


@dataclass(slots=True)
class _TokenBucket:
    """A token bucket that holds at most one minute's calls."""

    left: float  # calls
    at: float  # time of the last update, in monotonic seconds

    def take(self, per_minute: int, now: float) -> float:
        """Takes one call from the bucket. Returns 0, or the seconds to wait for the next call."""
        self.left = min(self.left + (now - self.at) * per_minute / 60.0, per_minute)
        self.at = now
        if self.left < 1.0:
            return (1.0 - self.left) * 60.0 / per_minute
        self.left -= 1.0
        return 0.0


def host_of_peer(peer: str) -> str:
    """Strips the port from a gRPC peer: "ipv4:192.0.2.1:5000", "ipv6:%5B::1%5D:5000", "unix:..."."""
    return peer.rpartition(":")[0] or peer


def read_tokens(path: Path) -> Tokens:
    """Reads a token file. Raises: ConfigError, naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"router.token_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"router.token_file {path} is not UTF-8") from error
    tokens = Tokens({}, {})
    for number, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].split():
            try:
                _read_line(words, tokens)
            except ValueError as error:
                raise ConfigError(f"router.token_file {path}:{number}: {error}") from error
    if not tokens.names:
        raise ConfigError(f"router.token_file {path} has no token; each line must be {LINE_FORMAT}")
    return tokens


def _read_line(words: list[str], tokens: Tokens) -> None:
    """Parses a line into `tokens`. Raises: ValueError."""
    name, shown, *options = [*words, "", ""][: max(len(words), 2)]
    found = _HASH.fullmatch(shown)
    if not _NAME.fullmatch(name) or found is None:
        raise ValueError(
            f"expected {LINE_FORMAT}; a name has up to 64 letters, digits, dots, dashes, underscores and @"
        )
    numbers: dict[str, int] = {}
    for option in options:
        if option == "adapters" and option not in numbers:
            numbers[option] = 1
            continue
        key, _, text = option.partition("=")
        minimum = {"priority": -(2**31), "rate": 1}.get(key)
        if minimum is None or key in numbers or not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < minimum:
            raise ValueError(
                f"{option!r} is neither priority=N, rate=N nor adapters, or not a number in its range, or there twice"
            )
        numbers[key] = int(text)
    limits = TokenLimits(
        max_priority=numbers.get("priority", 0),
        calls_per_minute=numbers.get("rate"),
        may_change_adapters="adapters" in numbers,
    )
    if tokens.limits.setdefault(name, limits) != limits:
        raise ValueError(f"{name} has different limits in an earlier line")
    owner = tokens.names.setdefault(bytes.fromhex(found[1]), name)
    if owner != name:
        raise ValueError(f"the token already belongs to {owner}")


def _text_of(metadata: Metadata | None, wanted: str) -> str:
    return next((value for key, value in metadata or () if key == wanted and isinstance(value, str)), "")
