"""Stateless, read-only pages that a service serves over HTTP next to its Prometheus metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from io import BufferedIOBase
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler

if TYPE_CHECKING:
    from socket import socket
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from typing_extensions import Buffer

METRICS_PATHS = ("/metrics", "/metrics/")
MAX_CONNECTIONS = 64
"""Maximum number of concurrent HTTP connections, from browsers and metrics scrapers."""
TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def message(cls, status: HTTPStatus, text: str) -> Page:
        return cls(f"{text}\n".encode(), TEXT, status)


FindPage = Callable[[str], Page]
"""A function that returns the page at a path, or an error page. It is called concurrently, in the threads of HTTP
connections.
"""


class _Output(BufferedIOBase):
    """Output to a client. A write timeout counts as a disconnect, which wsgiref does not log."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        try:
            self._connection.sendall(data)
        except TimeoutError as error:
            raise ConnectionAbortedError from error
        return memoryview(data).nbytes


class BoundedRequestHandler(WSGIRequestHandler):
    """Handles one HTTP request in its own thread; the timeout bounds how long a slow client can hold it."""

    timeout = 30.0

    def setup(self) -> None:
        super().setup()
        self.wfile = _Output(self.connection)

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def log_message(self, *_arguments: object) -> None:
        """Does nothing: requests are not logged."""


def bound_connections(server: Any) -> None:
    """Limits a `ThreadingMixIn` server to `MAX_CONNECTIONS` threads; further connections are closed at once."""
    slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
    start, serve = server.process_request, server.process_request_thread

    def process_request(connection: Any, address: Any) -> None:
        if not slots.acquire(blocking=False):
            connection.close()
            return
        try:
            start(connection, address)
        except BaseException:
            slots.release()
            raise

    def process_request_thread(connection: Any, address: Any) -> None:
        try:
            serve(connection, address)
        finally:
            slots.release()

    server.process_request, server.process_request_thread = process_request, process_request_thread


def with_pages(metrics: WSGIApplication, find_page: FindPage, *, is_local: bool = False) -> WSGIApplication:
    """Serves metrics at their own path, and pages at all others.

    `is_local`: only this machine reaches the port. Pages are then served only under the machine's own names and
    addresses. Without this check, a foreign site whose name resolves to loopback could make the user's browser read
    them (DNS rebinding).
    """

    def app(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] in METRICS_PATHS:
            return metrics(environ, respond)
        method = environ["REQUEST_METHOD"]
        if is_local and not _is_own_name(environ.get("HTTP_HOST", "")):
            page = Page.message(HTTPStatus.MISDIRECTED_REQUEST, "use the address, or localhost, instead of this name")
        elif method in ("GET", "HEAD"):
            page = find_page(environ["PATH_INFO"])
        else:
            page = Page.message(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        headers = [
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", "default-src 'self'"),
        ]
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        respond(f"{page.status.value} {page.status.phrase}", headers)
        return [] if method == "HEAD" else [page.body]

    return app


def _is_own_name(host: str) -> bool:
    """Returns whether a Host header is an address, localhost or empty. A browser never sends an empty header."""
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
        if not f".{name}".endswith(".localhost"):
            ip_address(name)
    except ValueError:
        return False
    return True
