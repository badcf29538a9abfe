"""The public API over gRPC: what clients of Generate and Complete receive."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.session import SampleStart
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS

STOP, LENGTH = router_pb2.FINISH_REASON_STOP, router_pb2.FINISH_REASON_LENGTH


async def test_an_answer_starts_streams_and_sums_up(cluster):
    await cluster.serve()
    answer = await cluster.generate(request_id="mine", seed=3)
    assert answer.request_id == answer.messages[-1].request_id == "mine"
    assert answer.started.num_prompt_tokens == len(b"a prompt")
    assert (answer.started.seed, answer.started.model) == (3, "fake-model")
    assert answer.started.router == cluster.address
    assert answer.deltas[0][0].start_position == 8
    assert len(answer.token_ids()) == 8
    assert answer.text() == bytes(answer.token_ids()).decode()
    assert answer.finished[0].reason == LENGTH
    assert answer.finished[0].WhichOneof("match") is None
    assert answer.summary.usage.num_generated_tokens == 8
    assert all(not message.request_id for message in answer.messages[1:-1])
    await cluster.is_empty()


async def test_summary_has_the_figures_of_all_nodes(cluster):
    cluster.decode.num_accepted_per_step = 2
    cluster.decode.tokens_per_step = 3
    cluster.prefill.num_cached_tokens = 4
    await cluster.serve()
    answer = await cluster.generate(text="0123456789", max_tokens=9)
    metrics, usage = answer.summary.metrics, answer.summary.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (10, 4)  # prefill computed 5, decode the last
    assert 0 < metrics.queue_seconds <= metrics.ttft_seconds <= metrics.e2e_seconds
    assert metrics.prefill_seconds == pytest.approx(0.001)
    assert (metrics.kv_transfer.connector, metrics.kv_transfer.bytes) == ("fake", 9 * 64)
    assert metrics.kv_transfer.exposed_seconds <= metrics.kv_transfer.seconds == pytest.approx(0.002)
    speculation = metrics.speculative_decoding
    assert (speculation.num_spec_steps, speculation.num_draft_tokens) == (3, 12)
    assert speculation.num_accepted_draft_tokens == 6
    assert speculation.draft_acceptance_rate == 0.5
    assert speculation.mean_acceptance_length == 3.0
    assert list(speculation.acceptance_histogram) == [0, 0, 3]
    assert speculation.look_ahead_hit_rate == 1.0
    assert (metrics.attempts, list(metrics.nodes)) == (1, ["decode-0", "prefill-0"])


async def test_a_short_remainder_needs_no_prefill_node(cluster):
    cluster.decode.max_local_prefill_tokens = 32
    cluster.decode.held_prefix_length = 3
    await cluster.serve()
    answer = await cluster.generate(max_tokens=8)
    assert cluster.prefill.requests == []
    assert answer.summary.usage.num_cached_tokens == 3
    assert answer.summary.metrics.kv_transfer.connector == ""
    assert list(answer.summary.metrics.nodes) == ["decode-0"]
    await cluster.is_empty()


async def test_the_prefill_request_carries_the_grant(cluster):
    cluster.decode.held_prefix_length = 2
    await cluster.serve()
    await cluster.generate(request_id="r", max_tokens=8, priority=5)
    (request,) = cluster.prefill.requests
    (opened,) = cluster.decode.opened
    assert list(request.token_ids) == list(b"a promp")
    assert (request.sequence_group_id, request.transfer_id) == (opened.sequence_group_id, opened.transfer_id)
    assert request.kv_address == cluster.decode.address
    assert request.decode_incarnation == cluster.decode.incarnation
    assert (request.held_prefix_length, request.options.priority, request.fingerprint) == (2, 5, "f" * 64)
    assert opened.request_id == "r"
    assert opened.options.sampling.n == 1
    assert opened.options.stop_token_ids == (256,)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("include_match", [False, True])
async def test_a_stop_string_ends_the_answer_wherever_it_stands_in_a_block(cluster, tokens_per_step, include_match):
    cluster.decode.script = cluster.says("one 🙂 two.END three")
    cluster.decode.tokens_per_step = tokens_per_step
    await cluster.serve()
    stop = router_pb2.StopConditions(strings=["nothing", ".END"], include_match=include_match)
    answer = await cluster.generate(max_tokens=100, stop=stop)
    assert answer.text() == "one 🙂 two" + (".END" if include_match else "")
    assert bytes(answer.token_ids()).decode() == "one 🙂 two.END", "never cut, nothing after it"
    assert (answer.finished[0].reason, answer.finished[0].stop_string) == (STOP, ".END")
    assert answer.summary.usage.num_generated_tokens == len(answer.token_ids())
    await cluster.is_empty()


@pytest.mark.parametrize("tokens_per_step", [1, 4, 40])
async def test_end_of_text_has_no_text_and_releases_what_was_held(cluster, tokens_per_step):
    cluster.decode.script = cluster.says(b"go ST\xf0\x9f")
    cluster.decode.tokens_per_step = tokens_per_step
    await cluster.serve()
    output = router_pb2.OutputOptions(skip_special_tokens=False)
    stop = router_pb2.StopConditions(strings=["STOP"])
    answer = await cluster.generate(max_tokens=50, stop=stop, output=output)
    assert answer.text() == "go ST�"
    assert answer.token_ids() == [*b"go ST\xf0\x9f", 256]
    assert (answer.finished[0].reason, answer.finished[0].stop_token_id) == (STOP, 256)


STOP_AT_X = {"strings": ["X"]}
SHOWN = {"skip_special_tokens": False}


@pytest.mark.parametrize(
    ("script", "sampling", "stop", "output", "text", "match"),
    [
        (b"abX", {"max_tokens": 3}, {**STOP_AT_X, "token_ids": [ord("X")]}, {}, "ab", ("stop_token_id", ord("X"))),
        (b"abX", {"max_tokens": 3}, STOP_AT_X, {}, "ab", ("stop_string", "X")),
        ([97, 256, 98, 99], {"max_tokens": 4}, {"ignore_eos": True}, {}, "abc", None),
        ([97, 256, 98, 99], {"max_tokens": 4}, {"ignore_eos": True}, SHOWN, "a<|endoftext|>bc", None),
        ("ab🙂".encode(), {"max_tokens": 4}, {}, {}, "ab�", None),
        (b"XXaXb", {"min_tokens": 2}, STOP_AT_X, {}, "XXa", ("stop_string", "X")),
    ],
    ids=[
        "a stop token beats a stop string",
        "a stop string beats length",
        "ignored end of text is like any other token",
        "and is shown",
        "length flushes half a character",
        "min_tokens keeps stop strings from beginning",
    ],
)
async def test_how_an_answer_ends(cluster, script, sampling, stop, output, text, match):
    cluster.decode.script = lambda *_: [*script, 256]
    await cluster.serve()
    answer = await cluster.generate(
        **sampling,
        stop=router_pb2.StopConditions(**stop),
        output=router_pb2.OutputOptions(**output),
    )
    finished = answer.finished[0]
    assert answer.text() == text
    if match is None:
        assert (finished.reason, answer.token_ids()) == (LENGTH, list(script)[:4])
    else:
        assert (finished.reason, getattr(finished, match[0])) == (STOP, match[1])


async def test_samples_are_interleaved_and_each_ends_by_itself(cluster):
    cluster.decode.script = lambda opened, sample: [97 + sample] * (2 + 3 * sample) + [256]
    await cluster.serve()
    answer = await cluster.generate(n=4, max_tokens=50)
    assert [answer.text(sample) for sample in range(4)] == ["aa", "b" * 5, "c" * 8, "d" * 11]
    assert sorted(answer.finished) == [0, 1, 2, 3]
    order = [message.delta.sample for message in answer.messages if message.HasField("delta")]
    assert order != sorted(order), "interleaved"
    assert answer.summary.usage.num_generated_tokens == 2 + 5 + 8 + 11 + 4
    assert answer.summary.usage.num_prompt_tokens == 8
    await cluster.is_empty()


async def test_a_stop_string_of_one_sample_stops_only_that_one(cluster):
    cluster.decode.script = lambda _, sample: [*(b"aaX" if sample == 0 else b"bbbb"), *b"c" * 40]
    cluster.decode.step_seconds = 0.001
    await cluster.serve()
    stop = router_pb2.StopConditions(strings=["X"])
    answer = await cluster.generate(n=2, max_tokens=30, stop=stop)
    assert answer.text(0) == "aa"
    assert answer.text(1) == "bbbb" + "c" * 26
    assert [cancel.samples for cancel in cluster.decode.cancelled][:1] == [(0,)]
    await cluster.is_empty()


async def test_logprobs_come_with_their_tokens(cluster):
    cluster.decode.tokens_per_step = 3
    await cluster.serve()
    output = router_pb2.OutputOptions(top_logprobs=2, logprobs_mode=router_pb2.LOGPROBS_MODE_SAMPLED)
    answer = await cluster.generate(max_tokens=8, output=output)
    for delta in answer.deltas[0]:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert all(len(entry.top) == 2 and entry.HasField("logprob") for entry in delta.logprobs)
    assert cluster.decode.opened[0].options.logprobs.mode.value == "sampled"
    plain = await cluster.generate(max_tokens=8)
    assert not any(delta.logprobs for delta in plain.deltas[0])


async def test_echo_puts_the_prompt_into_the_first_delta_of_each_sample(cluster):
    cluster.decode.script = lambda *_: [*b"!p", 256]
    await cluster.serve()
    output = router_pb2.OutputOptions(echo=True)
    stop = router_pb2.StopConditions(strings=["prompt"])
    answer = await cluster.generate(n=2, output=output, stop=stop)
    for sample in (0, 1):
        assert answer.text(sample) == "a prompt!p", "stops do not look at the echo"
        assert answer.deltas[sample][0].text.startswith("a prompt")
        assert answer.deltas[sample][0].start_position == 8
        assert answer.token_ids(sample) == [*b"!p", 256]


async def test_token_ids_only_leaves_text_out_but_stop_strings_apply(cluster):
    cluster.decode.script = cluster.says("abXcd")
    await cluster.serve()
    output = router_pb2.OutputOptions(token_ids_only=True, echo=True)
    answer = await cluster.generate(max_tokens=8, output=output, stop=router_pb2.StopConditions(strings=["X"]))
    assert (answer.text(), bytes(answer.token_ids())) == ("", b"abX")
    assert answer.finished[0].stop_string == "X"


async def test_chat_and_token_id_prompts(cluster):
    await cluster.serve()
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="hi")])
    answer = await cluster.generate(chat=chat, max_tokens=8)
    assert cluster.decode.opened[0].prompt_token_ids == (257, *b"user\nhi", 258, 257, *b"assistant\n")
    assert answer.started.num_prompt_tokens == 20
    await cluster.generate(token_ids=router_pb2.TokenIds(ids=[1, 2, 256]), max_tokens=8)
    assert cluster.decode.opened[1].prompt_token_ids == (1, 2, 256)


async def test_defaults_are_the_contracts(cluster):
    cluster.decode.script = cluster.says("ok")
    await cluster.serve()
    answer = await cluster.generate()
    (opened,) = cluster.decode.opened
    sampling = opened.options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.0, 0)
    assert sampling.max_tokens == 512 - 8, "what is left of the window"
    assert sampling.seed == answer.started.seed < 2**53
    assert opened.options.logprobs is None
    assert opened.options.num_speculative_tokens is None
    assert len(answer.request_id) == 36, "a UUID"
    other = await cluster.generate()
    assert other.started.seed != answer.started.seed


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"enabled": False, "num_speculative_tokens": 3}, 0),
        ({"num_speculative_tokens": 3}, 3),
        ({"num_speculative_tokens": 0}, 0),
        ({"method": router_pb2.VERIFICATION_METHOD_COUPLED}, None),
    ],
)
async def test_speculation_options_reach_the_decode_node(cluster, speculation, expected):
    await cluster.serve()
    await cluster.generate(max_tokens=1, speculation=router_pb2.SpeculationOptions(**speculation))
    assert cluster.decode.opened[0].options.num_speculative_tokens == expected


async def test_complete_is_the_same_answer_at_once(cluster):
    cluster.decode.script = lambda _, sample: [*(b"ab" if sample else b"xyz"), 256]
    await cluster.serve()
    response = await cluster.stub.Complete(
        cluster.request(
            request_id="c",
            n=2,
            output=router_pb2.OutputOptions(top_logprobs=0, echo=True),
        ),
        timeout=PATIENCE_SECONDS,
    )
    assert response.request_id == "c"
    assert response.started.num_prompt_tokens == 8
    assert [completion.text for completion in response.completions] == ["a promptxyz", "a promptab"]
    assert [list(completion.token_ids) for completion in response.completions] == [[*b"xyz", 256], [*b"ab", 256]]
    assert [len(completion.logprobs) for completion in response.completions] == [4, 3]
    assert [completion.finished.sample for completion in response.completions] == [0, 1]
    assert all(completion.finished.stop_token_id == 256 for completion in response.completions)
    assert response.summary.usage.num_generated_tokens == 7
    await cluster.is_empty()


async def test_a_slow_client_gets_fewer_larger_deltas_and_holds_no_node(cluster):
    big = 400
    await cluster.serve()
    call = cluster.stub.Generate(cluster.request(max_tokens=big, output=router_pb2.OutputOptions(top_logprobs=20)))
    await call.read()  # Started; then the client stops reading
    await cluster.eventually(lambda: cluster.decode.opened and cluster.decode.num_blocks_used == 0)
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert sum(len(delta.token_ids) for delta in deltas) == big
    await cluster.is_empty()


# ---------------------------------------------------------------- generated_token_ids


async def test_an_answer_goes_on_after_the_tokens_that_the_client_has(cluster):
    cluster.decode.script = cluster.says("hé🙂 STOPPED now")
    await cluster.serve()
    stop = router_pb2.StopConditions(strings=["PED"])
    whole = await cluster.generate(max_tokens=50, stop=stop)
    data, seen = whole.token_ids(), []
    for num_brought in range(len(data)):
        answer = await cluster.generate(max_tokens=50, stop=stop, generated_token_ids=data[:num_brought])
        assert answer.token_ids() == data[num_brought:]
        assert answer.deltas[0][0].start_position == 8 + num_brought
        assert answer.finished[0] == whole.finished[0]
        assert answer.summary.usage.num_generated_tokens == len(data) - num_brought
        assert whole.text().endswith(answer.text())
        seen.append(len(answer.text()))
    assert seen == sorted(seen, reverse=True)
    assert cluster.decode.opened[3].samples == (SampleStart(0, tuple(data[:2])),)


@pytest.mark.parametrize(
    ("brought", "fields", "reason", "match"),
    [
        (b"abX", {"stop": router_pb2.StopConditions(strings=["bX"])}, STOP, ("stop_string", "bX")),
        (b"abX", {"stop": router_pb2.StopConditions(token_ids=[ord("b")])}, STOP, ("stop_token_id", ord("b"))),
        ([97, 256], {}, STOP, ("stop_token_id", 256)),
        (b"12345678", {}, LENGTH, None),
        (b"1234567890", {}, LENGTH, None),
    ],
)
async def test_tokens_that_end_the_answer_already_cost_no_compute(cluster, brought, fields, reason, match):
    await cluster.serve()
    answer = await cluster.generate(max_tokens=8, generated_token_ids=list(brought), **fields)
    assert [message.WhichOneof("event") for message in answer.messages] == ["started", "finished", "summary"]
    finished = answer.finished[0]
    assert finished.reason == reason
    assert (finished.WhichOneof("match") is None) if match is None else getattr(finished, match[0]) == match[1]
    assert cluster.decode.opened == []
    await cluster.is_empty()


async def test_min_tokens_counts_the_tokens_that_were_brought(cluster):
    await cluster.serve()
    answer = await cluster.generate(
        min_tokens=3,
        generated_token_ids=[97, 256],  # min_tokens excluded end-of-text (256) there
        output=router_pb2.OutputOptions(echo=True),
    )
    assert len(answer.token_ids()) == 6
    assert not answer.text().startswith("a prompt"), "without the prompt's echo"


# ---------------------------------------------------------------- other calls


async def test_tokenize_and_detokenize(cluster):
    await cluster.serve()
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="x")], add_generation_prompt=False)
    for asked, expected in (({"text": "hé<|end|>"}, [*"hé".encode(), 258]), ({"chat": chat}, [257, *b"user\nx", 258])):
        answer = await cluster.stub.Tokenize(router_pb2.TokenizeRequest(**asked))
        assert list(answer.token_ids) == expected
    ids = [104, 258, 105, 0xF0]
    for fields, text in (({}, "hi�"), ({"skip_special_tokens": False}, "h<|end|>i�")):
        assert (await cluster.stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=ids, **fields))).text == text


async def test_get_model(cluster):
    await cluster.serve()
    model = await cluster.stub.GetModel(router_pb2.GetModelRequest())
    assert (model.name, model.vocab_size, model.max_model_len) == ("fake-model", 264, 512)
    assert list(model.eos_token_ids) == [256]
    assert (model.dtype, model.proposer, model.num_speculative_tokens) == ("float32", "ngram", 4)
    assert model.verification_method == router_pb2.VERIFICATION_METHOD_COUPLED
    assert model.fingerprint == "f" * 64
    assert model.default_sampling == router_pb2.SamplingParams(temperature=0.5, top_k=20)
    assert model.version


async def test_watch_cluster_shows_nodes_and_load(cluster):
    cluster.decode.step_seconds = 0.1  # slow, so that the status shows it running
    await cluster.serve()
    generating = asyncio.ensure_future(cluster.generate(max_tokens=200))
    watch = cluster.stub.WatchCluster(router_pb2.WatchClusterRequest(interval={"nanos": 1}))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                view = await watch.read()
                decode = next(node for node in view.nodes if node.role == router_pb2.NODE_ROLE_DECODE)
                if view.num_requests_running == 1 and decode.num_running == 1 and decode.step > 1:
                    break
    finally:
        watch.cancel()
    cluster.decode.step_seconds = 0.0
    assert {node.name for node in view.nodes} == {"decode-0", "prefill-0"}
    assert all(node.state == router_pb2.NODE_STATE_SERVING for node in view.nodes)
    assert decode.target == cluster.decode.address
    assert decode.kv_blocks_total == 1024 > decode.kv_blocks_free
    await generating
