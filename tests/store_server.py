"""A real server of Valkey's protocol, as a process of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from outrider.rpc.credentials import TlsConfig

WAIT_SECONDS = 60.0
STORE_PATIENCE = "router.store_timeout_seconds=30"
"""Of routers whose store answers: a busy machine may take its time. One that is dead refuses connections at once."""
PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
MISSING = "neither valkey-server nor redis-server is on the path (Debian: apt-get install redis-server)"


class StoreServer:
    """As a context manager: it runs, empty and with nothing on disk, until the block ends."""

    def __init__(self, directory: Path, *arguments: str, tls: TlsConfig | None = None) -> None:
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            self.port = chosen.getsockname()[1]
        self.url = f"valkey{'s' if tls else ''}://127.0.0.1:{self.port}"
        port = ["--port", str(self.port)]
        if tls is not None:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            port += ["--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.private_key)]
            port += ["--tls-ca-cert-file", str(tls.certificate)]
        self._log = directory / "store.log"
        self._command = [
            *(PROGRAM, "--bind", "127.0.0.1", *port, "--dir", str(directory)),
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
