"""An answer of ours as messages of the engine protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from outrider.answer import AnswerEvent, Delta, Finished, Started, Summary
from outrider.errors import InvalidRequestError
from outrider.request import FinishReason, TokenLogprobs
from outrider.v1 import router_pb2
from outrider.wire.request import num_samples

MAX_COMPLETE_BYTES = 4 << 20
"""Larger messages are refused by gRPC clients with default settings, tonic's among them."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 9  # with its token; a token has its own and those of its alternatives, whose lengths are as long
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


class EngineAnswer:
    """Folds an answer's events, each once and in their order.

    A stream has a chunk for each delta. At the end comes one Complete for each sample; without a stream it has all
    tokens. What is counted once for all samples (cached and draft tokens) is in the first, since clients add them up.
    """

    def __init__(self, request: router_pb2.GenerateRequest, *, is_streamed: bool, preface: Sequence[int] = ()) -> None:
        """`preface`: tokens that come before each sample's own, and are not counted."""
        self._preface = preface
        num = num_samples(request.sampling)
        self._completes = [vllm_engine_pb2.GenerateComplete(index=index) for index in range(num)]
        self._is_streamed = is_streamed
        self._stop_token_ids = frozenset(request.stop.token_ids)  # of others that end an answer, nothing is said
        self._num_prompt_tokens = 0
        num_logprobs = 2 + request.output.top_logprobs if request.output.HasField("top_logprobs") else 0
        self._max_tokens = MAX_COMPLETE_BYTES // (_TOKEN_BYTES + _LOGPROB_BYTES * num_logprobs)  # of a Complete

    def render(self, event: AnswerEvent) -> list[Any]:
        """GenerateResponses. Raises: InvalidRequestError where there is too much for a message."""
        match event:
            case Delta() if event.token_ids:
                return self._add(event)
            case Started():
                self._num_prompt_tokens = event.num_prompt_tokens
            case Finished():
                self._finish(event)
            case Summary():
                return self._conclude(event)
        return []

    def _add(self, delta: Delta) -> list[Any]:
        complete = self._completes[delta.sample]
        is_first = not complete.completion_tokens
        complete.completion_tokens += len(delta.token_ids)
        if self._is_streamed:
            messages = []
            if self._preface and is_first:
                said = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=self._preface, prompt_tokens=self._num_prompt_tokens, index=delta.sample
                )
                messages.append(vllm_engine_pb2.GenerateResponse(chunk=said))
            chunk = vllm_engine_pb2.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(delta.token_ids),
                index=delta.sample,
            )
            if delta.logprobs:
                _extend_logprobs(chunk.output_logprobs, delta.logprobs)
            return [*messages, vllm_engine_pb2.GenerateResponse(chunk=chunk)]
        complete.output_ids.extend(self._preface if is_first else ())
        complete.output_ids.extend(delta.token_ids)
        if delta.logprobs:
            _extend_logprobs(complete.output_logprobs, delta.logprobs)
        if complete.completion_tokens > self._max_tokens:  # what cannot be sent is not computed to its end
            raise InvalidRequestError(
                f"the answer has more than the {MAX_COMPLETE_BYTES} bytes of a message; stream it",
                field="stream",
                reason="ANSWER_TOO_LARGE",
            )
        return []

    def _finish(self, finished: Finished) -> None:
        complete = self._completes[finished.sample]
        complete.finish_reason = _REASONS[finished.reason]
        if finished.stop_string is not None:
            complete.matched_stop_str = finished.stop_string
        elif finished.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = finished.stop_token_id

    def _conclude(self, summary: Summary) -> list[Any]:
        speculation = summary.metrics.speculation
        first = self._completes[0]
        first.cached_tokens = summary.usage.num_cached_tokens
        first.spec_draft_tokens = speculation.num_draft_tokens
        first.spec_accepted_tokens = speculation.num_accepted_draft_tokens
        for complete in self._completes:
            complete.prompt_tokens = self._num_prompt_tokens
        return [vllm_engine_pb2.GenerateResponse(complete=complete) for complete in self._completes]


def _extend_logprobs(target: Any, logprobs: Sequence[TokenLogprobs]) -> None:
    """`target`: an OutputLogProbs."""
    target.token_logprobs.extend(value.logprob for value in logprobs)
    target.token_ids.extend(value.token_id for value in logprobs)
    target.top_logprobs.extend(_top(value) for value in logprobs)


def _top(value: TokenLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[logprob for _, logprob in value.top], token_ids=[token_id for token_id, _ in value.top]
    )
