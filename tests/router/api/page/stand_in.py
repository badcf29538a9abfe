"""Serves the router's page from the source tree, and fixed JSON, with a router's headers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[4] / "router" / "api" / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class StandIn:
    """The answers of a stand-in for a router. After `num_answers` answers with JSON, it stops answering.

    `answers`: JSON by path, for example "/api/cluster".

    `user`: a script that does what a user would, in a module beside the page's own.
    """

    def __init__(self, answers: Mapping[str, Any], num_answers: int | None = None, user: str = "") -> None:
        self.answers = answers
        self.user = user
        self.num_left = num_answers
        self.asked: list[str] = []

    def reply(self, path: str) -> tuple[int, str, bytes] | None:
        """Returns (status, type, body), or None to end the connection without an answer."""
        self.asked.append(path)
        if path.startswith("/api/"):
            if self.num_left is not None:
                if self.num_left == 0:
                    return None
                self.num_left -= 1
            if path not in self.answers:
                return 404, "application/json", b'{"error": "no such request"}'
            return 200, "application/json", json.dumps(self.answers[path]).encode()
        if path == "/user.js":
            return 200, TYPES[".js"], self.user.encode()
        file = PAGE / (path.lstrip("/") or "index.html")
        if file.parent != PAGE or not file.is_file():
            return 404, "text/plain", b""
        body = file.read_bytes()
        if self.user and file.name == "index.html":
            body = body.replace(b"</head>", b'<script type="module" src="user.js"></script></head>')
        return 200, TYPES[file.suffix], body


@contextlib.contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serves in threads during the block, and yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = stand_in.reply(self.path.partition("?")[0])
            if reply is None:
                self.close_connection = True
                return
            status, content_type, body = reply
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": content_type, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
