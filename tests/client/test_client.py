from __future__ import annotations

import threading

import numpy as np
import pytest
from google.protobuf import json_format

from outrider.client import AsyncClient, ChatMessage, Client
from outrider.client.options import make_request
from outrider.errors import AbortedError, CapacityError, InternalError, InvalidRequestError, PeerLostError
from outrider.node import NodeRole, NodeState
from outrider.request import FinishReason
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.client.answering_router import Serving, fail

WAIT_SECONDS = 60.0


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Streams two samples of two tokens. The answer to "endless" never ends; "full" is refused."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.requests = []

    def Generate(self, request, context):
        self.requests.append(request)
        if request.text == "full":
            fail(context, CapacityError("256 requests wait", retry_after_seconds=0.5))
        context.add_callback(self.cancelled.set)
        context.set_trailing_metadata((("outrider-tokens", "4"),))
        started = router_pb2.Started(num_prompt_tokens=3, seed=9, model="m", router="here")
        yield router_pb2.GenerateResponse(request_id="r1", started=started)
        for sample, words in enumerate((["a", " b"], ["c", " d"])):
            for index, word in enumerate(words):
                logprobs = [router_pb2.TokenLogprobs(token_id=index, logprob=-0.5, rank=1)]
                yield router_pb2.GenerateResponse(
                    delta=router_pb2.Delta(
                        sample=sample, start_position=3 + index, token_ids=[index], text=word, logprobs=logprobs
                    )
                )
                if request.text == "endless":
                    self.cancelled.wait(WAIT_SECONDS)
                    return
            finished = router_pb2.Finished(sample=sample, reason=router_pb2.FINISH_REASON_STOP, stop_token_id=2)
            yield router_pb2.GenerateResponse(finished=finished)
        yield router_pb2.GenerateResponse(request_id="r1", summary=self.summary())

    @staticmethod
    def summary():
        speculation = router_pb2.SpeculationMetrics(mean_acceptance_length=1.5, acceptance_histogram=[1, 2])
        return router_pb2.Summary(
            usage=router_pb2.Usage(num_generated_tokens=4),
            metrics=router_pb2.RequestMetrics(
                kv_transfer=router_pb2.KvTransferMetrics(connector="grpc", bytes=7), speculative_decoding=speculation
            ),
        )

    def Complete(self, request, context):
        finished = router_pb2.Finished(reason=router_pb2.FINISH_REASON_LENGTH)
        return router_pb2.CompleteResponse(
            request_id="r2",
            started=router_pb2.Started(seed=9),
            completions=[router_pb2.Completion(text="a b", token_ids=[0, 1], finished=finished)],
            summary=self.summary(),
        )

    def Abort(self, request, context):
        return router_pb2.AbortResponse(aborted=request.request_id == "r1")

    def Tokenize(self, request, context):
        return router_pb2.TokenizeResponse(token_ids=[len(request.text), len(request.chat.messages)])

    def Detokenize(self, request, context):
        return router_pb2.DetokenizeResponse(text=f"{list(request.token_ids)} {request.skip_special_tokens}")

    def GetModel(self, request, context):
        method = router_pb2.VERIFICATION_METHOD_COUPLED
        return router_pb2.GetModelResponse(name="m", eos_token_ids=[2], verification_method=method)

    def WatchCluster(self, request, context):
        for num_running in range(100):
            node = router_pb2.NodeStatus(
                name="d", role=router_pb2.NODE_ROLE_DECODE, state=router_pb2.NODE_STATE_LOST, kv_blocks_free=4
            )
            yield router_pb2.WatchClusterResponse(nodes=[node], num_requests_running=num_running)


@pytest.fixture(scope="module")
def served():
    serving = Serving(ScriptedRouter())
    yield serving.router, serving.address
    serving.stop()


@pytest.fixture
def router(served):
    served[0].cancelled.clear()
    return served[0]


@pytest.fixture
def client(served, router):
    with Client(served[1]) as client:
        yield client


def test_a_stream_is_its_deltas_and_then_a_record(client):
    stream = client.generate("hello", seed=9, n=2)
    with pytest.raises(InternalError, match="not ended yet"):
        _ = stream.summary
    deltas = list(stream)
    assert [(delta.sample, delta.start_position, delta.text) for delta in deltas] == [
        (0, 3, "a"), (0, 4, " b"), (1, 3, "c"), (1, 4, " d"),
    ]  # fmt: skip
    assert deltas[0].logprobs[0].logprob == -0.5
    assert (stream.text(), stream.text(1), stream.token_ids(1)) == ("a b", "c d", (0, 1))
    assert stream.started.seed == 9
    assert stream.finished[1].reason is FinishReason.STOP
    assert stream.finished[1].stop_token_id == 2
    assert stream.summary.metrics.speculation.acceptance_histogram == (1, 2)
    assert stream.summary.metrics.kv_transfer.bytes == 7
    assert stream.trailers() == {"outrider-tokens": "4"}


def test_cancel_reaches_the_router_and_just_ends_the_iteration(client, router):
    stream = client.generate("endless")
    texts = []
    for delta in stream:
        texts.append(delta.text)
        stream.cancel()
    assert texts == ["a"]
    assert router.cancelled.wait(WAIT_SECONDS)


def test_leaving_the_block_early_cancels(client, router):
    with client.generate("endless") as stream:
        for _ in stream:
            break
    assert router.cancelled.wait(WAIT_SECONDS)


def test_errors_are_ours(client):
    with pytest.raises(CapacityError, match="256 requests wait") as refused:
        list(client.generate("full"))
    assert refused.value.retry_after_seconds == 0.5
    with pytest.raises(AbortedError) as late:
        list(client.generate("endless", timeout_seconds=0.2))
    assert late.value.reason == "DEADLINE_EXCEEDED"
    with Client("127.0.0.1:1") as nobody, pytest.raises(PeerLostError, match=r"127\.0\.0\.1:1 cannot be reached"):
        nobody.model()


def test_every_other_call_has_its_typed_answer(client):
    result = client.complete("hello")
    assert (result.text, result.completions[0].finished.reason) == ("a b", FinishReason.LENGTH)
    assert client.abort("r1")
    assert not client.abort("r2")
    assert client.tokenize("abc") == [3, 0]
    assert client.tokenize([ChatMessage("user", "x")]) == [0, 1]
    assert client.detokenize([1, 2], skip_special_tokens=False) == "[1, 2] False"
    model = client.model()
    assert (model.name, model.eos_token_ids, model.verification_method) == ("m", (2,), "coupled")
    cluster = client.watch_cluster(interval_seconds=0.1)
    status = next(cluster)
    cluster.close()
    assert status.by_role()[NodeRole.DECODE] == status.nodes
    assert status.nodes[0].state is NodeState.LOST


async def test_the_async_client_does_the_same(served, router):
    async with AsyncClient(served[1]) as client:
        stream = client.generate("hello")
        assert [delta.text async for delta in stream] == ["a", " b", "c", " d"]
        assert stream.summary.usage.num_generated_tokens == 4
        assert await stream.trailers() == {"outrider-tokens": "4"}
        assert (await client.complete("hello")).text == "a b"
        assert await client.abort("r1")
        assert await client.tokenize("abc") == [3, 0]
        assert await client.detokenize([1]) == "[1] False"
        assert (await client.model()).name == "m"
        cluster = client.watch_cluster()
        assert (await anext(cluster)).num_requests_running == 0
        await cluster.aclose()
        with pytest.raises(CapacityError):
            async for _ in client.generate("full"):
                pass


async def test_an_async_stream_is_cancelled_by_cancel_and_by_leaving_its_block(served, router):
    async with AsyncClient(served[1]) as client:
        stream = client.generate("endless")
        async for _ in stream:
            stream.cancel()
        assert router.cancelled.wait(WAIT_SECONDS)
        router.cancelled.clear()
        async with client.generate("endless") as stream:
            async for _ in stream:
                break
        assert router.cancelled.wait(WAIT_SECONDS)


def test_every_option_finds_its_field():
    request = make_request(
        [ChatMessage("system", "s"), ChatMessage("user", "u", {"name": "é", "tool_calls": [{"id": 1}]})],
        {
            "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True, "token_bytes": True,
            "request_id": "r", "model": "m", "add_generation_prompt": False, "temperature": 0.0, "top_p": 0.5,
            "top_k": 3, "min_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5,
            "logit_bias": {5: -2.0}, "seed": 2**64 - 1, "n": 2, "max_tokens": 7, "min_tokens": 1, "stop": ["x"],
            "stop_token_ids": [4], "ignore_eos": True, "include_match": True, "top_logprobs": 0,
            "skip_special_tokens": False, "echo": True, "token_ids_only": True, "logprobs_mode": "sampled",
            "speculation": False, "num_speculative_tokens": 0, "verification_method": "coupled", "priority": -3,
            "resume_window_seconds": 1.5, "generated_token_ids": [8, 9], "prompt_logprobs": 1, "regex": "a+",
        },
    )  # fmt: skip
    shown = json_format.MessageToDict(request)
    assert shown["chat"] == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u", "members": {"name": '"é"', "tool_calls": '[{"id": 1}]'}},
        ],
        "addGenerationPrompt": False, "continueFinalMessage": True, "templateKwargs": {"enable_thinking": "false"},
    }  # fmt: skip
    assert shown["sampling"]["temperature"] == 0.0
    assert shown["sampling"]["seed"] == str(2**64 - 1)
    assert shown["sampling"]["logitBias"] == {"5": -2.0}
    assert len(shown["sampling"]) == 13
    assert shown["stop"] == {"strings": ["x"], "tokenIds": [4], "ignoreEos": True, "includeMatch": True}
    assert shown["output"] == {
        "topLogprobs": 0, "promptLogprobs": 1, "skipSpecialTokens": False, "echo": True, "tokenIdsOnly": True,
        "logprobsMode": "LOGPROBS_MODE_SAMPLED", "tokenBytes": True,
    }  # fmt: skip
    assert shown["speculation"] == {
        "enabled": False, "numSpeculativeTokens": 0, "method": "VERIFICATION_METHOD_COUPLED",
    }  # fmt: skip
    assert (shown["priority"], shown["resumeWindow"], shown["generatedTokenIds"]) == (-3, "1.500s", [8, 9])


def test_what_is_not_given_stays_unset():
    assert json_format.MessageToDict(make_request([1, 2], {})) == {"tokenIds": {"ids": [1, 2]}}
    assert make_request([], {}).WhichOneof("prompt") == "token_ids"
    assert json_format.MessageToDict(make_request("", {})) == {"text": ""}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"stop": [b"\xff"]}, "stop.strings"),
        ({"stop": b"\xff"}, "stop.strings"),
        ({"max_tokens": {}}, "sampling.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"logit_bias": [1]}, "sampling.logit_bias"),
        ({"json_schema": {"a": object()}}, "sampling.json_schema"),
        ({"choice": 5}, "sampling.choice"),
        ({"logprobs_mode": "x"}, "output.logprobs_mode"),
        ({"resume_window_seconds": float("nan")}, "resume_window"),
        ({"resume_window_seconds": 1e30}, "resume_window"),
        ({"resume_window_seconds": "5"}, "resume_window"),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(options, field):
    with pytest.raises(InvalidRequestError) as refused:
        make_request("x", options)
    assert refused.value.field == field


def test_what_is_not_json_names_its_field():
    for message, options, field in (
        (ChatMessage("user", "a", {"name": {1}}), {}, "chat.messages[0].members"),
        (ChatMessage("user", "a"), {"chat_template_kwargs": {"now": object()}}, "chat.template_kwargs"),
    ):
        with pytest.raises(InvalidRequestError, match="JSON serializable") as refused:
            make_request([message], options)
        assert refused.value.field == field
    with pytest.raises(InvalidRequestError, match=r"^chat.template_kwargs must be a dict"):
        make_request([ChatMessage("user", "a")], {"chat_template_kwargs": "x"})


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("temprature", "nearest is temperature"),
        ("logprobs", "nearest is top_logprobs"),
        ("max_new_tokens", "nearest is max_tokens"),
        ("guided_regex", "nearest is regex"),
        ("xyz", "options are add_generation_prompt, "),
    ],
)
def test_an_option_that_does_not_exist_is_a_type_error_that_names_the_nearest(option, nearest):
    with pytest.raises(TypeError, match=f"unknown option {option}; the {nearest}"):
        make_request("x", {option: 1.0})


class Message:
    """Has the interface of a message in OpenAI's client."""

    @staticmethod
    def model_dump():
        return {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}


class Schema:
    """Has the interface of a pydantic model class."""

    @staticmethod
    def model_json_schema():
        return {"type": "object"}


def test_options_are_taken_as_callers_have_them():
    request = make_request("x", {"stop": "a", "stop_token_ids": 4, "json_schema": {"type": "object"}})
    assert (list(request.stop.strings), list(request.stop.token_ids)) == (["a"], [4])
    assert make_request("x", {"choice": "yes"}).sampling.choice.options == ["yes"]
    assert request.sampling.json_schema == '{"type": "object"}'
    assert make_request("x", {"json_schema": Schema}).sampling.json_schema == '{"type": "object"}'
    assert make_request(np.array([1, 2]), {"generated_token_ids": np.array([3])}).token_ids.ids == [1, 2]
    assert make_request(range(3), {}).token_ids.ids == [0, 1, 2]
    unset = {"verification_method": None, "logprobs_mode": None}
    messages = make_request([Message(), {"role": "user", "content": "b"}], unset).chat.messages
    assert [(each.role, each.content) for each in messages] == [("assistant", "a"), ("user", "b")]


def test_messages_may_be_dicts_of_openai():
    request = make_request(
        [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ChatMessage("user", "c"),
            {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "e"}]},
        ],
        {},
    )
    assert [message.content for message in request.chat.messages] == ["a\nb", "c", "", "d", ""]
    assert request.chat.messages[4].members == {"tool_calls": '[{"id": "e"}]'}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", "b"], "a prompt must be text, token ids or a list of messages, not ['a', 'b']; send several one by one"),
        ([("user", "hi")], "not [('user', 'hi')]"),
        (None, "not None"),
        (5, "not 5"),
        (b"hi", "not bytes: decode them"),
        ({"role": "user", "content": "hi"}, "not a dict: put a message into a list"),
        ([{"role": "user", "content": 5}], "chat.messages[0]: "),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content must be text, not image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content must be text, not a part without text"),
        ([{"role": "user", "content": ["a", "b"]}], "content must be a text or a list of text parts, not 'a'"),
        (
            [ChatMessage("user", "hi"), "hi"],
            "chat.messages[1]: a message must be a dict with role and content, not 'hi'",
        ),
        ([{"content": "hi"}], "a message must have a role and a content: {'content': 'hi'}"),
        (
            [{"role": "assistant", "content": None, "audio": {"id": "c"}}],
            "must not have audio: render the chat yourself (apply_chat_template) and pass its token ids",
        ),
        ([ChatMessage("user", "\ud800")], "chat.messages[0].content"),
    ],
)
def test_a_prompt_that_cannot_be_names_the_way_out(prompt, message):
    with pytest.raises(InvalidRequestError) as refused:
        make_request(prompt, {})
    assert message in str(refused.value)
