"""The files of a `TlsConfig`, read again when they change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import ConfigError
from outrider.rpc.credentials import TlsConfig, TlsMaterial, read_tls

_Stamp = tuple[tuple[int, int, int], ...]
"""Of each file: inode, size and time of the last change."""


class TlsFiles:
    """The newest files that are readable and fit together. Thread-safe.

    Files are looked at whenever somebody connects, so a renewed certificate needs no restart. Half-written files
    and a certificate without its key are refused: what was read before stays in force, and `on_refused` says why.
    """

    def __init__(self, config: TlsConfig, *, on_refused: Callable[[str], None] = lambda _message: None) -> None:
        self._config = config
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._material: TlsMaterial | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """Counts reloads: credentials made from an older version are stale."""
        self.newest()
        return self._version

    def newest(self) -> TlsMaterial:
        """Raises: ConfigError where the files have never been usable."""
        with self._lock:
            stamp = _stamp_of(self._config)
            if self._material is None or stamp != self._stamp:
                self._stamp = stamp
                self._take(self._material)
            assert self._material is not None, "the first reading has raised"
            return self._material

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server whose clients show a certificate, where there is an authority. Raises: ConfigError."""
        if self._config.certificate is None:
            raise ConfigError("tls: a server needs a certificate and its private key")
        in_force = self.newest()

        def renewed() -> Any:  # the stubs know of no None
            """Asked before each handshake; None where nothing has changed.

            gRPC's core (1.85) crashes when a configuration is replaced while another handshake fails: replacing it
            each time, a few hundred plaintext connections in parallel ended a process.
            """
            nonlocal in_force
            newest = self.newest()
            if newest is in_force:
                return None
            in_force = newest
            return _server_configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(in_force), renewed, require_client_authentication=self._config.authority is not None
        )

    def _take(self, present: TlsMaterial | None) -> None:
        try:
            material = read_tls(self._config)
            _check_pair(self._config)
        except ConfigError as error:
            if present is None:
                raise
            self._on_refused(error.message)
            return
        self._material = material
        self._version += 1


def _server_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.private_key is not None, "TlsConfig has checked it"
    assert material.certificate is not None, "server_credentials has checked it"
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.certificate)], root_certificates=material.authority
    )


def _check_pair(config: TlsConfig) -> None:
    """GRPC would say nothing before the first handshake fails. Raises: ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if config.certificate is not None and config.private_key is not None:
            where = f"{config.certificate}, {config.private_key}"
            context.load_cert_chain(config.certificate, config.private_key, password=lambda: "")
        if config.authority is not None:
            where = str(config.authority)
            context.load_verify_locations(config.authority)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(f"tls: {where}: {reason}") from error


def _stamp_of(config: TlsConfig) -> _Stamp:
    return tuple(file_stamp(path) for path in (config.certificate, config.private_key, config.authority) if path)


def file_stamp(path: Path) -> tuple[int, int, int]:
    """What differs once a file was changed; zeros where it is missing."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns
