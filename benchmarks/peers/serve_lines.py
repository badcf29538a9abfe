"""The protocol of asking.LineServer, from the side of a server: prompts and tokens as JSON objects, one a line."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

_SAYING = threading.Lock()

Inbox = queue.SimpleQueue[tuple[int, list[int]] | None]
"""Prompts that were not taken yet, each as (id, token ids). None comes last."""


def arguments_parser() -> argparse.ArgumentParser:
    """Returns a parser of what every such server is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--slots", type=int, help="answers at a time")
    parser.add_argument("--context", type=int, help="tokens of all slots together")
    return parser


def asked() -> Iterator[tuple[int, list[int]]]:
    """Yields (id, token ids) of each prompt, until standard input ends."""
    for line in sys.stdin:
        value = json.loads(line)
        yield value["id"], value["prompt"]


def inbox_of_prompts() -> Inbox:
    """Returns a queue that a thread fills with what `asked` yields, and then None."""
    inbox: Inbox = queue.SimpleQueue()

    def read() -> None:
        for prompt in asked():
            inbox.put(prompt)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    return inbox


def say(**fields: Any) -> None:
    """Writes one line: `ready`, or the `id` of a prompt with new `tokens`, `done` or an `error`. Thread-safe."""
    with _SAYING:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
