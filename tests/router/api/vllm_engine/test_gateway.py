"""The OpenAI SDK through the real gateway, in front of a router with fake nodes."""

from __future__ import annotations

import asyncio

import openai
import pytest

from outrider.v1 import router_pb2
from tests.router.api.vllm_engine.smg_process import CALL_SECONDS, MODEL, gateway_before, own
from tests.router.threaded_router import ThreadedRouter
from tests.support.router_fakes.decode_node import letters
from tests.support.waiting import wait_for

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "höllo"}]
PROTO_MESSAGES = [router_pb2.ChatMessage(**message) for message in MESSAGES]


@pytest.fixture(scope="module")
def router():
    router = ThreadedRouter(decode_max_running=64)
    yield router
    router.stop()


@pytest.fixture(scope="module")
def client(router):
    with gateway_before(router) as client:
        yield client


@pytest.fixture
def decode(router):
    """The decode node, with the attributes of a new one."""
    decode = router.cluster.decode
    yield decode
    decode.script, decode.step_seconds, decode.max_running = letters, 0.0, 64
    wait_for(lambda: not decode.groups)


def chat(client, **options):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 8} | options)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_is_that_of_our_own_service(client, router, decode, temperature):
    decode.num_accepted_per_step = 2
    theirs = chat(client, seed=5, temperature=temperature)
    ours = own(router, chat={"messages": PROTO_MESSAGES}, seed=5, max_tokens=8, temperature=temperature)
    assert theirs.choices[0].message.content == ours.completions[0].text
    assert decode.opened[-1].prompt_token_ids == decode.opened[-2].prompt_token_ids
    assert decode.opened[-1].options == decode.opened[-2].options
    assert theirs.choices[0].finish_reason == "length"
    usage, counts = theirs.usage, ours.summary
    assert (usage.prompt_tokens, usage.completion_tokens) == (counts.usage.num_prompt_tokens, 8)
    speculation = counts.metrics.speculative_decoding
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == speculation.num_accepted_draft_tokens
    assert details.rejected_prediction_tokens == speculation.num_draft_tokens - speculation.num_accepted_draft_tokens


def test_a_completion_and_its_samples(client, router, decode):
    theirs = client.completions.create(model=MODEL, prompt="once upon", seed=5, max_tokens=8, n=3)
    ours = own(router, text="once upon", seed=5, max_tokens=8, n=3)
    assert [choice.text for choice in theirs.choices] == [completion.text for completion in ours.completions]
    assert (theirs.usage.prompt_tokens, theirs.usage.completion_tokens) == (len("once upon"), 24)


def test_a_stream_with_its_usage(client, decode):
    whole = chat(client, seed=5, n=2)
    texts, reasons, usage = ["", ""], {}, None
    for chunk in chat(client, seed=5, n=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_text_and_the_work(client, decode, stream):
    decode.script = lambda _opened, _sample: [*"one twö.END three".encode(), 256]
    answer = chat(client, stop=["nothing", ".END"], max_tokens=100, stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices) == "one twö"
    else:
        assert answer.choices[0].message.content == "one twö"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len("one twö.END".encode())


def test_what_a_client_asks_for_arrives(client, decode):
    chat(
        client,
        seed=7,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body={"top_k": 9, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [5], "ignore_eos": True},
    )
    options = decode.opened[-1].options
    sampling = options.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert options.stop_token_ids == (5,)


def test_a_client_that_leaves_frees_its_place(client, decode):
    decode.step_seconds = 0.25  # 100 s, unless the answer is stopped
    stream = chat(client, max_tokens=400, stream=True)
    next(iter(stream))
    wait_for(lambda: decode.groups)
    stream.close()
    wait_for(lambda: not decode.groups)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "another"}, openai.NotFoundError, "another"),
        ({"max_tokens": 5000}, openai.BadRequestError, "exceed the window of 512"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError, "512 tokens"),
        ({"stop": ["x" * 300]}, openai.BadRequestError, "1 to 256 are allowed"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
    ],
    ids=["model", "max_tokens", "prompt", "stop", "temperature"],
)
def test_errors_are_openais(client, decode, options, error, message):
    with pytest.raises(error, match=message):
        chat(client, **options)
    with pytest.raises(error, match=message):
        list(chat(client, stream=True, **options))


def test_overload_is_a_429_and_passes(client, router, decode):
    decode.max_running, decode.step_seconds = 1, 0.25
    queue = router.cluster.context.queue
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_max_waiting", 0)
        stream = chat(client, max_tokens=400, stream=True)
        next(iter(stream))
        for _ in range(12):  # more than it takes to open a circuit breaker
            with pytest.raises(openai.RateLimitError):
                chat(client)
        stream.close()
        wait_for(lambda: not decode.groups)
    decode.step_seconds = 0.0
    assert chat(client).choices[0].message.content


async def test_many_streams_at_once(client, decode):
    async with openai.AsyncOpenAI(
        base_url=client.base_url, api_key="a-key", max_retries=0, timeout=CALL_SECONDS
    ) as many:

        async def read(seed):
            stream = await chat(many, seed=seed, max_tokens=12, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        texts = await asyncio.gather(*map(read, range(32)))
    assert texts == [bytes(97 + (seed % 26 + 7 * place) % 26 for place in range(12)).decode() for seed in range(32)]


def test_a_client_shows_a_key_and_a_page_comes_from_a_named_origin(router, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    origin = "http://localhost:3000"
    more = (f"--model-alias=gpt-4={MODEL}", "--cors-allowed-origins", origin, "http://b")
    with gateway_before(router, key_file=keys, extra_arguments=more) as client:
        with pytest.raises(openai.AuthenticationError):
            chat(client)
        for key in ("first", "second"):
            assert chat(client.with_options(api_key=key), model="gpt-4").choices
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for asking, allowed in ((origin, origin), ("http://evil", None)):
            url = f"{client.base_url}chat/completions"
            answer = client._client.request("OPTIONS", url, headers={"Origin": asking, **asked})
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
        administration = str(client.base_url).replace("/v1/", "/workers")
        answer = client._client.request("GET", administration, headers={"Authorization": "Bearer first"})
        assert answer.status_code == 401
