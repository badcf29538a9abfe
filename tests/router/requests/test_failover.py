"""Failover between two decode and two prefill nodes that die, turn late or drain: the answer stays the same."""

from __future__ import annotations

import asyncio

import pytest

from outrider.node import NodeState
from outrider.v1 import router_pb2
from router.requests.machine import RETRY_SECONDS
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.router_fakes import fake_model_info
from tests.support.router_fakes.decode_node import letters

LONG = 300
FOREVER_SECONDS = 300.0
"""Seconds after which a late node would be declared lost. The tests end earlier, so work migrates by hedges only."""


@pytest.fixture
def pair(node_pair):
    return node_pair


def outline(answer):
    """Returns everything that a client receives, independent of the division into deltas."""
    return {
        sample: (
            answer.token_ids(sample),
            answer.text(sample),
            [logprob for delta in answer.deltas[sample] for logprob in delta.logprobs],
            answer.finished[sample],
        )
        for sample in answer.deltas
    }


def with_a_mark(opened, sample):
    """Returns the letters, with a different token at index 60."""
    return [33 if place == 60 else token_id for place, token_id in enumerate(letters(opened, sample))]


REQUESTS = {
    "plain": {},
    "three samples": {"n": 3},
    "logprobs": {"output": router_pb2.OutputOptions(top_logprobs=2)},
    "echo": {"output": router_pb2.OutputOptions(echo=True)},
    "stop string": {"stop": router_pb2.StopConditions(strings=["zzz", "x!"])},
    "min_tokens": {"min_tokens": 100, "stop": router_pb2.StopConditions(strings=["!", "ovc"])},
    "penalties": {"presence_penalty": 0.5, "logit_bias": {97: 1.0}},
}


WAYS = ("dies", "breaks", "freezes", "gives up", "drains", "both die")


@pytest.mark.parametrize(
    ("kind", "how"), [*(("three samples", how) for how in WAYS), *((kind, "breaks") for kind in REQUESTS)]
)
async def test_an_answer_is_the_same_whatever_happens_to_its_decode_node(pair, kind, how):
    fields = {"max_tokens": 150} | REQUESTS[kind]
    for node in pair.decodes:
        node.script = with_a_mark
    await pair.serve()
    undisturbed = await pair.generate(**fields)
    num_opened = pair.num_opened
    pair.pace(0.02)  # so slow that the answer does not end before it migrates
    task = asyncio.ensure_future(pair.generate(**fields))
    await pair.until_streaming(num_tokens=10)
    busy, free = pair.busy_and_free()
    match how:
        case "dies":
            await busy.stop()
        case "breaks":
            await busy.break_sessions()
        case "freezes":
            busy.freeze()
        case "gives up":
            busy.fail_groups()
        case "drains":
            busy.state = NodeState.DRAINING
        case "both die":
            await busy.stop()
            await pair.eventually(lambda: free.groups)
            await free.break_sessions()
            await busy.start()
    await pair.eventually(lambda: pair.num_opened > num_opened + 1, what="the move")
    pair.pace(0.001)
    answer = await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert outline(answer) == outline(undisturbed)
    assert answer.started == undisturbed.started
    assert answer.summary.metrics.attempts >= 2
    assert pair.num_opened > num_opened + 1
    again = [opened for node in pair.decodes for opened in node.opened][-1]
    assert again.options.sampling.seed == undisturbed.started.seed
    if how == "freezes":
        busy.thaw()


# ---------------------------------------------------------------- suspicion


async def test_a_late_node_is_not_waited_for_and_is_believed_again(pair):
    """Hedges are not counted any more once their node is on time again."""
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    for _ in range(2):
        task, busy, free = await pair.begin(LONG)
        link = pair.link_of(busy)
        busy.freeze()
        await pair.eventually(lambda free=free: free.max_sent > 30)
        answer = await task
        assert answer.token_ids() == letters(free.opened[-1], 0)[:LONG]
        assert set(answer.summary.metrics.nodes) >= {"decode-0", "decode-1"}
        assert link.is_late
        busy.thaw()
        await pair.eventually(lambda link=link: not link.is_late)
        await pair.is_empty()


async def eight_on_one_node(pair):
    """Starts eight requests on one node. Returns (their tasks, number of requests that the other node has rejected)."""
    pair.pace(0.02)
    pair.decodes[1].max_running = 0
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    tasks = [asyncio.ensure_future(pair.generate(max_tokens=100, seed=seed)) for seed in range(8)]
    await pair.eventually(lambda: len(pair.decodes[0].groups) == 8)
    pair.decodes[1].max_running = 64
    return tasks, len(pair.decodes[1].opened)


async def test_suspicion_has_a_budget(pair, monkeypatch):
    monkeypatch.setattr("outrider.service.liveness.SILENT_SECONDS", FOREVER_SECONDS)
    tasks, num_refused = await eight_on_one_node(pair)
    pair.decodes[0].freeze()
    await pair.eventually(lambda: len(pair.decodes[1].opened) > num_refused)
    await asyncio.sleep(5 * RETRY_SECONDS)
    assert len(pair.decodes[1].opened) - num_refused == 1, "of eight requests one may move on a suspicion"
    pair.decodes[0].thaw()
    answers = await asyncio.gather(*tasks)
    assert all(len(answer.token_ids()) == 100 for answer in answers)
    await pair.is_empty()


async def test_the_work_of_a_silent_node_moves_while_the_others_are_on_time(pair):
    tasks, num_refused = await eight_on_one_node(pair)
    silent = pair.link_of(pair.decodes[0])
    pair.decodes[0].freeze()
    await pair.eventually(lambda: len(pair.decodes[1].opened) == num_refused + 8)
    assert silent.is_silent
    answers = await asyncio.gather(*tasks)
    assert all(len(answer.token_ids()) == 100 for answer in answers)
    pair.decodes[0].thaw()
    await pair.eventually(lambda: not silent.is_silent)
    await pair.is_empty()


async def test_nobody_moves_while_every_node_is_late(pair):
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    task, *_ = await pair.begin(LONG)
    num_opened = pair.num_opened
    for node in pair.decodes:
        node.freeze()
    await pair.eventually(lambda: all(link.is_late for link in pair.service.nodes.decode_nodes))
    await asyncio.sleep(3 * RETRY_SECONDS)
    assert pair.num_opened == num_opened
    for node in pair.decodes:
        node.thaw()
    assert len((await task).token_ids()) == LONG


async def test_a_late_prefill_node_is_not_waited_for_where_there_is_another(pair):
    for node in pair.prefills:
        node.prefill_seconds = 30.0
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    task = asyncio.ensure_future(pair.generate(max_tokens=50))
    await pair.eventually(lambda: any(node.num_active for node in pair.prefills))
    busy = next(node for node in pair.prefills if node.num_active)
    for node in pair.prefills:
        node.prefill_seconds = 0.0
    busy.freeze()
    assert len((await asyncio.wait_for(task, PATIENCE_SECONDS)).token_ids()) == 50
    busy.thaw()
    await pair.is_empty()


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("numerics", ["exact (fake)", "batch-dependent (torch bfloat16)"])
async def test_work_stays_on_a_draining_node_until_another_has_room(pair, numerics):
    """A full queue does not end the request."""
    for node in pair.decodes:
        node.model = fake_model_info(numerics=numerics)
    await pair.serve(max_waiting=0)
    task, busy, free = await pair.begin(LONG)
    free.max_running = 0
    busy.state = NodeState.DRAINING
    await pair.eventually(lambda: len(pair.service.nodes.decode_nodes) == 1)
    answer = await pair.finish(task)
    assert len(answer.token_ids()) == LONG
    assert answer.summary.metrics.attempts == 1
    await pair.is_empty()
