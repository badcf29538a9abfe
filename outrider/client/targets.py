"""The addresses of the routers that a client may call."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence

DEFAULT_PORT = 50051
MAX_PORT = 65_535
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
_MULTI_ADDRESS_SCHEMES = ("ipv4:", "ipv6:")  # schemes of gRPC whose targets may contain commas


class Targets:
    """A client's targets. Calls first try `current`, the one that answered last. Shared by the client's threads."""

    def __init__(self, targets: str | Sequence[str]) -> None:
        """`targets` is one target, several separated by commas, or a sequence.

        Raises: ValueError if there is no target, for an invalid one, and for an https:// URL.
        """
        if isinstance(targets, str):
            targets = [targets] if targets.startswith(_MULTI_ADDRESS_SCHEMES) else targets.split(",")
        if not isinstance(targets, Sequence) or not all(isinstance(target, str) for target in targets):
            raise ValueError(f"a target must be HOST:PORT, not {targets!r}")
        self.all = tuple(dict.fromkeys(normalize_target(target.strip()) for target in targets if target.strip()))
        if not self.all:
            raise ValueError("a client needs at least one target")
        self.current = self.all[0]

    def __len__(self) -> int:
        return len(self.all)

    def after(self, target: str) -> str:
        return self.all[(self.all.index(target) + 1) % len(self.all)]

    def in_order(self) -> tuple[str, ...]:
        """Returns all targets, the current one first."""
        first = self.all.index(self.current)
        return (*self.all[first:], *self.all[:first])


def normalize_target(target: str) -> str:
    """Returns a target for gRPC: adds the default port if there is none, and removes http://. Raises: ValueError."""
    scheme, is_url, rest = target.partition("://")
    if is_url and scheme.lower() in ("https", "grpcs"):
        raise ValueError(f"{target}: a target must be HOST:PORT; tls (in commands --tls, --authority) turns TLS on")
    if is_url and scheme.lower() in ("http", "grpc"):
        target = rest.partition("/")[0]
    if re.match(r"(unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):(?!\d+$)|\w+://", target):
        return target
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(re.sub(r"^\[(.*)\]$", r"\1", target))
        return f"[{host}]:{DEFAULT_PORT}" if host.version == 6 else f"{host}:{DEFAULT_PORT}"
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:/\[\]]+)(?::(\d+))?", target)
    if found is None or int(found[2] or DEFAULT_PORT) > MAX_PORT:
        raise ValueError(f"{target}: a target must be HOST:PORT, for example {DEFAULT_TARGET} or [::1]:{DEFAULT_PORT}")
    return target if found[2] else f"{target}:{DEFAULT_PORT}"
