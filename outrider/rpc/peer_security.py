"""Mutual TLS between the services of a cluster: one value for all of a process's channels and its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from outrider.config.settings import setting
from outrider.rpc.channels import open_channel, open_sync_channel
from outrider.rpc.credentials import TlsConfig
from outrider.rpc.tls_files import TlsFiles

AuthContext = Mapping[str, Any]
"""`ServicerContext.auth_context()`: lists of bytes by property (the stubs of grpcio say otherwise)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Section `security`: mutual TLS between the services of a cluster. All three files, or none: plaintext."""

    tls: TlsConfig = field(default_factory=TlsConfig)
    peer_name: str = setting(
        "outrider-node",
        help="DNS name in the certificate of every service of the cluster. Each side of a connection between services "
        "asks the other for it, instead of for an address.",
    )
    operator_name: str = setting(
        "outrider-operator", help="DNS name in certificates that may use NodeService besides (`outrider profile`)."
    )

    def __post_init__(self) -> None:
        files = (self.tls.certificate, self.tls.private_key, self.tls.authority)
        if any(files) and not all(files):
            raise ValueError("tls: certificate, private_key and authority go together: TLS between services is mutual")
        if not self.peer_name or not self.operator_name:
            raise ValueError("peer_name and operator_name must not be empty")


class PeerSecurity:
    """This process's certificate, and the names that it requires of others. Thread-safe.

    Everything is plaintext, and everybody a peer, unless `is_enabled`. Files are read on first use.
    """

    def __init__(
        self, config: SecurityConfig | None = None, *, on_refused: Callable[[str], None] = lambda _message: None
    ) -> None:
        """`on_refused` is told why changed files are not taken (see `TlsFiles`)."""
        self._config = SecurityConfig() if config is None else config
        self._files = TlsFiles(self._config.tls, on_refused=on_refused) if self._config.tls.is_enabled else None

    @property
    def is_enabled(self) -> bool:
        return self._files is not None

    @property
    def version(self) -> int:
        """Rises when files were renewed: a channel opened before reconnects with the old ones. Raises: ConfigError."""
        return 0 if self._files is None else self._files.version

    # ------------------------------------------------------------ dialling

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """To a service of the cluster at "host:port". Raises: ConfigError."""
        return open_channel(address, credentials=self._credentials(), server_name=self._config.peer_name)

    def open_bulk_channel(self, address: str, *, max_message_bytes: int) -> grpc.Channel:
        """For payload, over a connection of its own, and threads without an event loop. Raises: ConfigError."""
        return open_sync_channel(
            address,
            credentials=self._credentials(),
            server_name=self._config.peer_name,
            max_message_bytes=max_message_bytes,
            bulk=True,
        )

    def _credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._files is None else self._files.newest().channel_credentials()

    # ------------------------------------------------------------ serving

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext. Raises: ConfigError."""
        return None if self._files is None else self._files.server_credentials()

    def is_peer(self, auth_context: AuthContext) -> bool:
        """Whether a caller is a service of the cluster."""
        return not self.is_enabled or self._config.peer_name in names_of(auth_context)

    def is_operator(self, auth_context: AuthContext) -> bool:
        """Whether a caller may use NodeService."""
        return not self.is_enabled or self._config.operator_name in names_of(auth_context)

    def explain_refusal(self, auth_context: AuthContext) -> str:
        """Error message for a caller that is no peer."""
        shown = ", ".join(sorted(names_of(auth_context))) or "no name"
        return f"this call is for services whose certificate has the name {self._config.peer_name}; yours has {shown}"


PLAINTEXT = PeerSecurity()


def names_of(auth_context: AuthContext) -> set[str]:
    """The subject alternative names of the certificate that a caller has shown."""
    return {name.decode(errors="replace") for name in auth_context.get("x509_subject_alternative_name", ())}
