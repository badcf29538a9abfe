"""`outrider bench` against a router that answers from a script."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict

import grpc
import grpc.aio
import pytest

from outrider.bench.load import Level, LoadGenerator, RouterAnswerSource
from outrider.bench.machine import describe_machine
from outrider.bench.prompts import AnswerOptions, BenchPrompt, load_prompts
from outrider.bench.report import LineProgress, as_json, as_text
from outrider.bench.run import BenchPlan, prompt_groups, run_bench
from outrider.client import AsyncClient, ChatMessage
from outrider.errors import InvalidRequestError
from outrider.v1 import router_pb2, router_pb2_grpc

CHAT = BenchPrompt(id="chat", kind="chat", content=(ChatMessage("system", "Be brief."), ChatMessage("user", "Hello?")))
PROMPTS = (CHAT, *(BenchPrompt(id=f"p{i}", kind="code", content=f"def f{i}():") for i in range(7)))


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers with two deltas once `num_awaited` requests run at the same time; refuses texts that contain "fail"."""

    def __init__(self, *, num_awaited: int = 1) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.num_running = self.peak_running = 0
        self._num_awaited = num_awaited
        self._changed = asyncio.Condition()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.num_running += 1
        self.peak_running = max(self.peak_running, self.num_running)
        try:
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self.peak_running >= self._num_awaited)
            if "fail" in request.text:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            yield router_pb2.GenerateResponse(started=router_pb2.Started(num_prompt_tokens=4))
            yield router_pb2.GenerateResponse(delta=router_pb2.Delta(start_position=4, token_ids=[1], text="a"))
            yield router_pb2.GenerateResponse(delta=router_pb2.Delta(start_position=5, token_ids=[2, 3], text="bc"))
            yield router_pb2.GenerateResponse(finished=router_pb2.Finished(reason=router_pb2.FINISH_REASON_LENGTH))
            summary = router_pb2.Summary(usage=router_pb2.Usage(num_prompt_tokens=4, num_generated_tokens=3))
            yield router_pb2.GenerateResponse(summary=summary)
        finally:
            self.num_running -= 1


@asynccontextmanager
async def serving(router):
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(None)


def closed(num_clients):
    return Level(is_open_loop=False, value=num_clients)


async def send(router, prompts, level, *, options=None, speculation=True):
    """Returns the records of one pass."""
    async with serving(router) as client:
        load = LoadGenerator(RouterAnswerSource(client, options or AnswerOptions()))
        return (await load.run(prompts, level, speculation=speculation)).records


async def bench(router, *, prompts=PROMPTS, num_clients=1, modes=(True,), progress=None, pids=(), **plan):
    plan = BenchPlan(prompts=prompts, levels=(closed(num_clients),), modes=modes, **plan)
    async with serving(router) as client:
        progress = progress or LineProgress(io.StringIO())
        return await run_bench(client, plan, AnswerOptions(), cluster_pids=pids, progress=progress)


def sent_most_often(router):
    """Returns how often the most frequent prompt was sent."""
    return max(Counter(request.text or request.chat.messages[0].content for request in router.requests).values())


@pytest.mark.parametrize("num_clients", [1, 3, 8])
async def test_closed_loop_keeps_exactly_so_many_requests_running(num_clients):
    router = ScriptedRouter(num_awaited=num_clients)
    records = await send(router, PROMPTS, closed(num_clients))
    assert router.peak_running == num_clients
    assert [record.prompt_id for record in records] == [prompt.id for prompt in PROMPTS]
    assert all(record.token_ids == (1, 2, 3) and len(record.token_times) == 2 for record in records)


async def test_open_loop_does_not_wait_for_answers():
    router = ScriptedRouter(num_awaited=len(PROMPTS))  # no answer ends before the last request has arrived
    records = await send(router, PROMPTS, Level(is_open_loop=True, value=500.0))
    assert router.peak_running == len(PROMPTS)
    assert not any(record.error for record in records)


async def test_what_is_asked_for_is_what_the_options_say():
    router = ScriptedRouter()
    options = AnswerOptions(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=40, ignore_eos=True)
    await send(router, PROMPTS[:2], closed(1), options=options, speculation=False)
    first, second = router.requests
    assert first.chat.messages[1].content == "Hello?"
    assert (first.sampling.max_tokens, first.sampling.top_k, first.stop.ignore_eos) == (7, 3, True)
    assert first.sampling.temperature == pytest.approx(0.5)
    assert (first.sampling.seed, second.sampling.seed) == (40, 41)
    assert first.speculation.enabled is False


async def test_a_refused_request_is_an_error_among_answers_and_the_report_says_why():
    prompts = (BenchPrompt(id="x", kind="chat", content="fail"), PROMPTS[1])
    records = await send(ScriptedRouter(), prompts, closed(1))
    assert [(record.error, record.error_message) for record in records] == [("OVERLOADED", "full"), ("", "")]
    result = await bench(ScriptedRouter(), prompts=prompts)
    report = as_text(result, machine=describe_machine(), model={})
    assert "errors at 1 (speculative): 1 × OVERLOADED\n  OVERLOADED: full" in report


async def test_runs_with_different_marks_share_no_prompt():
    router = ScriptedRouter()
    for mark in ("a ", "b "):
        await bench(router, run_mark=mark)
    assert sent_most_often(router) == 1


async def test_compared_modes_alternate_and_no_prompt_is_sent_twice():
    router, stderr = ScriptedRouter(), io.StringIO()
    result = await bench(router, modes=(False, True), progress=LineProgress(stderr))
    measured = stderr.getvalue().splitlines()[2:]  # without the lines of two warm-ups
    assert ["speculative" in line for line in measured] == [False, True, True, False]
    assert [figures.num_requests for figures in result.figures] == [len(PROMPTS)] * 2
    assert sent_most_often(router) == 1
    assert result.comparisons[0].num_compared_answers == 0


async def test_same_prompts_lets_answers_be_compared():
    result = await bench(ScriptedRouter(), num_clients=2, modes=(False, True), same_prompts=True)
    comparison = result.comparisons[0]
    assert (comparison.num_identical_answers, comparison.num_compared_answers) == (len(PROMPTS), len(PROMPTS))


async def test_report_is_a_table_and_plain_json():
    stderr = io.StringIO()
    result = await bench(ScriptedRouter(), num_clients=2, modes=(False, True), progress=LineProgress(stderr), pids=(1,))
    machine, model = describe_machine(), {"model": "scripted"}
    text = as_text(result, machine=machine, model=model)
    assert "speculative" in text
    assert "tokens/s" in text
    assert len({len(line) for line in text.splitlines() if line.startswith(" ")}) <= 2
    value = as_json(
        result, machine=machine, options=asdict(AnswerOptions()), model=model, command=["outrider", "bench"]
    )
    assert json.loads(json.dumps(value))["levels"][0]["num_requests"] == len(PROMPTS)
    assert "2 clients, plain: 8/8 answers" in stderr.getvalue()


def test_groups_of_a_comparison_use_each_prompt_once():
    plan = BenchPlan(prompts=PROMPTS, levels=(), modes=(False, True))
    for clients in (1, 2, 16):
        groups = prompt_groups(plan, closed(clients))
        assert Counter(prompt.id for group in groups for prompt in group) == Counter(p.id for p in PROMPTS)


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", '{"id": "a"}', '{"id": "a", "kind": "chat"}', '{"id": "a", "kind": "b", "messages": [1]}'],
)
def test_a_bad_prompt_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "ok", "kind": "chat", "text": "x"}\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match=r"prompts\.jsonl:2"):
        load_prompts(file)
