"""One call of `LLM.generate`: encodes all prompts, then completes them, a bounded number at a time."""

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
"""tqdm, or a callable with its arguments."""


class Batch:
    """Sends requests to a router from `num_outstanding` threads: gRPC's asyncio allows one event loop per process, and
    that is the caller's.

    As a context manager it stops, on exit and on Ctrl-C, everything that still runs, here and on all nodes.
    """

    def __init__(self, target: str, *, num_outstanding: int) -> None:
        self._client = Client(target, retry=RetryPolicy())
        self._pool = ThreadPoolExecutor(num_outstanding, thread_name_prefix="outrider-llm")
        self._has_ended = threading.Event()
        self._decoded: dict[int, str] = {}  # texts of tokens, for logprobs

    def run(self, requests: Sequence[Request], make_bar: MakeBar) -> list[RequestOutput]:
        """Returns the answers in the order of `requests`. Prompts are checked for size before anything is generated.

        Raises: ValueError, naming the prompt, if a request is refused; OutriderError.
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
        """Returns the results in the requests' order. The first error ends the batch."""
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
        """Returns the request with its ids. Raises: InvalidRequestError if the prompt is empty or fills the window."""
        content, text = request.content, request.text
        if isinstance(content, str):
            token_ids = self._when_there_is_room(self._client.tokenize, content)
        elif len(content) > 0 and isinstance(content[0], ChatMessage):
            given: Mapping[str, Any] = request.options
            options = {name: given[name] for name in ChatOptions.__optional_keys__ & given.keys()}
            token_ids = self._when_there_is_room(self._client.tokenize, content, **options)
            text = self._when_there_is_room(self._client.detokenize, token_ids, skip_special_tokens=False)
        else:
            token_ids = list(cast("Sequence[int]", content))
        if not 0 < len(token_ids) < window:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; the window of {window} has room for 1 to {window - 1} and "
                "the answer",
                field="prompt",
            )
        return replace(request, content=token_ids, text=text)

    def _complete(self, request: Request, window: int) -> RequestOutput:
        left = window - len(request.content)
        options: GenerateOptions = {**request.options, "max_tokens": min(request.options.get("max_tokens", left), left)}
        result = self._when_there_is_room(self._client.complete, request.content, **options)
        decode = self._decode if request.params.detokenize else lambda _: None
        return make_output(result, request, decode)

    def _decode(self, token_id: int) -> str:
        if token_id not in self._decoded:
            text = self._when_there_is_room(self._client.detokenize, [token_id], skip_special_tokens=False)
            self._decoded[token_id] = text
        return self._decoded[token_id]

    def _when_there_is_room(self, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Retries a call while the router's queues are full, without a time limit: a few long prompts can fill them."""
        while True:
            try:
                return call(*arguments, **options)
            except CapacityError as error:
                if self._has_ended.wait(error.retry_after_seconds):
                    raise


class _Progress:
    """Adds to a progress bar the output's speed, and the acceptance if there were drafts."""

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
