"""A prefill node that lies, fails, floods or stalls: eight streams get their tokens from an honest one."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.node import NodeLoad, NodeReport, NodeState
from outrider.wire.node import ReportWriter
from router.nodes.link import MAX_CONDITION, shorten_condition
from tests.support.router_fakes.node import _FakeNodeServicer

NUM_STREAMS = 8
NUM_TOKENS = 40


def pushes_nothing(node):
    node.pushes = False


def fails(node):
    node.fails_with = grpc.StatusCode.INTERNAL


def stalls(node):
    node.freeze()


def boasts(node):
    """Reports that the node is never busy or late and has unlimited room, and pushes nothing."""
    load = NodeLoad(num_outstanding_tokens=0, kv_blocks_free=2**31 - 1, tokens_per_second=1e30)
    node.pushes = False
    node.report = lambda: NodeReport(
        state=NodeState.SERVING,
        incarnation=node.incarnation,
        mark=2**62,
        expected_step_seconds=4000.0,
        step_age_seconds=0.0,
        load=load,
    )


def test_a_condition_is_one_printable_line():
    assert shorten_condition("refused: \x1b[31mred\x00\n\nand\u202e  more") == "refused: [31mred and more"
    assert shorten_condition("x" * 10**6) == "x" * (MAX_CONDITION - 1) + "…"


BEHAVIOURS = [pushes_nothing, fails, stalls, boasts]


async def honest_streams(cluster):
    """Runs the streams. Returns the token ids of each."""
    answers = await asyncio.gather(*(cluster.generate(seed=n, max_tokens=NUM_TOKENS) for n in range(NUM_STREAMS)))
    return [answer.token_ids() for answer in answers]


@pytest.mark.parametrize("behave", BEHAVIOURS)
async def test_streams_go_on_with_the_honest_node(node_pair, behave):
    await node_pair.serve(kv_ready_timeout_seconds=1.0)
    undisturbed = await honest_streams(node_pair)
    honest, hostile = sorted(node_pair.prefills, key=lambda node: len(node.requests))  # `hostile` holds the prefix
    num_asked, num_honest = len(hostile.requests), len(honest.requests)
    behave(hostile)
    assert await honest_streams(node_pair) == undisturbed
    assert len(hostile.requests) > num_asked, "the router did ask it"
    assert len(honest.requests) > num_honest
    hostile.thaw()


async def test_a_flood_of_reports_leaves_the_loop_to_the_others(node_pair, monkeypatch):
    """The node reports as fast as the stream allows; usually it reports five times a second."""
    num_reports = 0

    async def flood(servicer, _request, _context):
        nonlocal num_reports
        while True:
            num_reports += 1
            yield ReportWriter().to_proto(servicer._node.report())

    monkeypatch.setattr(_FakeNodeServicer, "Watch", flood)
    await node_pair.serve()
    tokens = await honest_streams(node_pair)
    letters_of = {seed: [97 + (seed + 7 * place) % 26 for place in range(NUM_TOKENS)] for seed in range(NUM_STREAMS)}
    assert tokens == list(letters_of.values())
    assert num_reports > NUM_TOKENS
