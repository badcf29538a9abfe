"""Requests of every kind, and everything that their client receives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.client import Client
from outrider.errors import OutriderError

MAX_TOKENS = 800
REPETITIVE = {30: 60.0, 31: 60.0, 32: 60.0}  # repeats tokens, so that prompt lookup finds drafts

KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drafts": {"temperature": 0.9, "logit_bias": REPETITIVE, "max_tokens": 1200},
    "n = 3": {"temperature": 1.0, "n": 3, "max_tokens": 400},
    "stop string, min_tokens": {"temperature": 0.9, "stop": ["e", "Ġ", "a"], "min_tokens": 600},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "top_k": 20},
    "logprobs, echo": {"temperature": 0.7, "top_logprobs": 2, "echo": True},
    "bias, n = 3": {"logit_bias": {40: 5.0, 41: -100.0}, "n": 3, "max_tokens": 400, "top_p": 0.9},
    "greedy, drafts": {"temperature": 0.0, "logit_bias": REPETITIVE, "max_tokens": 1200},
}


class Request:
    """One stream, read in a thread. `join` returns the answer independently of its division into deltas."""

    def __init__(self, client: Client, kind: str, number: int, *, num_prompt_tokens: int = 150, **more: Any) -> None:
        """Starts a request. Equal kinds and numbers give equal requests; `more` are options that change no token."""
        self.num_tokens = 0
        self.longest_gap_seconds = 0.0
        self.attempts = 0
        self.error: OutriderError | None = None
        self._told: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._is_done = False
        self._client = client
        self._options = {"ignore_eos": True, "max_tokens": MAX_TOKENS, "seed": number, **KINDS[kind], **more}
        self._prompt = [(number * 31 + index * (13 + number % 7)) % 250 + 20 for index in range(num_prompt_tokens)]
        self._thread = threading.Thread(target=self._run, name=f"request {number}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._is_done

    def wait_for_tokens(self, num_tokens: int, *, timeout_seconds: float) -> None:
        """Waits until this many tokens have arrived. Raises AssertionError if the answer ends earlier."""
        self._wait(lambda: self.num_tokens >= num_tokens, timeout_seconds)
        assert self.num_tokens >= num_tokens, f"it ended after {self.num_tokens} tokens: {self.error}"

    def wait_for_end(self, *, timeout_seconds: float) -> None:
        """Waits until the answer ends, with or without an error."""
        self._wait(lambda: False, timeout_seconds)

    def join(self, *, timeout_seconds: float) -> dict[str, Any]:
        """Returns the answer. Raises AssertionError if it has not ended in time or ended with an error."""
        self.wait_for_end(timeout_seconds=timeout_seconds)
        assert self.error is None, f"the client was told: {self.error!r}"
        return self._told

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._is_done or condition(), timeout_seconds)
        assert is_over, f"{self.num_tokens} tokens in {timeout_seconds:g} s, then nothing"

    def _run(self) -> None:
        try:
            self._told = self._read()
        except OutriderError as error:
            self.error = error
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _read(self) -> dict[str, Any]:
        last_at = time.monotonic()
        logprobs: dict[int, list[Any]] = {}
        with self._client.generate(self._prompt, **self._options) as stream:
            for delta in stream:
                now = time.monotonic()
                with self._changed:
                    self.num_tokens += len(delta.token_ids)
                    self.longest_gap_seconds = max(self.longest_gap_seconds, now - last_at)
                    self._changed.notify_all()
                last_at = now
                logprobs.setdefault(delta.sample, []).extend(delta.logprobs)
        self.attempts = stream.summary.metrics.attempts
        samples = range(self._options.get("n", 1))
        return {
            "token ids": [stream.token_ids(sample) for sample in samples],
            "text": [stream.text(sample) for sample in samples],
            "logprobs": [logprobs.get(sample, []) for sample in samples],
            "finished": [stream.finished[sample] for sample in samples],
            "number of tokens": stream.summary.usage.num_generated_tokens,
        }
