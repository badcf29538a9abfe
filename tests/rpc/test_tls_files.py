"""Certificates that are renewed while a process runs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.errors import ConfigError
from outrider.rpc.tls import TlsConfig, TlsFiles

Authority = pytest.importorskip("outrider.cluster.authority", reason="needs cryptography").Authority
CALL_SECONDS = 60.0


@pytest.fixture
def issued(tmp_path):
    authority = Authority()
    authority.write(tmp_path)
    return authority, authority.issue(tmp_path, "node", "localhost")


def renew(authority, tls, *, key=True):
    """Replaces the certificate by a new one. If `key` is False, the old key stays, which does not fit."""
    folder = tls.certificate.parent
    fresh = authority.issue(folder, f"fresh-{len(list(folder.iterdir()))}", "localhost")
    fresh.certificate.replace(tls.certificate)
    if key:
        fresh.private_key.replace(tls.private_key)


def test_renewed_files_are_taken_when_somebody_connects(issued):
    authority, tls = issued
    files = TlsFiles(tls)
    before = files.newest()
    assert files.newest() is before
    renew(authority, tls)
    assert files.newest().certificate == tls.certificate.read_bytes() != before.certificate


def test_files_that_do_not_fit_together_are_refused_and_the_old_ones_stay(issued):
    authority, tls = issued
    refused = []
    files = TlsFiles(tls, on_refused=refused.append)
    before = files.newest()
    renew(authority, tls, key=False)
    assert files.newest() is before
    assert files.newest() is before  # said once
    assert len(refused) == 1
    assert "KEY_VALUES_MISMATCH" in refused[0]
    tls.authority.unlink()
    assert files.newest() is before
    assert "ca.pem" in refused[1]


def test_files_that_never_were_usable_are_an_error(issued, tmp_path):
    _, tls = issued
    other = Authority().issue(tmp_path, "other", "localhost")
    for broken in (
        TlsConfig(certificate=tls.certificate, private_key=other.private_key),
        TlsConfig(certificate=tls.certificate, private_key=tmp_path / "missing.pem"),
        TlsConfig(authority=shutil.copy(tls.private_key, tmp_path / "no-authority.pem")),
    ):
        with pytest.raises(ConfigError, match=r"tls: .*\.pem: "):
            TlsFiles(broken).newest()


SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from outrider.rpc.tls import TlsConfig
from outrider.rpc.tls import TlsFiles
certificate, private_key, authority = map(Path, sys.argv[1:])
tls = TlsConfig(certificate=certificate, private_key=private_key, authority=authority)
server = grpc.server(ThreadPoolExecutor(2))
print(server.add_secure_port("127.0.0.1:0", TlsFiles(tls).server_credentials()), flush=True)
server.start()
sys.stdin.read()
"""
PLAINTEXT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_many_failed_handshakes_at_once_end_no_server(issued):
    """Anybody could crash gRPC's core with plaintext connections when each handshake had its own configuration."""
    _, tls = issued
    files = [str(path) for path in (tls.certificate, tls.private_key, tls.authority)]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *files],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        port = int(server.stdout.readline())

        def connect(_number):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), CALL_SECONDS) as sock:
                sock.settimeout(CALL_SECONDS)
                sock.sendall(PLAINTEXT)
                sock.recv(1)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(connect, range(4000)))
        assert server.poll() is None
        server.stdin.close()
        assert server.wait(CALL_SECONDS) == 0
