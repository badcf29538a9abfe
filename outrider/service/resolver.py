"""Resolves targets to addresses. A name with several addresses stands for several nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from outrider.service.address import ip_of

Resolver = Callable[[str], Awaitable[list[str]]]
"""Maps a target to addresses that can be dialled. Raises: OSError if the name is not known (yet)."""


async def resolve_with_dns(target: str) -> list[str]:
    """Returns "ip:port" for each address of "host:port".

    If there are IPv4 addresses, only these are returned, since both families reach the same node. Addresses, and
    targets with another scheme ("unix:/path"), are returned unchanged.
    """
    host = host_name_of(target)
    if not host:
        return [target]
    port = target.rpartition(":")[2]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (UnicodeError, OverflowError) as error:  # an invalid host name or port
        raise OSError(f"{target} is not host:port: {error}") from error
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    if socket.AF_INET in by_family:
        return sorted({f"{ip}:{port}" for ip in by_family[socket.AF_INET]})
    return sorted({f"[{ip}]:{port}" for ips in by_family.values() for ip in ips})


def host_name_of(target: str) -> str:
    """Returns the name in "name:port"; empty if the target is an address or has another scheme."""
    host, colon, port = target.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or ":" in host or ip_of(host) is not None:
        return ""
    return host
