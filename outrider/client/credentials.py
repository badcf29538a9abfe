"""Who the other side must be, and who we are."""

from __future__ import annotations

import grpc

from outrider.errors import ConfigError
from outrider.service.channels import channel_credentials
from outrider.service.config import TlsConfig


def make_credentials(tls: TlsConfig | None, token: str | None) -> grpc.ChannelCredentials | None:
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
