"""Where the time of requests went, as a router's page tells it (`/api/requests`)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

from outrider.errors import PeerLostError

PAGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request that ended, in seconds of the router's clock, one after the other: together they are `total`."""

    prefill_node: str
    decode_node: str
    num_prompt_tokens: int
    num_chunks: int  # forward passes of the prefill node
    num_steps: int  # of the decode node
    encode: float
    queue: float
    open: float  # until the decode node has granted its place
    prefill: float  # from the call to the end of the last chunk
    transfer: float  # from there until the decode node has acknowledged the last frame of KV: what nothing hid
    commit: float  # from there to its word that all KV is there
    first_token: float  # from there
    decoding: float  # from the first token to the last
    total: float  # from arrival to the end
    age: float  # from arrival to now

    @property
    def unexplained(self) -> float:
        until_decoding = self.encode + self.queue + self.open + self.prefill + self.transfer + self.commit
        return self.total - until_decoding - self.first_token - self.decoding


def ended_serials(page: str) -> set[int]:
    """Of requests that have ended. Raises: PeerLostError."""
    return {each["serial"] for each in _get(page, "/api/requests")["requests"] if each["state"] == "finished"}


def request_times(page: str, serials: set[int]) -> Iterator[RequestTimes]:
    """Of those that were computed in one attempt by a prefill and a decode node. Raises: PeerLostError."""
    for serial in sorted(serials):
        found = _times(_get(page, f"/api/requests/{serial}"))
        if found is not None:
            yield found


def _times(request: dict[str, Any]) -> RequestTimes | None:
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in request["spans"]:
        spans.setdefault(span["kind"], []).append(span)
    steps, chunks = request["steps"], spans.get("prefill_chunk")
    if request["attempts"] != 1 or not chunks or not steps or len(spans.get("decode", ())) != 1:
        return None
    (prefill,), (decode,) = spans["prefill"], spans["decode"]
    computed_at = max(span["end"] for span in chunks)
    pushed_at = max([computed_at, *(span["end"] for span in spans.get("kv_frame", ()))])

    def seconds(kind: str) -> float:
        return sum((span["end"] - span["start"] for span in spans.get(kind, ())), 0.0)

    return RequestTimes(
        prefill_node=prefill["node"],
        decode_node=decode["node"],
        num_prompt_tokens=request["num_prompt_tokens"],
        num_chunks=len(chunks),
        num_steps=len({step["at"] for step in steps}),
        encode=seconds("encode"),
        queue=seconds("queue"),
        open=seconds("open"),
        prefill=computed_at - prefill["start"],
        transfer=pushed_at - computed_at,
        commit=decode["start"] - pushed_at,
        first_token=request["ttft_seconds"] - decode["start"],
        decoding=steps[-1]["at"] - request["ttft_seconds"],
        total=request["e2e_seconds"],
        age=request["age_seconds"],
    )


def _get(page: str, path: str) -> dict[str, Any]:
    url = f"{page if '://' in page else f'http://{page}'}".rstrip("/") + path
    try:
        with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as answer:  # noqa: S310 whose scheme the operator chose
            value: dict[str, Any] = json.load(answer)
    except (URLError, TimeoutError, ValueError) as error:
        raise PeerLostError(f"{url}: {error}") from error
    return value
