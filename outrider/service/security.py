"""Log messages about the security of connections, or its absence."""

from __future__ import annotations

from outrider.service.address import is_loopback
from outrider.service.telemetry.logging import get_logger

_log = get_logger("security")


def warn_if_unauthenticated(host: str, *, what: str, is_protected: bool, fix: str) -> None:
    """Warns if a port can be reached from other machines without authentication."""
    if not is_protected and not is_loopback(host):
        _log.warning(f"ANYBODY who reaches this machine can use {what}; {fix}", host=host)


def log_refused_files(message: str) -> None:
    """Logs why `TlsFiles` or `PeerSecurity` rejected changed files."""
    _log.error("renewed TLS files were rejected; the previous ones stay in use", error=message)
