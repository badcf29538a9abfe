"""Who calls: clients name themselves in the metadata, or show a token from a file of hashes."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from outrider.errors import CapacityError, ConfigError, UnauthenticatedError
from outrider.service.telemetry.logging import get_logger
from router.caller import Caller

CLIENT_ID_KEY = "client_id"
MAX_CLIENT_ID_LENGTH = 128
TOKEN_KEY = "authorization"  # noqa: S105 the key of the metadata
SCHEME = "bearer "
FORM = "NAME sha256:HEX [priority=N] [rate=N]"

Metadata = Iterable[tuple[str, str | bytes]]

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_log = get_logger("clients")


class Clients(Protocol):
    """Owned by the event loop."""

    def identify(self, metadata: Metadata | None) -> Caller:
        """Raises: UnauthenticatedError."""

    def charge(self, caller: Caller) -> None:
        """Counts one call. Raises: CapacityError beyond the client's rate."""

    def named(self, name: str) -> Caller:
        """The client whose request was begun on another router."""


class Anybody:
    """Nobody is asked for tokens; calls without a `client_id` share the empty name."""

    def identify(self, metadata: Metadata | None) -> Caller:
        return Caller(share=_text_of(metadata, CLIENT_ID_KEY)[:MAX_CLIENT_ID_LENGTH])

    def charge(self, caller: Caller) -> None:
        return

    def named(self, name: str) -> Caller:
        return Caller(name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One line of a token file."""

    name: str
    digest: bytes  # SHA-256 of the token
    most_priority: int = 0
    calls_per_minute: int | None = None  # None: no limit


class TokenFile:
    """Clients by the hashes of their tokens, one a line: `NAME sha256:HEX [priority=N] [rate=N]`.

    `priority` is the highest that a request may have (default 0), `rate` the calls in a minute. Several tokens of
    one name are one client, so that a token can be replaced. The file is read again when it changes; one that does
    not parse is refused, and the tokens that were read before stay valid.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises: ConfigError."""
        self._path = path
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}
        self._stamp = _stamp_of(path)
        self._tokens = read_tokens(path)

    def identify(self, metadata: Metadata | None) -> Caller:
        shown = _text_of(metadata, TOKEN_KEY)
        if not shown.lower().startswith(SCHEME):
            raise UnauthenticatedError("this router asks for a token: authorization: Bearer TOKEN", reason="NO_TOKEN")
        digest = hashlib.sha256(shown[len(SCHEME) :].strip().encode()).digest()
        found: Token | None = None
        for token in self._newest():  # all of them: the time says nothing about which
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise UnauthenticatedError("the token is not known here", reason="UNKNOWN_TOKEN")
        return replace(self.named(found.name), most_priority=found.most_priority)

    def charge(self, caller: Caller) -> None:
        rate = next((token.calls_per_minute for token in self._tokens if token.name == caller.name), None)
        if rate is None:
            return
        allowance = self._allowances.setdefault(caller.name, _Allowance(rate, self._clock()))
        wait_seconds = allowance.take(rate, self._clock())
        if wait_seconds > 0:
            raise CapacityError(
                f"{caller.name} may make {rate} calls a minute", retry_after_seconds=wait_seconds, reason="RATE_LIMIT"
            )

    def named(self, name: str) -> Caller:
        has_others = any(token.name != name for token in self._tokens)
        return Caller(name=name, share=name, cache_salt=name.encode() if has_others else b"")

    def _newest(self) -> tuple[Token, ...]:
        stamp = _stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._tokens = read_tokens(self._path)
            except ConfigError as error:
                _log.error("the changed token file is not taken; the old tokens stay valid", error=error.message)
        return self._tokens


@dataclass(slots=True)
class _Allowance:
    """A token bucket of one minute."""

    left: float
    at: float

    def take(self, per_minute: int, now: float) -> float:
        """0, or how many seconds to wait for the next call."""
        self.left = min(self.left + (now - self.at) * per_minute / 60.0, per_minute)
        self.at = now
        if self.left < 1.0:
            return (1.0 - self.left) * 60.0 / per_minute
        self.left -= 1.0
        return 0.0


def host_of_peer(peer: str) -> str:
    """Of gRPC's name for the other end of a connection: "ipv4:192.0.2.1:5000", "ipv6:%5B::1%5D:5000", "unix:..."."""
    return peer.rpartition(":")[0] or peer


def open_clients(token_file: Path | None) -> Clients:
    """Raises: ConfigError."""
    return Anybody() if token_file is None else TokenFile(token_file)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Raises: ConfigError, naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"router.token_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"router.token_file {path} is not UTF-8") from error
    tokens: dict[bytes, Token] = {}
    limits: dict[str, tuple[int, int | None]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            token = _read_token(words)
            if limits.setdefault(token.name, (token.most_priority, token.calls_per_minute)) != (
                token.most_priority,
                token.calls_per_minute,
            ):
                raise ValueError(f"{token.name} has other limits in an earlier line")
            if tokens.setdefault(token.digest, token).name != token.name:
                raise ValueError(f"{tokens[token.digest].name} has the same token")
        except ValueError as error:
            raise ConfigError(f"router.token_file {path}:{number}: {error}") from error
    if not tokens:
        raise ConfigError(f"router.token_file {path} has no token; a line is {FORM}")
    return tuple(tokens.values())


def _read_token(words: list[str]) -> Token:
    """Raises: ValueError."""
    name, shown, *limits = [*words, "", ""][: max(len(words), 2)]
    digest = _HASH.fullmatch(shown)
    if not _NAME.fullmatch(name) or digest is None:
        raise ValueError(f"expected {FORM}; a name has up to 64 letters, digits, dots, dashes, underscores and @")
    numbers: dict[str, int] = {}
    for limit in limits:
        key, _, text = limit.partition("=")
        least = {"priority": -(2**31), "rate": 1}.get(key)
        if least is None or key in numbers or not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < least:
            raise ValueError(f"{limit!r} is neither priority=N nor rate=N, or not a number in its range")
        numbers[key] = int(text)
    return Token(
        name=name,
        digest=bytes.fromhex(digest[1]),
        most_priority=numbers.get("priority", 0),
        calls_per_minute=numbers.get("rate"),
    )


def _text_of(metadata: Metadata | None, wanted: str) -> str:
    return next((value for key, value in metadata or () if key == wanted and isinstance(value, str)), "")


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns
