"""Finds the address under which others reach this process. A wildcard bind address is not such an address."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache

PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation addresses (RFC 5737, RFC 3849): the kernel chooses a source address for them without sending
anything.
"""


def reachable_address(advertised: str, bound: str) -> str:
    """Returns the "host:port" that other processes connect to: the advertised one, or else the bound one.

    `advertised` is "host", "host:port" or empty; `bound` is "host:port". A wildcard is replaced by this machine's own
    address; in a container, this is the address at which other containers reach it.
    """
    bound_host, port = split_port(bound)
    host, advertised_port = split_port(advertised)
    host = host or (own_host() if is_wildcard(bound_host) else bound_host)
    return f"{host}:{advertised_port or port}"


def host_port(host: str, port: object) -> str:
    """Joins host and port into an address; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_port(address: str) -> tuple[str, str]:
    """Splits an address into host and port. Either may be empty; a bare IPv6 address is returned in brackets."""
    if address.startswith("["):
        host, _, rest = address.partition("]")
        return host + "]", rest.removeprefix(":")
    if address.count(":") > 1:
        return f"[{address}]", ""
    host, _, port = address.partition(":")
    return host, port


def own_host() -> str:
    """Returns the address of the interface with a route to other networks, or else the host name."""
    for family, probe in PROBES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((probe, 9))
                host = str(sock.getsockname()[0])
        except OSError:  # this address family is missing, or there is no route
            continue
        return f"[{host}]" if family == socket.AF_INET6 else host
    return socket.gethostname()


@cache
def loopback() -> str:
    """Returns this machine's loopback address: 127.0.0.1, or ::1 if it has only IPv6."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def reserve_port(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the port, or to a free one if it is 0.

    While the socket is open, the system gives the port to no other process, but a server that sets SO_REUSEADDR may
    listen on it: on Linux, several such sockets may be bound to a port if at most one of them listens.

    Raises: OSError if the port is taken or the host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    reserved = socket.socket(family, kind, protocol)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(address)
    return reserved


def is_wildcard(host: str) -> bool:
    """Returns whether binding to the host means binding to all interfaces."""
    address = ip_of(host)
    return host == "" or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a port bound to the host."""
    address = ip_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_local(host: str) -> bool:
    """Returns whether the host (loopback or a wildcard) refers to whichever machine uses it."""
    return is_loopback(host) or (host != "" and is_wildcard(host))


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parses an IP address; returns None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
