"""Conversion of the engine's requests to ours and of our answers to the engine's messages, without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from smg_grpc_proto import vllm_engine_pb2 as engine_pb2

from outrider.answer import Delta
from outrider.errors import InvalidRequestError
from outrider.v1 import router_pb2
from router.api.vllm_engine.messages import EngineAnswer, request_from_engine
from tests.support.router_fakes import fake_model_info

SERVED = SimpleNamespace(info=fake_model_info(), tokenizer=None)


def ours(**sampling):
    params = engine_pb2.SamplingParams(**sampling)
    proto = engine_pb2.GenerateRequest(request_id="r", text="a", sampling_params=params)
    return request_from_engine(proto, SERVED)[0]


def test_what_is_not_set_stays_unset():
    request = ours()
    set_fields = {field.name for field, _ in request.sampling.ListFields()}
    assert set_fields <= {"top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"}
    assert (request.text, request.request_id, request.output.token_ids_only) == ("a", "r", True)
    assert not request.output.HasField("top_logprobs")


def test_every_parameter_has_its_place():
    values = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 7,
        "min_tokens": 2,
        "n": 3,
        "seed": 11,
    }
    request = ours(**values, logit_bias={5: 1.5}, stop=["a"], stop_token_ids=[4], ignore_eos=True)
    assert {name: getattr(request.sampling, name) for name in values} == values
    assert dict(request.sampling.logit_bias) == {5: 1.5}
    assert request.stop == router_pb2.StopConditions(strings=["a"], token_ids=[4], ignore_eos=True)
    assert ours(temperature=0.0).sampling.HasField("temperature")


def test_a_negative_seed_is_another_large_one():
    assert ours(seed=-1).sampling.seed == (1 << 64) - 1
    assert ours(seed=0).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"choice": {"choices": ["a", "b"]}}, "choice", router_pb2.Choice(options=["a", "b"])),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"json_object": False}, None, None),
    ],
)
def test_constraints_are_ours(given, kind, value):
    sampling = ours(**given).sampling
    assert sampling.WhichOneof("constraint") == kind
    assert kind is None or getattr(sampling, kind) == value


TOOL_CALLS = (
    '{"type":"array","minItems":1,"items":{"type":"object","anyOf":['
    '{"properties":{"name":{"type":"string","enum":["f"]},"parameters":{"type":"object"}},"required":["name","parameters"]},'
    '{"properties":{"name":{"type":"string","enum":["g"]},"parameters":{}},"required":["name","parameters"]}]},"$defs":{}}'
)


def test_tool_calls_have_a_name_and_parameters_and_nothing_else():
    schema = json.loads(ours(json_schema=TOOL_CALLS).sampling.json_schema)
    calls = schema["items"]["anyOf"]
    assert [call["additionalProperties"] for call in calls] == [False, False]
    assert calls[0]["properties"]["parameters"] == {"type": "object"}, "a client's own schema stays as it is"
    assert calls[1]["properties"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema["$defs"] == {}
    deep = TOOL_CALLS.replace('"$defs":{}', '"$defs":' + "[" * 9999)
    for broken in (TOOL_CALLS[:-1], deep):
        with pytest.raises(InvalidRequestError, match="not a valid schema of tool calls"):
            ours(json_schema=broken)


def test_a_completions_logprobs_are_refused_since_the_gateway_loses_them():
    params = engine_pb2.SamplingParams(logprobs=0)
    proto = engine_pb2.GenerateRequest(request_id="cmpl-1", tokenized={"input_ids": [5]}, sampling_params=params)
    with pytest.raises(InvalidRequestError, match="ask for them in chats, or by gRPC"):
        request_from_engine(proto, SERVED)


def test_skipped_special_tokens_are_as_the_gateway_says():
    assert not ours().output.skip_special_tokens
    assert ours(skip_special_tokens=True).output.skip_special_tokens


def test_text_that_is_held_back_to_the_end_makes_no_message():
    answer = EngineAnswer(ours(), is_streamed=True)
    assert answer.render(Delta(0, 5, (), "tail")) == []
