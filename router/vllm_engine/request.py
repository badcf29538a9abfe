"""A request of the engine protocol as one of our own, which the router then checks and serves like any other.

What the gateway does otherwise than our own service is put right here: it encodes the prompts of completions without
the tokenizer's special tokens, leaves the schema of tool calls open, and may take a constrained answer for a thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.service.gateway_config import NO_PARSER
from outrider.v1 import router_pb2
from router.node_directory import ServedModel
from router.tokenizer import Tokenizer
from router.validation import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)

COMPLETION_PREFIX = "cmpl-"
"""Of a completion's id, by which alone it is told from a chat's. The prompt of either comes as token ids."""
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
NO_THOUGHT = f"{OPEN_TAG}\n\n{CLOSE_TAG}\n\n"
"""What templates write where a model is not to think."""
TAG_PARSERS = (
    *("base", "deepseek_r1", "deepseek_v31", "glm45", "kimi_k25", "kimi_thinking"),
    *("minimax", "nano_v3", "qwen3", "qwen3_thinking", "step3"),
)
"""Reasoning parsers of the gateway that look for these tags, whether they begin inside a thought or not."""

ANY_OBJECT = '{"type": "object"}'
"""The schema of `json_object`."""
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "n", "json_schema", "regex", "grammar"),
)
"""Sampling parameters that mean the same on both sides. Zero, where it cannot be told from nothing, is nothing."""
_TOOL_CALLS = (
    '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":{"type":"string","enum":['
)
"""How the gateway's own schema of tool calls begins, for `tool_choice` "required" and the like."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_THOUGHT_AT_END = re.compile(f"({OPEN_TAG}\\s*)?({CLOSE_TAG}\\s*)?$")
_END_TOKENS = 32  # in which the tags are, even where each of their characters is a token
_UNSUPPORTED = {
    **dict.fromkeys(("mm_inputs", "extra_mm_inputs", "media_refs"), "prompts are text"),
    **dict.fromkeys(("kv_transfer_params", "kv_transfer_params_json"), "KV is the cluster's own"),
    "prompt_logprobs": "they are had by our own service",
    "truncate_prompt_tokens": "prompts are not truncated",
    "structural_tag": "structural tags are not known",
}


def request_from_engine(
    proto: Any, served: ServedModel, reasoning_parser: str = ""
) -> tuple[router_pb2.GenerateRequest, Sequence[int]]:
    """(our own request, tokens that the gateway gets before each sample's own).

    `proto`: a `vllm.grpc.engine.GenerateRequest`. Values are checked later, with all of our requests.
    `reasoning_parser`: the gateway's, if it has one. Raises: InvalidRequestError for what is too much to be copied, and
    for what the gateway would lose or mistake; NotSupportedError for what ours has no place for.
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
            token_ids_only=True,  # the text is the gateway's; stop strings are looked for all the same
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
            why = "log-probabilities of completions are lost in the gateway: ask for them in chats, or by gRPC"
            raise InvalidRequestError(why, field="logprobs")
        before, after = served.tokenizer.added_around()
    elif (kind := request.sampling.WhichOneof("constraint")) and reasoning_parser not in ("", NO_PARSER):
        if reasoning_parser not in TAG_PARSERS:
            why = f"the reasoning parser {reasoning_parser} may take a constrained answer for a thought"
            raise InvalidRequestError(f"{why}: ask without the constraint", field=f"sampling_params.{kind}")
        if any(stop in OPEN_TAG + CLOSE_TAG for stop in params.stop):  # the gateway looks for them there too
            why = f"a part of {OPEN_TAG}{CLOSE_TAG}, which comes before a constrained answer, ends it"
            raise InvalidRequestError(why, field="sampling_params.stop")
        after, preface = _without_thought(proto.tokenized.input_ids, served.tokenizer)
    for part in (before, proto.tokenized.input_ids, after):
        request.token_ids.ids.extend(part)
    return request, preface


def _without_thought(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(what ends a prompt so that the answer begins at once, what tells every parser that it does)"""
    found = _THOUGHT_AT_END.search(tokenizer.decode_now(token_ids[-_END_TOKENS:]))
    begun, is_closed = (found[0], bool(found[2])) if found else ("", False)
    rest = NO_THOUGHT.removeprefix(begun) if NO_THOUGHT.startswith(begun) else f"{CLOSE_TAG}\n\n"
    said = CLOSE_TAG if begun and not is_closed else OPEN_TAG + CLOSE_TAG
    return [] if is_closed else tokenizer.encode_now(rest), tokenizer.encode_now(said)


def _check_sizes(proto: Any, model: ModelInfo) -> None:
    """Raises: InvalidRequestError. A message has room for a million of each: copying them would hold up the router."""
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
    """Raises: InvalidRequestError."""
    values = {field.name: value for field, value in params.ListFields() if field.name in _SAME}
    if params.HasField("seed"):
        values["seed"] = params.seed % (1 << 64)  # int32 there, uint64 here
    if params.HasField("choice"):
        values["choice"] = router_pb2.Choice(options=params.choice.choices)
    if params.json_object:
        values["json_schema"] = ANY_OBJECT
    elif params.json_schema.startswith(_TOOL_CALLS) and len(params.json_schema) <= MAX_CONSTRAINT_BYTES:
        values["json_schema"] = _closed(params.json_schema)
    if any(token_id < 0 for token_id in params.logit_bias):
        raise InvalidRequestError("a token id is not negative", field="sampling_params.logit_bias")
    return router_pb2.SamplingParams(**values, logit_bias=dict(params.logit_bias))


def _closed(schema: str) -> str:
    """A call is its name and parameters, and then it ends; a function without `parameters` has none.

    Raises: InvalidRequestError.
    """
    try:
        calls = json.loads(schema)
        for call in calls["items"]["anyOf"]:
            call["additionalProperties"] = False
            call["properties"]["parameters"] = call["properties"]["parameters"] or _NO_PARAMETERS
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"no schema of tool calls: {error}", field="sampling_params.json_schema") from error
    return json.dumps(calls)


def _num_logprobs(params: Any) -> int | None:
    """Raises: InvalidRequestError for all of them (-1)."""
    if not params.HasField("logprobs"):
        return None
    number: int = params.logprobs
    if number < 0:
        raise InvalidRequestError(f"logprobs is 0 or more, not {number}", field="sampling_params.logprobs")
    return number
