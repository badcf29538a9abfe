"""The TLS flags of every command that calls a running service."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.errors import ConfigError
from outrider.rpc.credentials import TlsConfig


def add_connection_arguments(parser: argparse.ArgumentParser, *, with_token: bool = True) -> None:
    connection = parser.add_argument_group("TLS", "without any of these flags the connection is plaintext")
    connection.add_argument("--tls", action="store_true", help="trust the system's certificate authorities")
    connection.add_argument("--authority", type=Path, metavar="FILE", help="trust these authorities instead (PEM)")
    connection.add_argument("--certificate", type=Path, metavar="FILE", help="our certificate, for mutual TLS (PEM)")
    connection.add_argument("--private-key", type=Path, metavar="FILE", help="the certificate's key (PEM)")
    if with_token:
        connection.add_argument(
            "--token-file", type=Path, metavar="FILE", help="a bearer token to send with each call; needs TLS"
        )


def read_tls(arguments: argparse.Namespace) -> TlsConfig | None:
    """None: plaintext. Raises: ConfigError for a certificate without its key, or the other way round."""
    files = {name: getattr(arguments, name) for name in ("authority", "certificate", "private_key")}
    if not arguments.tls and not any(files.values()):
        return None
    try:
        return TlsConfig(**files)
    except ValueError as error:
        raise ConfigError("--certificate and --private-key must be given together") from error


def read_token(arguments: argparse.Namespace) -> str | None:
    """Raises: ConfigError for a file that cannot be read or does not contain one token."""
    if arguments.token_file is None:
        return None
    try:
        token: str = arguments.token_file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--token-file: {error.filename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--token-file: {arguments.token_file} is not ASCII text") from error
    if not token or len(token.split()) != 1:
        raise ConfigError(f"--token-file: {arguments.token_file} must contain exactly one token")
    return token
