"""The flags of a connection that is not plaintext, for every command that calls a running service."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.service.config import TlsConfig


def add_connection_arguments(parser: argparse.ArgumentParser, *, with_token: bool = True) -> None:
    connection = parser.add_argument_group("TLS", "without any of these flags: plaintext")
    connection.add_argument("--tls", action="store_true", help="the system's authorities vouch for the other side")
    connection.add_argument("--authority", type=Path, metavar="FILE", help="these do instead (PEM)")
    connection.add_argument("--certificate", type=Path, metavar="FILE", help="ours, where it is asked for (PEM)")
    connection.add_argument("--private-key", type=Path, metavar="FILE", help="its key (PEM)")
    if with_token:
        connection.add_argument(
            "--token-file", type=Path, metavar="FILE", help="sent with each call as a bearer token; needs TLS"
        )


def read_tls(arguments: argparse.Namespace) -> TlsConfig | None:
    """None: plaintext. Raises: ConfigError for a certificate without its key, or the other way round."""
    files = {name: getattr(arguments, name) for name in ("authority", "certificate", "private_key")}
    if not arguments.tls and not any(files.values()):
        return None
    from outrider.service.config import TlsConfig  # brings yaml along, which a plaintext probe can do without

    try:
        return TlsConfig(**files)
    except ValueError as error:
        raise ConfigError("--certificate and --private-key go together") from error


def read_token(arguments: argparse.Namespace) -> str | None:
    """Raises: ConfigError for a file that cannot be read, or has no token in it."""
    if arguments.token_file is None:
        return None
    try:
        token: str = arguments.token_file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--token-file: {error.filename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--token-file: {arguments.token_file} is not ASCII text") from error
    if not token or len(token.split()) != 1:
        raise ConfigError(f"--token-file: {arguments.token_file} is not one token")
    return token
