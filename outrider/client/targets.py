"""The routers that a client may call."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
_LISTS_OF_THEIR_OWN = ("ipv4:", "ipv6:")  # gRPC targets that may contain commas


class Targets:
    """A client's targets, and which of them answered last: calls begin there. Shared by a client's threads."""

    def __init__(self, targets: str | Sequence[str]) -> None:
        """`targets` is one target, several with commas between them, or a sequence.

        Raises: ValueError for none, and for an https:// URL.
        """
        if isinstance(targets, str):
            targets = [targets] if targets.startswith(_LISTS_OF_THEIR_OWN) else targets.split(",")
        self.all = tuple(dict.fromkeys(dialled(target.strip()) for target in targets if target.strip()))
        if not self.all:
            raise ValueError("a client needs at least one target")
        self.current = self.all[0]

    def __len__(self) -> int:
        return len(self.all)

    def after(self, target: str) -> str:
        return self.all[(self.all.index(target) + 1) % len(self.all)]

    def in_order(self) -> tuple[str, ...]:
        """Every target once, the current one first."""
        first = self.all.index(self.current)
        return (*self.all[first:], *self.all[:first])


def dialled(target: str) -> str:
    """The target as gRPC takes it: a host without a port gets a router's, and http:// goes. Raises: ValueError."""
    if target.startswith("https://"):
        raise ValueError(f"{target}: a target is HOST:PORT; TLS is asked for by tls (of commands: --tls, --authority)")
    if target.startswith("http://"):
        target = target.removeprefix("http://").partition("/")[0]
    try:
        host = ipaddress.ip_address(target.strip("[]"))
    except ValueError:
        has_port_or_scheme = re.search(r":(//|\d+$)|^(unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):", target)
        return target if has_port_or_scheme else f"{target}:{DEFAULT_PORT}"
    return f"[{host}]:{DEFAULT_PORT}" if host.version == 6 else f"{host}:{DEFAULT_PORT}"
