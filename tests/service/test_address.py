"""The address at which other processes reach a process."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from outrider.service import address
from outrider.service.address import own_host, reachable_address, split_port


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "", ""),
        ("decode.internal", "decode.internal", ""),
        ("decode.internal:50052", "decode.internal", "50052"),
        ("10.0.0.7:50052", "10.0.0.7", "50052"),
        ("[fd00::7]:50052", "[fd00::7]", "50052"),
        ("[fd00::7]", "[fd00::7]", ""),
        ("fd00::7", "[fd00::7]", ""),
    ],
)
def test_host_and_port(text, host, port):
    assert split_port(text) == (host, port)


@pytest.mark.parametrize(
    ("advertised", "bound", "reachable"),
    [
        ("", "127.0.0.1:7", "127.0.0.1:7"),
        ("", "10.0.0.7:7", "10.0.0.7:7"),
        ("", "0.0.0.0:7", "own:7"),
        ("", "[::]:7", "own:7"),
        ("decode.internal", "0.0.0.0:7", "decode.internal:7"),
        ("decode.internal:80", "0.0.0.0:7", "decode.internal:80"),
        ("[fd00::7]", "[::]:7", "[fd00::7]:7"),
    ],
)
def test_what_others_dial(monkeypatch, advertised, bound, reachable):
    monkeypatch.setattr(address, "own_host", lambda: "own")
    assert reachable_address(advertised, bound) == reachable


def test_this_machines_own_address_is_one_that_can_be_dialled_from_here():
    host = own_host()
    if host != socket.gethostname():
        assert not ipaddress.ip_address(host.strip("[]")).is_unspecified
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.create_connection((host, server.getsockname()[1]), timeout=10) as client,
    ):
        assert client.getpeername()[0] == host


def test_without_a_route_it_is_the_hosts_name(monkeypatch):
    monkeypatch.setattr(address, "PROBES", ((socket.AF_INET, "no address"),))
    assert own_host() == socket.gethostname()
