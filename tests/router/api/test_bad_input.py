"""Invalid input is rejected with the name of its field, before a node sees it."""

from __future__ import annotations

import grpc
import pytest

from outrider.v1 import router_pb2
from tests.router.conftest import refused
from tests.support.router_fakes.model import fake_model_info

R = router_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = float("nan"), float("inf")


def chat(*roles):
    return R.Chat(messages=[R.ChatMessage(role=role, content="x") for role in roles])


def sampling_cases():
    bad = {
        "temperature": (-0.1, NAN, INF),
        "top_p": (0.0, -1.0, 1.01, NAN),
        "min_p": (-0.1, 1.1, NAN),
        "presence_penalty": (-2.1, 2.1, NAN),
        "frequency_penalty": (-2.1, 2.1, INF),
        "repetition_penalty": (0.0, -1.0, INF, NAN),
        "n": (0, 65),
        "max_tokens": (0, 505, 2**32 - 1),
        "logit_bias": ({1: NAN}, {1: INF}, {264: 1.0}, dict.fromkeys(range(1025), 0.0)),
    }
    for name, values in bad.items():
        for value in values:
            label = value if not isinstance(value, dict) else f"{len(value)} entries"
            yield pytest.param(
                {"sampling": R.SamplingParams(**{name: value})}, f"sampling.{name}", id=f"{name}={label}"
            )


OTHER_CASES = [
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "tab\t"}, "request_id"),
    ({"request_id": "é"}, "request_id"),
    ({"text": None}, "prompt"),
    ({"text": ""}, "text"),
    ({"text": "x" * 512}, "text"),
    ({"token_ids": R.TokenIds()}, "token_ids.ids"),
    ({"token_ids": R.TokenIds(ids=[1] * 512)}, "token_ids.ids"),
    ({"token_ids": R.TokenIds(ids=[264])}, "token_ids.ids"),
    ({"chat": R.Chat()}, "chat.messages"),
    ({"chat": chat("user", "")}, "chat.messages[1].role"),
    ({"chat": chat("nobody")}, "chat.messages"),
    ({"sampling": R.SamplingParams(max_tokens=4, min_tokens=5)}, "sampling.min_tokens"),
    ({"sampling": R.SamplingParams(min_tokens=505)}, "sampling.min_tokens"),
    ({"sampling": R.SamplingParams(json_schema="{")}, "sampling.json_schema"),
    ({"sampling": R.SamplingParams(json_schema="3")}, "sampling.json_schema"),
    ({"sampling": R.SamplingParams(json_schema='{"type": "strin"}')}, "sampling.json_schema"),
    ({"sampling": R.SamplingParams(regex="(a")}, "sampling.regex"),
    ({"sampling": R.SamplingParams(grammar="start: x")}, "sampling.grammar"),
    ({"sampling": R.SamplingParams(regex="")}, "sampling.regex"),
    ({"sampling": R.SamplingParams(grammar="")}, "sampling.grammar"),
    ({"sampling": R.SamplingParams(choice=R.Choice())}, "sampling.choice.options"),
    ({"sampling": R.SamplingParams(choice=R.Choice(options=["é" * 20_000] * 2))}, "sampling.choice.options"),
    ({"stop": R.StopConditions(strings=["x"] * 17)}, "stop.strings"),
    ({"stop": R.StopConditions(strings=["x", ""])}, "stop.strings"),
    ({"stop": R.StopConditions(strings=["é" * 129])}, "stop.strings"),
    ({"stop": R.StopConditions(token_ids=[1] * 65)}, "stop.token_ids"),
    ({"stop": R.StopConditions(token_ids=[264])}, "stop.token_ids"),
    ({"output": R.OutputOptions(top_logprobs=21)}, "output.top_logprobs"),
    ({"output": R.OutputOptions(prompt_logprobs=21)}, "output.prompt_logprobs"),
    ({"output": R.OutputOptions(logprobs_mode=7)}, "output.logprobs_mode"),
    ({"speculation": R.SpeculationOptions(method=9)}, "speculation.method"),
    ({"resume_window": {"seconds": -1}}, "resume_window"),
    ({"generated_token_ids": [264], "sampling": R.SamplingParams(seed=1)}, "generated_token_ids"),
    ({"generated_token_ids": [1]}, "sampling.seed"),
    ({"generated_token_ids": [1], "sampling": R.SamplingParams(seed=1, n=2)}, "generated_token_ids"),
    ({"blend": R.Blend()}, "blend.separator"),
    ({"blend": R.Blend(separator="#", piece_lengths=[2])}, "blend.piece_lengths"),
    ({"blend": R.Blend(separator="#", recompute_share=1.1)}, "blend.recompute_share"),
    ({"blend": R.Blend(separator="#", recompute_share=NAN)}, "blend.recompute_share"),
    ({"blend": R.Blend(separator="#"), "output": R.OutputOptions(prompt_logprobs=0)}, "output.prompt_logprobs"),
    ({"token_ids": R.TokenIds(ids=[1, 2]), "blend": R.Blend(separator="#")}, "blend.separator"),
    ({"token_ids": R.TokenIds(ids=[1, 2]), "blend": R.Blend(piece_lengths=[2, 1])}, "blend.piece_lengths"),
    ({"token_ids": R.TokenIds(ids=[1, 2]), "blend": R.Blend(piece_lengths=[2, 0])}, "blend.piece_lengths"),
    ({"text": "#" * 1025, "blend": R.Blend(separator="#")}, "blend.separator"),
    # Ranges are checked before unsupported options.
    ({"resume_window": {"seconds": 1}, "sampling": R.SamplingParams(top_p=0.0)}, "sampling.top_p"),
]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *sampling_cases(),
        *(pytest.param(fields, field, id=f"{field}-{index}") for index, (fields, field) in enumerate(OTHER_CASES)),
    ],
)
async def test_bad_input_is_refused_by_field(serving, fields, field):
    failure = await serving.fail(serving.request(**fields))
    assert (failure.code, failure.field) == (INVALID, field), failure
    assert failure.reason
    assert serving.decode.opened == []


async def test_an_unknown_model_is_not_found(serving):
    failure = await serving.fail(serving.request(model="other"))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert "fake-model" in failure.message
    assert (await serving.generate(model="fake-model", max_tokens=8)).token_ids()
    serving.decode.opened.clear()


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": R.SamplingParams(max_tokens=504, seed=2**64 - 1, n=1, top_k=2**32 - 1)},
        {"sampling": R.SamplingParams(temperature=0.0, max_tokens=1)},
        {"sampling": R.SamplingParams(min_tokens=3, max_tokens=3, presence_penalty=-2, frequency_penalty=2)},
        {"sampling": R.SamplingParams(max_tokens=1, logit_bias=dict.fromkeys(range(264), -1e30))},
        {"sampling": R.SamplingParams(max_tokens=1, n=64)},
        {"sampling": R.SamplingParams(max_tokens=1), "request_id": "~ " * 64},
        {
            "sampling": R.SamplingParams(max_tokens=1),
            "stop": R.StopConditions(strings=["é" * 128] * 16, token_ids=[1] * 64),
        },
        {"sampling": R.SamplingParams(max_tokens=1), "output": R.OutputOptions(top_logprobs=20)},
        {"sampling": R.SamplingParams(max_tokens=2, temperature=0.0), "generated_token_ids": [1]},
    ],
)
async def test_values_at_the_border_are_served(serving, fields):
    assert (await serving.generate(**fields)).finished
    serving.decode.opened.clear()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "a plain added word"}, "text"),
        ({"chat": R.Chat(messages=[R.ChatMessage(role="user", content="a plain added")])}, "chat.messages"),
        ({"token_ids": R.TokenIds(ids=[97, 259])}, "token_ids.ids"),
        ({"text": "a", "generated_token_ids": [259], "seed": 1}, "generated_token_ids"),
        ({"text": "a", "stop": R.StopConditions(token_ids=[259])}, "stop.token_ids"),
        ({"text": "a", "logit_bias": {259: 1.0}}, "sampling.logit_bias"),
    ],
)
async def test_a_token_beyond_the_models_rows_is_refused_by_every_way_in(cluster, fields, field):
    cluster.decode.model = cluster.prefill.model = fake_model_info(vocab_size=259)  # the tokenizer has one more
    await cluster.serve()
    failure = await cluster.fail(cluster.request(**fields))
    assert (failure.code, failure.field, failure.reason) == (INVALID, field, "TOKEN_OUT_OF_VOCABULARY"), failure
    assert cluster.decode.opened == []
    assert list((await cluster.stub.Tokenize(R.TokenizeRequest(text="plain added"))).token_ids) == [259]


async def test_tokenize_and_detokenize_name_their_fields(serving):
    for call, field in (
        (serving.stub.Tokenize(R.TokenizeRequest()), "input"),
        (serving.stub.Tokenize(R.TokenizeRequest(chat=R.Chat())), "chat.messages"),
        (serving.stub.Tokenize(R.TokenizeRequest(chat=chat(""))), "chat.messages[0].role"),
        (serving.stub.Detokenize(R.DetokenizeRequest(token_ids=[264])), "token_ids"),
    ):
        failure = await refused(call)
        assert (failure.code, failure.field) == (INVALID, field)


async def test_a_running_request_id_already_exists_and_is_free_again_afterwards(serving):
    serving.decode.step_seconds = 0.1
    call = serving.stub.Generate(serving.request(request_id="twice", max_tokens=300))
    await call.read()
    failure = await serving.fail(serving.request(request_id="twice"))
    assert failure.code is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await serving.is_empty()
    serving.decode.step_seconds = 0.0
    assert (await serving.generate(request_id="twice", max_tokens=8)).token_ids()
    serving.decode.opened.clear()


async def test_a_message_over_the_size_limit_is_resource_exhausted(serving):
    failure = await serving.fail(serving.request(text="x" * (17 << 20)))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
