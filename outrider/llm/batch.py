"""One call of `LLM.generate`: all prompts encoded, then completed, a bounded number at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from outrider.client import Client, GenerateOptions, RetryPolicy
from outrider.errors import CapacityError, InvalidRequestError, NotSupportedError, OutriderError
from outrider.llm.outputs import RequestOutput, make_output
from outrider.llm.prompts import Request, is_chat

Result = TypeVar("Result")
MakeBar = Callable[..., Any]
"""tqdm, or what takes its arguments."""
Encoded = tuple[list[int], str | None]
"""A prompt's token ids, and its text if it is known."""


class Batch:
    """Asks a router from `num_outstanding` threads: gRPC's asyncio would allow one event loop in a process, and that
    is the caller's.

    As a context manager: leaving it, by Ctrl-C too, stops whatever still runs, here and on all nodes.
    """

    def __init__(
        self, target: str, *, num_outstanding: int, max_model_len: int, decoded: MutableMapping[int, str]
    ) -> None:
        """`decoded`: texts of tokens that are known, which grows."""
        self._client = Client(target, retry=RetryPolicy())
        self._max_model_len = max_model_len
        self._decoded = decoded
        self._pool = ThreadPoolExecutor(num_outstanding, thread_name_prefix="outrider-llm")
        self._has_ended = threading.Event()

    def run(self, requests: Sequence[Request], make_bar: MakeBar) -> list[RequestOutput]:
        """In the order of `requests`. A prompt that does not fit is found before anything is generated.

        Raises: ValueError that names the prompt of a request that is refused; OutriderError.
        """
        with make_bar(total=len(requests), desc="Encoded prompts", dynamic_ncols=True, leave=False) as bar:
            encoded = self._each(requests, lambda index: self._encode(requests[index]), lambda _: bar.update())
        with make_bar(total=len(requests), desc="Processed prompts", dynamic_ncols=True) as bar:
            return self._each(
                requests, lambda index: self._complete(requests[index], *encoded[index]), _Progress(bar).add
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()  # calls in flight end, and the router aborts their requests
        self._pool.shutdown()

    def _each(
        self, requests: Sequence[Request], work: Callable[[int], Result], on_done: Callable[[Result], object]
    ) -> list[Result]:
        """By index. The first error ends it."""
        futures = {self._pool.submit(work, index): request.name for index, request in enumerate(requests)}
        for future in as_completed(futures):
            try:
                on_done(future.result())
            except (InvalidRequestError, NotSupportedError) as error:
                raise ValueError(f"{futures[future]}: {error}") from error
            except OutriderError as error:
                error.add_note(f"This was {futures[future]}.")
                raise
        return [future.result() for future in futures]

    def _encode(self, request: Request) -> Encoded:
        """Raises: InvalidRequestError for a prompt without tokens, or that leaves no room for one more."""
        content, text = request.source.content, request.source.text
        if isinstance(content, str):
            token_ids = self._when_there_is_room(self._client.tokenize, content)
        elif is_chat(content):
            is_open = request.options.get("add_generation_prompt")
            token_ids = self._when_there_is_room(self._client.tokenize, content, add_generation_prompt=is_open)
            text = self._when_there_is_room(self._client.detokenize, token_ids, skip_special_tokens=False)
        else:
            token_ids = list(cast("Sequence[int]", content))
        if not 0 < len(token_ids) < self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; the window of {self._max_model_len} has room for 1 to "
                f"{self._max_model_len - 1} and the answer",
                field="prompt",
            )
        return token_ids, text

    def _complete(self, request: Request, token_ids: list[int], text: str | None) -> RequestOutput:
        left = self._max_model_len - len(token_ids)
        options: GenerateOptions = {**request.options, "max_tokens": min(request.options.get("max_tokens", left), left)}
        result = self._when_there_is_room(self._client.complete, token_ids, **options)
        decode = self._decode if request.params.detokenize else lambda _: None
        return make_output(request, result, text=text, token_ids=token_ids, decode=decode)

    def _decode(self, token_id: int) -> str:
        if token_id not in self._decoded:
            decoded = self._when_there_is_room(self._client.detokenize, [token_id], skip_special_tokens=False)
            self._decoded[token_id] = decoded
        return self._decoded[token_id]

    def _when_there_is_room(self, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Long prompts fill the router's queues before their number does: then this waits, however long that takes."""
        while True:
            try:
                return call(*arguments, **options)
            except CapacityError as error:
                if self._has_ended.wait(error.retry_after_seconds):
                    raise


class _Progress:
    """What a bar shows besides the number of prompts: the output's speed, and acceptance if there were drafts."""

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
