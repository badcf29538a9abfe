"""The results of `LLM.generate`, with vLLM's names. They are mutable, because the caller owns them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from outrider.answer import CompleteResult, Completion, RequestMetrics
from outrider.llm.prompts import Request
from outrider.llm.sampling_params import SamplingParams
from outrider.request import FinishReason, TokenLogprobs

Decode = Callable[[int], str | None]
"""A function that returns the text of a token, or None if `detokenize` is false."""


@dataclass(slots=True)
class Logprob:
    logprob: float  # natural logarithm
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None  # None if `detokenize` is false


LogprobsTable = list[dict[int, Logprob] | None]
"""For each position, logprobs by token id: of the token itself, then of the most likely ones. A prompt's first entry is
None."""


@dataclass(slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless logprobs were requested
    logprobs: LogprobsTable | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop string or stop token; None for the model's own end-of-text


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None  # None if the caller gave token ids without a text
    prompt_token_ids: list[int]
    prompt_logprobs: LogprobsTable | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics  # times and speculation (see router.proto), with other names than vLLM's
    num_cached_tokens: int


def make_output(result: CompleteResult, request: Request, decode: Decode) -> RequestOutput:
    """Makes the output from the router's answer to an encoded request."""
    params = request.params
    return RequestOutput(
        request_id=result.request_id,
        prompt=request.text,
        prompt_token_ids=cast("list[int]", request.content),
        prompt_logprobs=None if params.prompt_logprobs is None else _table(result.started.prompt_logprobs, decode),
        outputs=[_completion(index, sample, params, decode) for index, sample in enumerate(result.completions)],
        finished=True,
        metrics=result.summary.metrics,
        num_cached_tokens=result.summary.usage.num_cached_tokens,
    )


def _completion(index: int, sample: Completion, params: SamplingParams, decode: Decode) -> CompletionOutput:
    finished, has_logprobs = sample.finished, params.logprobs is not None
    stop_token_id = finished.stop_token_id if finished.stop_token_id in (params.stop_token_ids or ()) else None
    return CompletionOutput(
        index=index,
        text=sample.text,
        token_ids=list(sample.token_ids),
        cumulative_logprob=sum(entry.logprob for entry in sample.logprobs) if has_logprobs else None,
        logprobs=_table(sample.logprobs, decode) if has_logprobs else None,
        finish_reason="abort" if finished.reason is FinishReason.ABORTED else finished.reason.value,
        stop_reason=stop_token_id if finished.stop_string is None else finished.stop_string,
    )


def _table(entries: Iterable[TokenLogprobs], decode: Decode) -> LogprobsTable:
    return [None if math.isnan(entry.logprob) else _alternatives(entry, decode) for entry in entries]


def _alternatives(entry: TokenLogprobs, decode: Decode) -> dict[int, Logprob]:
    table = {entry.token_id: Logprob(entry.logprob, entry.rank, decode(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        table.setdefault(token_id, Logprob(logprob, rank, decode(token_id)))
    return table
