"""The address of the store, from `router.store`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Self
from urllib.parse import unquote, urlsplit

from outrider.errors import ConfigError
from outrider.extras import install_command

MEMORY = "memory"
"""The value of `router.store` that keeps requests in this router's memory only."""
PASSWORD_VARIABLE = "OUTRIDER_STORE_PASSWORD"  # noqa: S105 its name
DEFAULT_PORT = 6379
_SCHEMES = ("valkey", "valkeys")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyAddress:
    """The address of a server that speaks Valkey's protocol. `str` leaves the password out."""

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    is_tls: bool = False
    username: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses `valkey[s]://[[user][:password]@]host[:port][/database]`.

        Raises: ValueError, whose message does not contain the password.
        """
        expected = f"store must be {MEMORY} or valkey://host:port/database (valkeys:// for TLS)"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(expected) from error
        database = parts.path.removeprefix("/")
        if parts.scheme not in _SCHEMES or not host or parts.query or parts.fragment:
            raise ValueError(expected)
        if database and not database.isdecimal():
            raise ValueError(f"store: the database must be a number, not {database!r}")
        return cls(
            host=host,
            port=DEFAULT_PORT if port is None else port,
            database=int(database or 0),
            is_tls=parts.scheme == "valkeys",
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'valkeys' if self.is_tls else 'valkey'}://{host}:{self.port}/{self.database}"


def store_address(url: str, environ: Mapping[str, str] = os.environ) -> ValkeyAddress:
    """Returns the store's address; a password in the environment overrides one in the URL.

    Raises: ConfigError if the URL is invalid or the Valkey client is not installed.
    """
    try:
        address = ValkeyAddress.parse(url)
    except ValueError as error:
        raise ConfigError(f"router.{error}") from error
    if find_spec("valkey") is None:
        raise ConfigError(f"router.store = {address} needs the Valkey client: {install_command('store')}")
    password = environ.get(PASSWORD_VARIABLE)
    return replace(address, password=password) if password else address
