"""A temporary certificate authority in a folder, so that one flag turns on mutual TLS.

The authority's key is never written to disk, so no one can issue another certificate.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
from pathlib import Path

import idna
import trustme
from cryptography import x509

from outrider.errors import ConfigError
from outrider.rpc.tls import OPERATOR_NAME, SecurityConfig, TlsConfig
from outrider.service.address import ip_of, own_host

VALID_DAYS = 30
AUTHORITY = "ca.pem"
NODE, CLIENT = "node", "client"
FILES = (AUTHORITY, *(f"{name}{end}" for name in (NODE, CLIENT) for end in (".pem", "-key.pem")))
HERE = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Issues certificates; its key exists only in this object."""

    def __init__(self) -> None:
        self._authority = trustme.CA(path_length=0, organization_name="Outrider", organization_unit_name="throw-away")

    def write(self, folder: Path) -> None:
        """Writes `ca.pem`. Raises: OSError."""
        _write(folder / AUTHORITY, self._authority.cert_pem.bytes())

    def issue(self, folder: Path, file: str, *names: str) -> TlsConfig:
        """Writes `FILE.pem` and `FILE-key.pem`, for these DNS names and addresses.

        Raises: OSError; UnicodeError for an invalid DNS name.
        """
        until = dt.datetime.now(dt.UTC) + dt.timedelta(days=VALID_DAYS)
        issued = self._authority.issue_cert(
            *names,
            organization_name="Outrider",
            organization_unit_name=file,
            common_name=names[0][:64],
            not_after=until,
        )
        tls = _tls_of(folder, file)
        assert tls.certificate is not None
        assert tls.private_key is not None
        _write(tls.private_key, issued.private_key_pem.bytes())
        _write(tls.certificate, issued.cert_chain_pems[0].bytes())
        return tls


def prepare_tls_folder(folder: Path, config: SecurityConfig) -> TlsConfig:
    """Returns the TLS settings for calls between the services of a cluster. Uses the folder's files if all exist.

    If there are none, writes an authority, `node.pem` for the services, and `client.pem` for clients and operators,
    with their keys, valid for 30 days. Raises: ConfigError for a folder that has only some of the files, or expired
    ones.
    """
    folder = folder.absolute()
    there = [name for name in FILES if (folder / name).exists()]
    try:
        if not there:
            if not _can_be_certified(config.peer_name):
                raise ConfigError(
                    f"security.peer_name {config.peer_name}: --tls issues certificates for DNS names in lower case only"
                )
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            authority = Authority()
            machine = filter(_can_be_certified, (socket.gethostname().lower(), own_host().strip("[]").lower()))
            authority.write(folder)
            authority.issue(folder, NODE, *dict.fromkeys((config.peer_name, *HERE, *machine)))
            authority.issue(folder, CLIENT, OPERATOR_NAME)
        elif missing := [name for name in FILES if name not in there]:
            raise ConfigError(
                f"--tls {folder}: it has {', '.join(there)} but not {', '.join(missing)}; remove or add them"
            )
        else:
            _check_dates(folder)
    except OSError as error:
        raise ConfigError(f"--tls {error.filename or folder}: {error.strerror}") from error
    return _tls_of(folder, NODE)


def _can_be_certified(name: str) -> bool:
    """Returns whether the name is an address, or a DNS name in normal form. A host name with an underscore, for
    example, is neither.
    """
    try:
        return ip_of(name) is not None or idna.encode(name, uts46=True).decode() == name
    except idna.IDNAError:
        return False


def _tls_of(folder: Path, file: str) -> TlsConfig:
    return TlsConfig(
        certificate=folder / f"{file}.pem", private_key=folder / f"{file}-key.pem", authority=folder / AUTHORITY
    )


def _check_dates(folder: Path) -> None:
    """Raises: ConfigError if a certificate has expired; OSError."""
    for name in FILES:
        if name.endswith("-key.pem"):
            continue
        try:
            until = x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
        except ValueError as error:
            raise ConfigError(f"--tls: {folder / name} is not a certificate") from error
        if until < dt.datetime.now(dt.UTC):
            raise ConfigError(f"--tls: {folder / name} expired on {until:%Y-%m-%d}; remove the folder for new files")


def _write(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
