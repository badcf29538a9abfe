"""Clients that repeat one request each while pods are replaced, and compare every answer with the first."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from outrider.errors import OutriderError

ANSWER_SECONDS = 240.0

Ask = Callable[[], Any]
"""A function that sends one request and returns the answer, or raises if there is none."""


class Load:
    """Repeats each request in its own thread. `num_answers` and `faults` hold the results."""

    def __init__(self, questions: dict[Hashable, Ask]) -> None:
        """Sends each request once. All later answers must equal this first one."""
        self._questions = questions
        self._expected = {name: ask() for name, ask in questions.items()}
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self.num_answers: Counter[Hashable] = Counter()
        self.faults: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sends requests until the block ends, then waits for the last answers."""
        threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in self._questions]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(ANSWER_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "an answer has not come"

    def wait_for_more(self) -> None:
        """Waits until every request has been answered once more, or until a fault."""
        before = self.num_answers.copy()
        with self._changed:
            self._changed.wait_for(
                lambda: self.faults or all(self.num_answers[name] > before[name] for name in self._questions),
                ANSWER_SECONDS,
            )

    def _run(self, name: Hashable) -> None:
        for number in itertools.count():
            if self._is_over.is_set():
                return
            fault = ""
            try:
                if self._questions[name]() != self._expected[name]:
                    fault = "another answer"
            except (AssertionError, OutriderError, OSError, http.client.HTTPException) as error:
                detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                fault = f"{error!r} {detail}"
            with self._changed:
                self.num_answers[name] += not fault
                self.faults += [f"{name}, {number}: {fault}"] if fault else []
                self._changed.notify_all()


def ask_chat(address: str, model: str, *, seed: int, max_tokens: int) -> str:
    """Sends one chat to the OpenAI gateway at this address, on a new connection, since a Service distributes
    connections.
    """
    fields = {
        "seed": seed,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "hello"}],
    }
    url, headers = f"http://{address}:8000/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"model": model, **fields}).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
