"""TLS and tokens of a channel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.config.settings import setting
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


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files of a `TlsConfig` contain."""

    certificate: bytes | None
    private_key: bytes | None
    authority: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Without an authority the system's are trusted."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority, private_key=self.private_key, certificate_chain=self.certificate
        )


def read_tls(tls: TlsConfig) -> TlsMaterial:
    """Raises: ConfigError when a file cannot be read."""
    try:
        certificate, private_key, authority = (
            None if path is None else path.read_bytes() for path in (tls.certificate, tls.private_key, tls.authority)
        )
        return TlsMaterial(certificate, private_key, authority)
    except OSError as error:
        raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error


def client_credentials(tls: TlsConfig | None, token: str | None) -> grpc.ChannelCredentials | None:
    """None: plaintext. A `tls` that names no authority trusts the system's.

    Raises: ConfigError for a file that cannot be read, and for a token that would travel in plaintext.
    """
    if tls is None:
        if token is not None:
            raise ConfigError("a token needs tls=TlsConfig(…): in plaintext everybody on the way could read it")
        return None
    credentials = read_tls(tls).channel_credentials()
    if token is None:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
