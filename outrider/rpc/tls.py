"""TLS and tokens for channels and servers, and mutual TLS between the services of a cluster."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.config.settings import setting
from outrider.errors import ConfigError
from outrider.rpc.channels import open_channel, open_sync_channel

AuthContext = Mapping[str, Any]
"""The type of `ServicerContext.auth_context()`: lists of bytes by property name. grpcio's stubs have another type."""

OPERATOR_NAME = "outrider-operator"
"""DNS name in the certificates of operators, who may also call NodeService (`outrider profile`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM form. A server uses TLS if certificate and private key are set, a client if any file is set."""

    certificate: Path | None = setting(None, help="Certificate chain of this side.")
    private_key: Path | None = setting(None, help="Private key of this side.")
    authority: Path | None = setting(
        None,
        help="Certificates of the authorities that this side trusts. On a server, clients must then present a "
        "certificate (mutual TLS).",
    )

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together")

    @property
    def is_enabled(self) -> bool:
        return self.certificate is not None or self.authority is not None

    @property
    def files(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.certificate, self.private_key, self.authority


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The contents of the files of a `TlsConfig`."""

    certificate: bytes | None
    private_key: bytes | None
    authority: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a channel. Without an authority, the channel trusts the system's authorities."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority, private_key=self.private_key, certificate_chain=self.certificate
        )

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.private_key is not None, "TlsConfig has checked it"
        assert self.certificate is not None, "TlsFiles.server_credentials has checked it"
        return grpc.ssl_server_certificate_configuration(
            [(self.private_key, self.certificate)], root_certificates=self.authority
        )


def read_tls(tls: TlsConfig) -> TlsMaterial:
    """Reads the files. Raises: ConfigError if one cannot be read."""
    try:
        return TlsMaterial(*(None if path is None else path.read_bytes() for path in tls.files))
    except OSError as error:
        raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error


def client_credentials(tls: TlsConfig | None, token: str | None) -> grpc.ChannelCredentials | None:
    """Returns the credentials of a client; None for plaintext. A `tls` without an authority trusts the system's
    authorities.

    Raises: ConfigError if a file cannot be read, or if a token would be sent in plaintext.
    """
    if tls is None:
        if token is not None:
            raise ConfigError("a token needs tls=TlsConfig(…): without TLS, anybody on the network could read it")
        return None
    credentials = read_tls(tls).channel_credentials()
    if token is None:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))


class TlsFiles:
    """The latest contents of a `TlsConfig`'s files that were readable and matched each other. Thread-safe.

    Files are checked on every connection, so a renewed certificate needs no restart. Half-written files
    and a certificate without its key are rejected: the previous contents stay in use, and `on_refused` gets the reason.
    """

    def __init__(self, config: TlsConfig, *, on_refused: Callable[[str], None] = lambda _message: None) -> None:
        self._config = config
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._stamps: list[FileStamp] = []
        self._material: TlsMaterial | None = None

    def newest(self) -> TlsMaterial:
        """Returns the current contents. Raises: ConfigError if the files have never been usable."""
        with self._lock:
            stamps = [file_stamp(path) for path in self._config.files if path]
            if self._material is None or stamps != self._stamps:
                self._stamps = stamps
                try:
                    material = read_tls(self._config)
                    _check_pair(self._config)
                except ConfigError as error:
                    if self._material is None:
                        raise
                    self._on_refused(error.message)
                else:
                    self._material = material
            return self._material

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns a server's credentials. With an authority, clients must show a certificate. Raises: ConfigError."""
        if self._config.certificate is None:
            raise ConfigError("tls: a server needs a certificate and its private key")
        in_force = self.newest()

        def renewed() -> Any:  # the stubs do not allow None
            """Returns the new configuration, or None if nothing has changed. gRPC calls this before each handshake.

            gRPC's core (1.85) crashes if the configuration is replaced while another handshake fails. When every
            handshake replaced it, a few hundred parallel plaintext connections crashed a process.
            """
            nonlocal in_force
            newest = self.newest()
            if newest is in_force:
                return None
            in_force = newest
            return newest.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            in_force.server_configuration(),
            renewed,
            require_client_authentication=self._config.authority is not None,
        )


def _check_pair(config: TlsConfig) -> None:
    """Checks that the files match, since gRPC reports nothing until the first handshake fails. Raises: ConfigError."""
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


FileStamp = tuple[int, int, int]
"""A file's inode, its size in bytes, and the time of its last change in nanoseconds."""


def file_stamp(path: Path) -> FileStamp:
    """Returns a value that changes with every change of the file; zeros if the file is missing."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Section `security`: mutual TLS between the services of a cluster.

    Either all three files are set, or none, which means plaintext.
    """

    tls: TlsConfig = field(default_factory=TlsConfig)
    peer_name: str = setting(
        "outrider-node",
        help="DNS name in the certificate of every service of the cluster. Services check each other for this name "
        "instead of an address.",
    )

    def __post_init__(self) -> None:
        if any(self.tls.files) and not all(self.tls.files):
            raise ValueError("tls: certificate, private_key and authority go together: TLS between services is mutual")
        if not self.peer_name:
            raise ValueError("peer_name must not be empty")


class PeerSecurity:
    """This process's certificate, and the names that it requires in others' certificates. Thread-safe.

    Unless `is_enabled`, everything is plaintext and every caller counts as a peer. Files are read on first use.
    """

    def __init__(
        self, config: SecurityConfig | None = None, *, on_refused: Callable[[str], None] = lambda _message: None
    ) -> None:
        """`on_refused` is called with the reason if changed files are rejected (see `TlsFiles`)."""
        self.config = SecurityConfig() if config is None else config
        self._files = TlsFiles(self.config.tls, on_refused=on_refused) if self.config.tls.is_enabled else None

    @property
    def is_enabled(self) -> bool:
        return self._files is not None

    @property
    def material(self) -> TlsMaterial | None:
        """The TLS material that new connections present and trust; None means plaintext.

        Open channels keep the material with which they were opened. Raises: ConfigError.
        """
        return None if self._files is None else self._files.newest()

    # ------------------------------------------------------------ dialling

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel to a service of the cluster at "host:port". Raises: ConfigError."""
        return open_channel(address, credentials=self._credentials(), server_name=self.config.peer_name)

    def open_bulk_channel(self, address: str, *, max_message_bytes: int) -> grpc.Channel:
        """Opens a separate connection for payload, for threads without an event loop. Raises: ConfigError."""
        return open_sync_channel(
            address,
            credentials=self._credentials(),
            server_name=self.config.peer_name,
            max_message_bytes=max_message_bytes,
            bulk=True,
        )

    def _credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._files is None else self._files.newest().channel_credentials()

    # ------------------------------------------------------------ serving

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Returns the server's credentials; None for plaintext. Raises: ConfigError."""
        return None if self._files is None else self._files.server_credentials()

    def is_peer(self, auth_context: AuthContext) -> bool:
        """Returns whether a caller is a service of the cluster."""
        return not self.is_enabled or self.config.peer_name in names_of(auth_context)

    def is_operator(self, auth_context: AuthContext) -> bool:
        """Returns whether a caller may use NodeService as an operator."""
        return not self.is_enabled or OPERATOR_NAME in names_of(auth_context)

    def explain_refusal(self, auth_context: AuthContext) -> str:
        """Returns the error message for a caller that is not a peer."""
        shown = ", ".join(sorted(names_of(auth_context))) or "no name"
        return f"this call is for services whose certificate has the name {self.config.peer_name}; yours has {shown}"


PLAINTEXT = PeerSecurity()


def names_of(auth_context: AuthContext) -> set[str]:
    """Returns the subject alternative names of the certificate that a caller has shown."""
    return {name.decode(errors="replace") for name in auth_context.get("x509_subject_alternative_name", ())}
