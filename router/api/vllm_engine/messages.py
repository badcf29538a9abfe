"""Converts a gateway's requests to the router's own, and the router's answers to the engine's messages.

The request is then validated and served like any other. Three differences of the gateway are corrected here: it
encodes the prompts of completions without the tokenizer's special tokens, allows additional properties in the schema of
tool calls, and may mistake a constrained answer for reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from outrider.answer import AnswerEvent, Delta, Finished, Started, Summary
from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.request import FinishReason, TokenLogprobs
from outrider.service.config import NO_PARSER
from outrider.v1 import router_pb2
from outrider.wire.request import num_samples
from router.api.request_parsing import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from router.nodes.directory import ServedModel
from router.text.tokenizer import Tokenizer

COMPLETION_PREFIX = "cmpl-"
"""Prefix of a completion's request id. Nothing else tells it from a chat, since both prompts arrive as token ids."""
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
NO_REASONING = f"{OPEN_TAG}\n\n{CLOSE_TAG}\n\n"
"""The text with which templates switch reasoning off."""
TAG_PARSERS = (
    *("base", "deepseek_r1", "deepseek_v31", "glm45", "kimi_k25", "kimi_thinking"),
    *("minimax", "nano_v3", "qwen3", "qwen3_thinking", "step3"),
)
"""The gateway's reasoning parsers that look for these tags, including those that assume an open tag at the start."""

ANY_OBJECT = '{"type": "object"}'
"""The JSON schema for `json_object`."""
_COMMON_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "n", "json_schema", "regex", "grammar"),
)
"""Sampling parameters with the same meaning in both protocols. In fields without presence, zero means unset."""
_TOOL_CALLS = (
    '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":{"type":"string","enum":['
)
"""The beginning of the gateway's own schema of tool calls, for `tool_choice` "required" and similar."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_REASONING_AT_END = re.compile(f"({OPEN_TAG}\\s*)?({CLOSE_TAG}\\s*)?$")
_END_TOKENS = 32  # number of a prompt's last tokens to search for the tags; enough even if each character is a token
_UNSUPPORTED = {
    **dict.fromkeys(("mm_inputs", "extra_mm_inputs", "media_refs"), "prompts are text only"),
    **dict.fromkeys(("kv_transfer_params", "kv_transfer_params_json"), "the cluster transfers KV by itself"),
    "prompt_logprobs": "use outrider.v1.RouterService",
    "truncate_prompt_tokens": "truncate the prompt first",
    "structural_tag": "use a grammar",
}
MAX_COMPLETE_BYTES = 4 << 20
"""Maximum bytes of a message. gRPC clients with default settings, for example tonic, reject larger messages."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 9  # bytes of a logprob and its token id
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def request_from_engine(
    proto: Any, served: ServedModel, reasoning_parser: str = ""
) -> tuple[router_pb2.GenerateRequest, Sequence[int]]:
    """Returns (the router's own request, tokens to send to the gateway before each sample's own tokens).

    `proto`: a `vllm.grpc.engine.GenerateRequest`. Its values are validated later, like those of all requests.
    `reasoning_parser`: the gateway's parser, if it has one.

    Raises: InvalidRequestError for messages that are too large to copy, and for requests whose answers the gateway
    would garble; NotSupportedError for fields without a counterpart.
    """
    _check_sizes(proto, served.info)
    params = proto.sampling_params
    for message, prefix in ((proto, ""), (params, "sampling_params.")):
        for field, _ in message.ListFields():
            if field.name in _UNSUPPORTED:
                why = f"{field.name} is not supported: {_UNSUPPORTED[field.name]}"
                raise NotSupportedError(why, field=prefix + field.name)
    request = router_pb2.GenerateRequest(
        request_id=proto.request_id,
        sampling=_sampling(params),
        stop=router_pb2.StopConditions(
            strings=params.stop,
            token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        ),
        output=router_pb2.OutputOptions(
            top_logprobs=_num_logprobs(params),
            skip_special_tokens=params.skip_special_tokens,
            token_ids_only=True,  # the gateway makes the text; stop strings are matched anyway
        ),
    )
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    preface: Sequence[int] = ()
    if proto.HasField("text"):
        request.text = proto.text
        return request, ()
    if proto.request_id.startswith(COMPLETION_PREFIX):
        if params.HasField("logprobs"):
            why = "the gateway loses log-probabilities of completions: ask for them in chats, or by gRPC"
            raise InvalidRequestError(why, field="logprobs")
        before, after = served.tokenizer.special_tokens_around()
    elif (kind := request.sampling.WhichOneof("constraint")) and reasoning_parser not in ("", NO_PARSER):
        if reasoning_parser not in TAG_PARSERS:
            why = f"the reasoning parser {reasoning_parser} may mistake a constrained answer for reasoning"
            raise InvalidRequestError(f"{why}: send no constraint", field=f"sampling_params.{kind}")
        if any(stop in OPEN_TAG + CLOSE_TAG for stop in params.stop):  # gateways match stop strings in the tags, too
            why = f"a stop string is part of {OPEN_TAG}{CLOSE_TAG}, which precedes a constrained answer"
            raise InvalidRequestError(why, field="sampling_params.stop")
        after, preface = _end_reasoning(proto.tokenized.input_ids, served.tokenizer)
    for part in (before, proto.tokenized.input_ids, after):
        request.token_ids.ids.extend(part)
    return request, preface


def _end_reasoning(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns (tokens that end the prompt's reasoning, tokens that tell the gateway's parser of this end)."""
    found = _REASONING_AT_END.search(tokenizer.decode_now(token_ids[-_END_TOKENS:]))
    begun, is_closed = (found[0], bool(found[2])) if found else ("", False)
    rest = NO_REASONING.removeprefix(begun) if NO_REASONING.startswith(begun) else f"{CLOSE_TAG}\n\n"
    said = CLOSE_TAG if begun and not is_closed else OPEN_TAG + CLOSE_TAG
    return [] if is_closed else tokenizer.encode_now(rest), tokenizer.encode_now(said)


def _check_sizes(proto: Any, model: ModelInfo) -> None:
    """Checks sizes before anything is copied, because copying a million entries would block the router.

    Raises: InvalidRequestError.
    """
    params = proto.sampling_params
    for field, values, limit in (
        ("tokenized.input_ids", proto.tokenized.input_ids, model.max_model_len),
        ("sampling_params.stop", params.stop, MAX_STOP_STRINGS),
        ("sampling_params.stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS),
        ("sampling_params.logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
        ("sampling_params.choice.choices", params.choice.choices, MAX_CHOICES),
    ):
        if len(values) > limit:
            raise InvalidRequestError(f"{field} has {len(values)} entries; at most {limit} are allowed", field=field)


def _sampling(params: Any) -> router_pb2.SamplingParams:
    """Returns the sampling parameters. Raises: InvalidRequestError."""
    values = {field.name: value for field, value in params.ListFields() if field.name in _COMMON_FIELDS}
    if params.HasField("seed"):
        values["seed"] = params.seed % (1 << 64)  # the gateway's seed is int32, the router's uint64
    if params.HasField("choice"):
        values["choice"] = router_pb2.Choice(options=params.choice.choices)
    if params.json_object:
        values["json_schema"] = ANY_OBJECT
    elif params.json_schema.startswith(_TOOL_CALLS) and len(params.json_schema) <= MAX_CONSTRAINT_BYTES:
        values["json_schema"] = _closed(params.json_schema)
    if any(token_id < 0 for token_id in params.logit_bias):
        raise InvalidRequestError("token ids must not be negative", field="sampling_params.logit_bias")
    return router_pb2.SamplingParams(**values, logit_bias=dict(params.logit_bias))


def _closed(schema: str) -> str:
    """Makes a schema of tool calls reject unknown keys.

    A call may have only a name and parameters, and the parameters of a tool that declares none must be empty.

    Raises: InvalidRequestError.
    """
    try:
        calls = json.loads(schema)
        for call in calls["items"]["anyOf"]:
            call["additionalProperties"] = False
            call["properties"]["parameters"] = call["properties"]["parameters"] or _NO_PARAMETERS
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"json_schema is not a valid schema of tool calls: {error}"
        raise InvalidRequestError(message, field="sampling_params.json_schema") from error
    return json.dumps(calls)


def _num_logprobs(params: Any) -> int | None:
    """Returns the number of alternatives wanted. Raises: InvalidRequestError for -1, which means all."""
    if not params.HasField("logprobs"):
        return None
    number: int = params.logprobs
    if number < 0:
        raise InvalidRequestError(f"logprobs must be at least 0, not {number}", field="sampling_params.logprobs")
    return number


class EngineAnswer:
    """Converts an answer's events to the engine's messages. It takes each event once, in order.

    A streamed answer has a chunk for each Delta and ends with one Complete per sample. In an answer that is not
    streamed, the Completes have all tokens. Only the first Complete has the totals over all samples (cached and draft
    tokens), since clients add up the values of all Completes.
    """

    def __init__(self, request: router_pb2.GenerateRequest, *, is_streamed: bool, preface: Sequence[int] = ()) -> None:
        """`preface`: tokens to send before each sample's own tokens, which alone are counted."""
        self._preface = preface
        num = num_samples(request.sampling)
        self._completes = [vllm_engine_pb2.GenerateComplete(index=index) for index in range(num)]
        self._is_streamed = is_streamed
        self._stop_token_ids = frozenset(request.stop.token_ids)  # other tokens that end an answer are not reported
        self._num_prompt_tokens = 0
        # Counts the token's own logprob, its alternatives, and one more to allow for the bytes of length prefixes.
        num_logprobs = 2 + request.output.top_logprobs if request.output.HasField("top_logprobs") else 0
        self._max_tokens = MAX_COMPLETE_BYTES // (_TOKEN_BYTES + _LOGPROB_BYTES * num_logprobs)  # per Complete

    def render(self, event: AnswerEvent) -> list[Any]:
        """Returns GenerateResponses. Raises: InvalidRequestError if the answer is too large for a message."""
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
        if complete.completion_tokens > self._max_tokens:  # computing the rest would be in vain
            raise InvalidRequestError(
                f"the answer exceeds the message limit of {MAX_COMPLETE_BYTES} bytes; stream it",
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
    """Appends logprobs to `target`, an OutputLogProbs."""
    target.token_logprobs.extend(value.logprob for value in logprobs)
    target.token_ids.extend(value.token_id for value in logprobs)
    target.top_logprobs.extend(_top(value) for value in logprobs)


def _top(value: TokenLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[logprob for _, logprob in value.top], token_ids=[token_id for token_id, _ in value.top]
    )
