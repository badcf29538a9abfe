"""The flags common to commands that call a running service: address, TLS, token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from outrider.client.targets import DEFAULT_TARGET, Targets
from outrider.errors import ConfigError, InvalidRequestError
from outrider.rpc.tls import TlsConfig

TARGET_VARIABLE = "OUTRIDER_TARGET"
SYSTEM = "system"


def targets(text: str) -> str:
    """Parses a flag's targets into the form that clients take. Raises: argparse.ArgumentTypeError."""
    try:
        return ",".join(Targets(text).all)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_target_argument(parser: argparse.ArgumentParser, *, flag: str = "--target") -> None:
    """Adds the flag. Its `dest` is `target`, whatever the flag's name."""
    parser.add_argument(
        flag,
        dest="target",
        type=targets,
        default=os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"address of the router, or several with commas; default ${TARGET_VARIABLE}, else {DEFAULT_TARGET}",
    )


def add_connection_arguments(parser: argparse.ArgumentParser, *, with_token: bool = True) -> None:
    connection = parser.add_argument_group("TLS", "without any of these flags the connection is plaintext")
    connection.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="the folder of `outrider up --tls DIR`, with ca.pem, client.pem and client-key.pem",
    )
    connection.add_argument(
        "--authority", metavar="FILE", help="trust these authorities (PEM); `system`: those of the system"
    )
    connection.add_argument(
        "--certificate", type=Path, metavar="FILE", help="this client's certificate, for mutual TLS (PEM)"
    )
    connection.add_argument("--private-key", type=Path, metavar="FILE", help="the certificate's key (PEM)")
    if with_token:
        connection.add_argument(
            "--token-file", type=Path, metavar="FILE", help="a bearer token to send with each call; needs TLS"
        )


def read_tls(arguments: argparse.Namespace) -> TlsConfig | None:
    """Returns the TLS settings, or None for plaintext. Raises: ConfigError if certificate or key is missing."""
    certificate, private_key, authority = arguments.certificate, arguments.private_key, arguments.authority
    if arguments.tls is not None:
        if authority or certificate or private_key:
            raise ConfigError("--tls names the files of its folder: omit --authority, --certificate and --private-key")
        folder = arguments.tls
        certificate, private_key, authority = folder / "client.pem", folder / "client-key.pem", folder / "ca.pem"
    if not (authority or certificate or private_key):
        return None
    trusted = None if authority in (None, SYSTEM) else Path(authority)
    try:
        return TlsConfig(certificate=certificate, private_key=private_key, authority=trusted)
    except ValueError as error:
        raise ConfigError("--certificate and --private-key must be given together") from error


def read_token(arguments: argparse.Namespace) -> str | None:
    """Returns the token, if a file is given. Raises: ConfigError unless the file is readable and has just one token."""
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


def read_connection(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns a client's arguments. Raises: ConfigError like `read_tls` and `read_token`, or if a token lacks TLS."""
    tls, token = read_tls(arguments), read_token(arguments)
    if token is not None and tls is None:
        raise ConfigError("--token-file needs --tls or --authority: without TLS, anybody on the network could read it")
    return {"tls": tls, "token": token}


def check_writable(path: Path, flag: str) -> None:
    """Checks an output path before a long run. Raises: InvalidRequestError."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidRequestError(f"--{flag} {path}: {error.strerror}", field=flag) from error
