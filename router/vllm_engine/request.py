"""A request of the engine protocol as one of our own, which the router then checks and serves like any other."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.v1 import router_pb2
from router.validation import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS

ANY_OBJECT = '{"type": "object"}'
"""The schema of `json_object`."""
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "n", "json_schema", "regex", "grammar"),
)
"""Sampling parameters that mean the same on both sides. Zero, where it cannot be told from nothing, is nothing."""
_UNSUPPORTED = {
    **dict.fromkeys(("mm_inputs", "extra_mm_inputs", "media_refs"), "prompts are text"),
    **dict.fromkeys(("kv_transfer_params", "kv_transfer_params_json"), "KV is the cluster's own"),
    "truncate_prompt_tokens": "prompts are not truncated",
    "structural_tag": "structural tags are not known",
}


def request_from_engine(proto: Any, model: ModelInfo) -> router_pb2.GenerateRequest:
    """`proto`: a `vllm.grpc.engine.GenerateRequest`. Values are checked later, with all of our requests.

    Raises: InvalidRequestError for what is too much to be copied; NotSupportedError for what ours has no place for.
    """
    _check_sizes(proto, model)
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
            top_logprobs=_num_logprobs(params, "logprobs"),
            prompt_logprobs=_num_logprobs(params, "prompt_logprobs"),
            skip_special_tokens=params.skip_special_tokens,
            token_ids_only=True,  # the text is the gateway's; stop strings are looked for all the same
        ),
    )
    if proto.HasField("text"):
        request.text = proto.text
    else:
        request.token_ids.ids.extend(proto.tokenized.input_ids)
    return request


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
    if any(token_id < 0 for token_id in params.logit_bias):
        raise InvalidRequestError("a token id is not negative", field="sampling_params.logit_bias")
    return router_pb2.SamplingParams(**values, logit_bias=dict(params.logit_bias))


def _num_logprobs(params: Any, name: str) -> int | None:
    """Raises: InvalidRequestError for all of them (-1)."""
    if not params.HasField(name):
        return None
    number: int = getattr(params, name)
    if number < 0:
        raise InvalidRequestError(f"{name} is 0 or more, not {number}", field=f"sampling_params.{name}")
    return number
