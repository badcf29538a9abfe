"""Pages that are served next to the metrics: methods, headers, and metrics that do not change."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from http import HTTPStatus
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app

from outrider.service import pages
from outrider.service.config import ServerConfig
from outrider.service.pages import BoundedRequestHandler, Page, with_pages
from outrider.service.server import serve_metrics
from tests.support.waiting import PATIENCE_SECONDS, wait_for

HELLO = Page("hé".encode(), "text/html; charset=utf-8")


@pytest.fixture
def metrics():
    registry = CollectorRegistry()
    Counter("outrider:things", "Some things.", registry=registry).inc()
    return make_wsgi_app(registry)


@pytest.fixture
def app(metrics):
    pages = {"/": HELLO}
    return with_pages(metrics, lambda path: pages.get(path, Page.message(HTTPStatus.NOT_FOUND, f"no {path[:9]}")))


def ask(app, path, method="GET", **environ):
    """Returns (status line, headers in order, body)."""
    asked = {"PATH_INFO": path, "REQUEST_METHOD": method, "wsgi.input": io.BytesIO(), **environ}
    setup_testing_defaults(asked)
    told = []
    body = b"".join(app(asked, lambda status, headers: told.append((status, headers))))
    ((status, headers),) = told
    return status, headers, body


@pytest.mark.parametrize("query", ["", "name[]=outrider:things_total", "name[]=none"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_metrics_are_byte_for_byte_what_they_are_without_pages(app, metrics, query, method, encoding):
    environ = {"QUERY_STRING": query, "HTTP_ACCEPT_ENCODING": encoding}
    alone = ask(metrics, "/metrics", method, **environ)
    assert ask(app, "/metrics", method, **environ) == alone
    assert (b"outrider:things" in alone[2]) == (method == "GET" and query != "name[]=none" and not encoding)


def test_a_page_comes_with_what_a_browser_may_do_with_it(app):
    status, headers, body = ask(app, "/")
    assert (status, body) == ("200 OK", HELLO.body)
    assert dict(headers) == {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Length": "3",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'self'",
    }
    assert ask(app, "/", "HEAD") == (status, headers, b"")


def test_what_is_not_there_is_not_found(app):
    status, headers, body = ask(app, "/nowhere")
    assert (status, body) == ("404 Not Found", b"no /nowhere\n")
    assert dict(headers)["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_pages_are_only_read(app, method):
    for path in ("/", "/nowhere"):
        status, headers, body = ask(app, path, method)
        assert (status, dict(headers)["Allow"]) == ("405 Method Not Allowed", "GET, HEAD")
        assert body


OWN_NAMES = ("", "localhost", "localhost:9090", "router.localhost", "127.0.0.1:9090", "[::1]:9090", "192.168.0.7")


@pytest.mark.parametrize(
    ("names", "status"),
    [(OWN_NAMES, 200), (("evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "a@b"), 421)],
)
def test_a_page_on_loopback_is_not_shown_under_the_name_of_another_site(metrics, names, status):
    local = with_pages(metrics, lambda _path: HELLO, is_local=True)
    elsewhere = with_pages(metrics, lambda _path: HELLO)
    for name in names:
        assert ask(local, "/", HTTP_HOST=name)[0].startswith(str(status)), name
        assert ask(elsewhere, "/", HTTP_HOST=name)[0] == "200 OK"
        assert ask(local, "/metrics", HTTP_HOST=name) == ask(metrics, "/metrics")


@pytest.mark.parametrize("said", [b"GET /metr", b"GET / HTTP/1.0\r\n\r\n"], ids=["asks", "reads"])
def test_who_is_slow_holds_no_thread_for_ever(monkeypatch, capfd, said):
    monkeypatch.setattr(BoundedRequestHandler, "timeout", 0.05)
    page = Page(bytes(30_000_000), "text/plain")  # more than a socket takes at once
    server = serve_metrics(
        ServerConfig(metrics_port=0), registry=CollectorRegistry(), find_page=lambda _path: waited.set() or page
    )
    waited = threading.Event()
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(said)
            assert waited.wait(PATIENCE_SECONDS) if b"\n" in said else connection.recv(1) == b""
            wait_for(lambda: not [each for each in threading.enumerate() if "process_request" in each.name])
    finally:
        server.shutdown()
        server.server_close()
    assert capfd.readouterr() == ("", "")


def test_who_opens_connections_without_end_gets_no_threads_without_end(monkeypatch):
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 4)
    server = serve_metrics(ServerConfig(metrics_port=0), registry=CollectorRegistry())
    address = ("127.0.0.1", server.server_port)

    def num_threads():
        return len([each for each in threading.enumerate() if "process_request" in each.name])

    with contextlib.ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        held = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE_SECONDS)) for _ in range(4)]
        wait_for(lambda: num_threads() == 4)
        for _ in range(8):
            with socket.create_connection(address, timeout=PATIENCE_SECONDS) as refused:
                assert refused.recv(1) == b""
        assert num_threads() == 4
        held[0].close()
        wait_for(lambda: num_threads() == 3)
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.0 200 OK"
