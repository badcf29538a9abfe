"""Who the other side must be, and who we are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.config import setting
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM form. As a server: certificate and private key turn TLS on; as a client: any of them does."""

    certificate: Path | None = setting(None, help="This side's certificate chain.")
    private_key: Path | None = setting(None, help="This side's private key.")
    authority: Path | None = setting(
        None, help="Certificates that vouch for the other side. On a server: clients must show one (mutual TLS)."
    )

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together")

    @property
    def is_enabled(self) -> bool:
        return self.certificate is not None or self.authority is not None


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Raises: OSError when a file cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.authority.read_bytes() if tls.authority else None,
        private_key=tls.private_key.read_bytes() if tls.private_key else None,
        certificate_chain=tls.certificate.read_bytes() if tls.certificate else None,
    )


def client_credentials(tls: TlsConfig | None, token: str | None) -> grpc.ChannelCredentials | None:
    """None: plaintext. A `tls` that names no authority trusts the system's.

    Raises: ConfigError for a file that cannot be read, and for a token that would travel in plaintext.
    """
    if tls is None:
        if token is not None:
            raise ConfigError("a token needs tls=TlsConfig(…): in plaintext everybody on the way could read it")
        return None
    try:
        credentials = channel_credentials(tls)
    except OSError as error:
        raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error
    if token is None:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Needs certificate and private key. Raises: OSError when a file cannot be read."""
    assert tls.certificate is not None, "TLS on a server needs a certificate"
    assert tls.private_key is not None, "TLS on a server needs a private key"
    return grpc.ssl_server_credentials(
        [(tls.private_key.read_bytes(), tls.certificate.read_bytes())],
        root_certificates=tls.authority.read_bytes() if tls.authority else None,
        require_client_auth=tls.authority is not None,
    )
