"""Under which address others reach this process: what is bound to every interface is not one."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache

PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of nobody (RFC 5737, RFC 3849): the kernel says from where it would reach them, and sends nothing."""


def reachable_address(advertised: str, bound: str) -> str:
    """What others dial, "host:port": what the settings advertise, else what was bound.

    `advertised` is "host", "host:port" or empty; `bound` is "host:port". A wildcard becomes
    this machine's own address: in a container, the one that other containers reach.
    """
    bound_host, port = split_port(bound)
    host, advertised_port = split_port(advertised)
    host = host or (own_host() if is_wildcard(bound_host) else bound_host)
    return f"{host}:{advertised_port or port}"


def host_port(host: str, port: object) -> str:
    """As it is dialled: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_port(address: str) -> tuple[str, str]:
    """Host and port, each empty where there is none; a bare IPv6 address comes back in brackets."""
    if address.startswith("["):
        host, _, rest = address.partition("]")
        return host + "]", rest.removeprefix(":")
    if address.count(":") > 1:
        return f"[{address}]", ""
    host, _, port = address.partition(":")
    return host, port


def own_host() -> str:
    """The address of the interface to the rest of the network; the host's name where there is none."""
    for family, probe in PROBES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((probe, 9))
                host = str(sock.getsockname()[0])
        except OSError:  # no such family here, or no route
            continue
        return f"[{host}]" if family == socket.AF_INET6 else host
    return socket.gethostname()


@cache
def loopback() -> str:
    """Of this machine: 127.0.0.1, or ::1 where it has only that."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def is_wildcard(host: str) -> bool:
    """Whether binding there means every interface."""
    address = ip_of(host)
    return host == "" or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port that is bound there."""
    address = ip_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_local(host: str) -> bool:
    """Whether the host means something else on every machine."""
    return is_loopback(host) or (host != "" and is_wildcard(host))


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
