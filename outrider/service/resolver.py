"""Targets to addresses: a name that resolves to several addresses is several nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from outrider.service.address import ip_of

Resolver = Callable[[str], Awaitable[list[str]]]
"""Target → addresses that can be dialled. Raises: OSError when the name is not known (yet)."""


async def resolve_with_dns(target: str) -> list[str]:
    """One "ip:port" for each address behind "host:port", IPv4 where there is any (both families reach the same node).

    Addresses, and targets in another scheme ("unix:/path"), stay as they are.
    """
    host = host_name_of(target)
    if not host:
        return [target]
    port = target.rpartition(":")[2]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (UnicodeError, OverflowError) as error:  # no host name, no port
        raise OSError(f"{target} is not host:port: {error}") from error
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    if socket.AF_INET in by_family:
        return sorted({f"{ip}:{port}" for ip in by_family[socket.AF_INET]})
    return sorted({f"[{ip}]:{port}" for ips in by_family.values() for ip in ips})


def host_name_of(target: str) -> str:
    """The name in "name:port"; empty where the target is an address already, or of another scheme."""
    host, colon, port = target.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or ":" in host or ip_of(host) is not None:
        return ""
    return host
