"""Time spent by requests, from a router's page (`/api/requests`)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError

from outrider.cli.printable import printable
from outrider.errors import PeerLostError

PAGE_SECONDS = 10.0
MAX_PAGE_BYTES = 32 << 20
ENDED = "finished"
BEFORE_PREFILL = ("encode", "queue", "open")
MAX_NUMBER = 1e9
"""Upper limit for seconds and tokens: no request reaches it, and sums of numbers below it are finite."""

T = TypeVar("T")


RequestTimes = Mapping[str, Any]
"""A finished request's nodes, counts and durations, in seconds of the router's clock. The durations from `encode` to
`decoding` are listed in chronological order.
"""


def ended_serials(page: str) -> set[int]:
    """Returns the serials of finished requests. Raises: PeerLostError."""
    return _get(page, "", lambda found: {int(one["serial"]) for one in found["requests"] if one["state"] == ENDED})


def request_times(page: str, serials: set[int]) -> Iterator[RequestTimes]:
    """Yields the times of requests that a prefill node and a decode node computed in one attempt.

    Requests whose times the page does not have completely are left out.

    Raises: PeerLostError.
    """
    return filter(None, (_get(page, f"/{serial}", _times) for serial in sorted(serials)))


def _times(request: Any) -> RequestTimes | None:
    """Returns the times, or None if they are incomplete. `request` is None if the page no longer has it.

    Raises: ValueError, TypeError, KeyError or IndexError if the request does not have the expected form.
    """
    if request is None or request["attempts"] != 1 or request["num_dropped_steps"]:
        return None
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in request["spans"]:
        if span["end"] is None:
            return None
        spans.setdefault(span["kind"], []).append(span)
    prefills, chunks, decodes = (spans.get(kind, ()) for kind in ("prefill", "prefill_chunk", "decode"))
    if not (len(prefills) == len(decodes) == 1 and chunks and request["steps"]):
        return None
    computed_at = max(span["end"] for span in chunks)
    pushed_at = max([computed_at, *(span["end"] for span in spans.get("kv_frame", ()))])
    decoding_at, first_token_at = decodes[0]["start"], request["ttft_seconds"]
    numbers: dict[str, Any] = {
        "num_prompt_tokens": request["num_prompt_tokens"],
        "num_chunks": len(chunks),  # forward passes of the prefill node
        "num_steps": len({step["at"] for step in request["steps"]}),  # steps of the decode node
        **{kind: sum(span["end"] - span["start"] for span in spans.get(kind, ())) for kind in BEFORE_PREFILL},
        "prefill": computed_at - prefills[0]["start"],  # from the call to the end of the last chunk
        "transfer": pushed_at - computed_at,  # from then on until the decode node has acknowledged the last KV frame
        "commit": decoding_at - pushed_at,  # from then on until the decode node reports that all KV has arrived
        "first_token": first_token_at - decoding_at,
        "decoding": request["steps"][-1]["at"] - first_token_at,  # from the first token to the last
        "total": request["e2e_seconds"],
        "age": request["age_seconds"],  # from arrival to now
    }
    if not all(abs(number) <= MAX_NUMBER for number in numbers.values()):  # NaN fails as well
        raise ValueError(f"no times of a request: {numbers}")
    return {"prefill_node": str(prefills[0]["node"]), "decode_node": str(decodes[0]["node"]), **numbers}


def _get(page: str, path: str, parse: Callable[[Any], T]) -> T:
    """Returns `parse` of the JSON at this path, or `parse(None)` if there is no such path. Raises: PeerLostError."""
    url = f"{page if '://' in page else f'http://{page}'}".rstrip("/") + "/api/requests" + path
    try:
        try:
            with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as answer:  # noqa: S310 the operator chose it
                found = json.loads(answer.read(MAX_PAGE_BYTES))
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            found = None
        return parse(found)
    except (OSError, HTTPException) as error:
        raise PeerLostError(printable(f"{url}: {error}")) from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PeerLostError(printable(f"{url} has no figures of requests: {error!r}")) from error
