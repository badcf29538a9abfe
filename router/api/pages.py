"""The router's page on its metrics port, and the records and cluster figures behind it as JSON.

The event loop copies the data, one short call at a time; HTTP threads turn the copies into JSON.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from outrider import __version__
from outrider.node import NodeStatus
from outrider.service.pages import Page
from outrider.wire.cluster import LOAD_FIGURES
from router.api.registry import RequestRegistry
from router.nodes.directory import NodeDirectory
from router.nodes.link import NodeLink
from router.observe.record import RequestRecord
from router.observe.records import Records
from router.observe.spans import Span, Step

LOOP_SECONDS = 2.0
"""Seconds that an HTTP thread waits for its turn, and then for the event loop to make a copy."""
MAX_SERIAL_DIGITS = 18
JSON = "application/json"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
RECORD_FIGURES = (
    *("serial", "request_id", "state", "nodes", "error"),
    *("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_samples"),
)
NOT_FOUND_PAGE = Page.message(
    HTTPStatus.NOT_FOUND,
    "not found; there are / (the page), /metrics (for Prometheus), and /api/cluster, /api/requests and "
    "/api/requests/N (JSON)",
)

T = TypeVar("T")
TokenText = Callable[[int], str]
"""A function that returns one token's text, decoded alone."""


class RouterPages:
    """Finds pages by path (`outrider.service.pages.FindPage`). Makes one copy at a time, for any number of clients."""

    def __init__(
        self,
        requests: RequestRegistry,
        nodes: NodeDirectory,
        records: Records,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._registry = requests
        self._nodes = nodes
        self._records = records
        self._loop = loop
        self._started_at = time.monotonic()
        self._turn = threading.Lock()
        self._files = {
            f"/{path.name}": Page(path.read_bytes(), CONTENT_TYPES[path.suffix])
            for path in (Path(__file__).parent / "page").iterdir()
            if path.suffix in CONTENT_TYPES
        }

    def __call__(self, path: str) -> Page:
        serial = path.removeprefix("/api/requests/")
        try:
            if path == "/":
                return self._files["/index.html"]
            if path in self._files:
                return self._files[path]
            if path == "/api/cluster":
                return Page(json.dumps(self._on_loop(self._cluster)).encode(), JSON)
            if path == "/api/requests":
                return Page(_object({}, requests=self._on_loop(self._requests)), JSON)
            if path.startswith("/api/requests/") and serial.isascii() and serial.isdecimal():
                return self._request(serial)
        except TimeoutError:
            message = f"the router did not answer within {LOOP_SECONDS:g} s, because its event loop is busy"
            return Page.message(HTTPStatus.SERVICE_UNAVAILABLE, message)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return Page.message(HTTPStatus.SERVICE_UNAVAILABLE, "the router has stopped")
        return NOT_FOUND_PAGE

    def _on_loop(self, copy: Callable[[], T]) -> T:
        """Calls `copy` on the event loop and returns its result.

        Raises: TimeoutError; RuntimeError if the event loop is closed; any error of `copy`.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():  # otherwise the caller has given up
                try:
                    future.set_result(copy())
                except Exception as error:  # noqa: BLE001 raised in the caller
                    future.set_exception(error)

        if not self._turn.acquire(timeout=LOOP_SECONDS):
            raise TimeoutError
        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(LOOP_SECONDS)
        finally:
            future.cancel()
            self._turn.release()

    def _request(self, serial: str) -> Page:
        found = self._on_loop(partial(self._copy, int(serial))) if len(serial) <= MAX_SERIAL_DIGITS else None
        if found is None:
            message = f"request {serial[:MAX_SERIAL_DIGITS]} is unknown, or its record was evicted"
            return Page.message(HTTPStatus.NOT_FOUND, message)
        fields, lists = found
        return Page(_object(fields, **lists), JSON)

    # ------------------------------------------------------------ on the event loop

    def _requests(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [_summary_json(record, now) for record in self._records]

    def _copy(self, serial: int) -> tuple[dict[str, Any], dict[str, Iterable[Any]]] | None:
        """Returns a record as (single values, lists). Steps are converted only during iteration, which is slow."""
        record = self._records.find(serial)
        if record is None:
            return None
        arrived_at = record.arrived_at
        to_json = partial(_step_json, arrived_at=arrived_at, text=self._token_text())
        lists: dict[str, Iterable[Any]] = {
            "spans": [_span_json(span, arrived_at) for span in record.spans],
            "steps": map(to_json, tuple(record.steps)),
            "moves": [move._asdict() | {"at": round(move.at - arrived_at, 6)} for move in record.moves],
        }
        return _summary_json(record, time.monotonic()) | {"num_dropped_steps": record.num_dropped_steps}, lists

    def _token_text(self) -> TokenText | None:
        served = self._nodes.served
        return served.tokenizer.token_text if self._records.records_tokens and served is not None else None

    def _cluster(self) -> dict[str, Any]:
        cluster, served = self._registry.cluster_status(), self._nodes.served
        decode_numerics = {link.numerics for link in self._nodes.decode_nodes if link.numerics}
        return {
            "version": __version__,
            "model": "" if served is None else served.info.name,
            "numerics": ", ".join(sorted(decode_numerics)),
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            **{field.name: getattr(cluster, field.name) for field in fields(cluster)},
            "nodes": [_node_json(status, self._nodes.link_of(status)) for status in cluster.nodes],
        }


def _node_json(status: NodeStatus, link: NodeLink | None) -> dict[str, Any]:
    """Returns a node's status. `link` is None for a target that resolves to no address."""
    info = None if link is None else link.info
    return {
        "name": status.name,
        "role": "" if status.role is None else status.role.name.lower(),
        "state": "" if status.state is None else status.state.name.lower(),
        "target": status.target,
        "step": status.step,
        **{name: getattr(status.load, name) for name in LOAD_FIGURES},
        "numerics": "" if link is None else link.numerics,
        "version": "" if info is None else info.version,
        "is_late": link is not None and link.is_late,
        "error": status.condition,
    }


def _object(fields: Mapping[str, Any], **lists: Iterable[Any]) -> bytes:
    """Returns a JSON object, encoded list entry by list entry, because the encoder holds the interpreter lock."""
    parts = [json.dumps(fields)[1:-1]] if fields else []
    parts += [f'"{name}": [{", ".join(map(json.dumps, entries))}]' for name, entries in lists.items()]
    return f"{{{', '.join(parts)}}}".encode()


# ------------------------------------------------------------ times are in seconds since arrival; null means unknown


def _summary_json(record: RequestRecord, now: float) -> dict[str, Any]:
    """Returns a record's summary. `now`: monotonic seconds."""

    def since_arrival(at: float | None) -> float | None:
        return None if at is None else round(at - record.arrived_at, 6)

    return {
        **{name: getattr(record, name) for name in RECORD_FIGURES},
        "age_seconds": since_arrival(now),
        "queue_seconds": since_arrival(record.admitted_at),
        "ttft_seconds": since_arrival(record.first_token_at),
        "e2e_seconds": since_arrival(record.ended_at),
        "attempts": 1 + record.num_moves,
        "mean_acceptance_length": round(record.speculation.metrics().mean_acceptance_length, 3),
    }


def _span_json(span: Span, arrived_at: float) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "attempt": span.attempt,
        "node": span.node,
        "start": round(span.start - arrived_at, 6),
        "end": None if span.end is None else round(span.end - arrived_at, 6),
        "num_tokens": span.num_tokens,
        "bytes": span.num_bytes,
        "detail": span.detail,
    }


def _step_json(step: Step, arrived_at: float, text: TokenText | None) -> dict[str, Any]:
    """Returns a step. `text`: None if text must not be shown."""
    values = step._asdict() | {"at": round(step.at - arrived_at, 6)}
    shown = {"tokens": values.pop("token_ids"), "rejected": values.pop("rejected_token_ids")}
    return values if text is None else values | {name: list(map(text, ids)) for name, ids in shown.items()}
