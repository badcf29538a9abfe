"""Runs one call of `LLM.generate`: encodes all prompts, then completes them, a limited number at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Self, TypeVar, cast

from outrider.client import ChatMessage, ChatOptions, Client, GenerateOptions, RetryPolicy
from outrider.errors import CapacityError, InvalidRequestError, NotSupportedError, OutriderError
from outrider.llm.outputs import RequestOutput, make_output
from outrider.llm.prompts import Request

Result = TypeVar("Result")
MakeBar = Callable[..., Any]
"""The type of `tqdm`, or of a callable with the same arguments."""


class Batch:
    """Sends requests to a router from `num_outstanding` threads. gRPC's asyncio is not used, because it allows only one
    event loop per process, which the caller may need.

    As a context manager it stops all requests that still run, here and on all nodes, on exit and on Ctrl-C.
    """

    def __init__(self, target: str, *, num_outstanding: int) -> None:
        self._client = Client(target, retry=RetryPolicy())
        self._pool = ThreadPoolExecutor(num_outstanding, thread_name_prefix="outrider-llm")
        self._has_ended = threading.Event()
        self._decoded: dict[int, str] = {}  # text by token id, for logprobs

    def run(self, requests: Sequence[Request], make_bar: MakeBar) -> list[RequestOutput]:
        """Returns the answers in the order of `requests`. The size of all prompts is checked before generation.

        Raises: ValueError that names the prompt if a request is refused; OutriderError.
        """
        window = self._client.model().max_model_len
        with make_bar(total=len(requests), desc="Encoded prompts", dynamic_ncols=True, leave=False) as bar:
            requests = self._each(requests, lambda request: self._encode(request, window), lambda _: bar.update())
        with make_bar(total=len(requests), desc="Processed prompts", dynamic_ncols=True) as bar:
            return self._each(requests, lambda request: self._complete(request, window), _Progress(bar).add)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._has_ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()  # calls in flight end, and the router aborts their requests
        self._pool.shutdown()

    def _each(
        self, requests: Sequence[Request], work: Callable[[Request], Result], on_done: Callable[[Result], object]
    ) -> list[Result]:
        """Calls `work` for each request in threads. Returns the results in order. The first error ends the batch."""
        futures = {self._pool.submit(work, request): request.name for request in requests}
        for future in as_completed(futures):
            try:
                on_done(future.result())
            except (InvalidRequestError, NotSupportedError) as error:
                raise ValueError(f"{futures[future]}: {error}") from error
            except OutriderError as error:
                error.add_note(f"This was {futures[future]}.")
                raise
        return [future.result() for future in futures]

    def _encode(self, request: Request, window: int) -> Request:
        """Encodes the prompt. Raises: InvalidRequestError if it is empty or fills the window."""
        content, text = request.content, request.text
        if isinstance(content, str):
            token_ids = self._retry_while_full(self._client.tokenize, content)
        elif len(content) > 0 and isinstance(content[0], ChatMessage):
            given: Mapping[str, Any] = request.options
            options = {name: given[name] for name in ChatOptions.__optional_keys__ & given.keys()}
            token_ids = self._retry_while_full(self._client.tokenize, content, **options)
            text = self._retry_while_full(self._client.detokenize, token_ids, skip_special_tokens=False)
        else:
            token_ids = list(cast("Sequence[int]", content))
        if not 0 < len(token_ids) < window:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; a window of {window} allows 1 to {window - 1}, to leave room "
                "for the answer",
                field="prompt",
            )
        return replace(request, content=token_ids, text=text)

    def _complete(self, request: Request, window: int) -> RequestOutput:
        left = window - len(request.content)
        options: GenerateOptions = {**request.options, "max_tokens": min(request.options.get("max_tokens", left), left)}
        result = self._retry_while_full(self._client.complete, request.content, **options)
        decode = self._decode if request.params.detokenize else lambda _: None
        return make_output(result, request, decode)

    def _decode(self, token_id: int) -> str:
        if token_id not in self._decoded:
            text = self._retry_while_full(self._client.detokenize, [token_id], skip_special_tokens=False)
            self._decoded[token_id] = text
        return self._decoded[token_id]

    def _retry_while_full(self, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Repeats a call without a time limit while the router's queues are full. A few long prompts can fill them."""
        while True:
            try:
                return call(*arguments, **options)
            except CapacityError as error:
                if self._has_ended.wait(error.retry_after_seconds):
                    raise


class _Progress:
    """Updates a progress bar with the speed of the output and, with drafts, the mean acceptance length."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._started_at = time.monotonic()
        self._num_tokens = self._num_spec_steps = self._num_accepted = 0

    def add(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._num_spec_steps += output.metrics.speculation.num_spec_steps
        self._num_accepted += output.metrics.speculation.num_accepted_draft_tokens
        shown = f"{self._num_tokens / max(time.monotonic() - self._started_at, 1e-9):.1f} tokens/s"
        if self._num_spec_steps:
            shown += f", mean acceptance length {1 + self._num_accepted / self._num_spec_steps:.2f}"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()
