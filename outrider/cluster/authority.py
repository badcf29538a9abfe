"""A throw-away certificate authority in a folder, so that mutual TLS is one flag away.

Its key is never written: nobody can issue another certificate, and a folder that lacks a file is made anew.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import socket
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import ConfigError
from outrider.rpc.tls import SecurityConfig, TlsConfig
from outrider.service.address import own_host

VALID_DAYS = 30
CLOCK_SKEW = dt.timedelta(minutes=5)
AUTHORITY = "ca.pem"
NODE, CLIENT = "node", "client"
FILES = (AUTHORITY, *(f"{name}{end}" for name in (NODE, CLIENT) for end in (".pem", "-key.pem")))

HERE = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Issues certificates; its key exists in this object only."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Outrider throw-away authority")])
        self._certificate = (
            _builder(name, name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def write(self, folder: Path) -> None:
        """`ca.pem`. Raises: OSError."""
        _write(folder / AUTHORITY, self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, folder: Path, file: str, *names: str) -> TlsConfig:
        """`FILE.pem` and `FILE-key.pem`, for these DNS names and addresses. Raises: OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(subject, self._certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        tls = _tls_of(folder, file)
        assert tls.certificate is not None
        assert tls.private_key is not None
        _write(tls.private_key, private)
        _write(tls.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        return tls


def prepare_tls_folder(folder: Path, config: SecurityConfig) -> TlsConfig:
    """What the services of a cluster show each other; the folder's own files where it has all of them.

    Otherwise an authority, `node.pem` for the services, and `client.pem` for clients and operators, with their keys,
    valid for 30 days. Raises: ConfigError for a folder that has some of the files, or expired ones.
    """
    folder = folder.absolute()
    there = [name for name in FILES if (folder / name).exists()]
    try:
        if not there:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            authority = Authority()
            authority.write(folder)
            machine = (socket.gethostname(), own_host().strip("[]"))
            authority.issue(folder, NODE, *dict.fromkeys((config.peer_name, *HERE, *machine)))
            authority.issue(folder, CLIENT, config.operator_name)
        elif missing := [name for name in FILES if name not in there]:
            raise ConfigError(
                f"--tls {folder}: it has {', '.join(there)} but not {', '.join(missing)}; remove or add them"
            )
        else:
            _check_dates(folder)
    except OSError as error:
        raise ConfigError(f"--tls {error.filename or folder}: {error.strerror}") from error
    return _tls_of(folder, NODE)


def _tls_of(folder: Path, file: str) -> TlsConfig:
    return TlsConfig(
        certificate=folder / f"{file}.pem", private_key=folder / f"{file}-key.pem", authority=folder / AUTHORITY
    )


def _check_dates(folder: Path) -> None:
    """Raises: ConfigError, OSError."""
    for name in FILES:
        if name.endswith("-key.pem"):
            continue
        try:
            until = x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
        except ValueError as error:
            raise ConfigError(f"--tls: {folder / name} is not a certificate") from error
        if until < dt.datetime.now(dt.UTC):
            raise ConfigError(f"--tls: {folder / name} expired on {until:%Y-%m-%d}; remove the folder for new files")


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=VALID_DAYS))
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes) -> None:
    """A new file for its owner only. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
