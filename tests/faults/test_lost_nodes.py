"""Killed and frozen processes: clients get their answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from pathlib import Path

import pytest

from outrider.client import Client
from outrider.cluster.child import ChildState
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.cpu_turns import TURN_TAKEN_OVER, SharedTurns
from outrider.engine.processor import usable_cpus
from outrider.errors import NotFoundError, OutriderError
from outrider.rpc.channels import open_channel
from outrider.v1 import node_pb2, node_pb2_grpc
from outrider.wire.node import REPORT
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.cluster_nodes import wait_for_node

PROMPT = [(i * 13) % 250 + 20 for i in range(150)]
REPETITIVE = {"logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}, "ignore_eos": True}
LONG = {"max_tokens": 700, "seed": 3, "temperature": 0.9, **REPETITIVE}
LOST_SECONDS = 20.0  # shorter than every timeout except the liveness timeout


@pytest.fixture(scope="module")
def faulty(start_cluster, tmp_path_factory):
    """A cluster whose nodes are killed by tests, and come back on the same ports.

    Its nodes take turns on the processors, so that a lost node may have held the turn.
    """
    turns_file = tmp_path_factory.mktemp("turns") / "turns"
    settings = [f"model.turns_file={turns_file}"]
    settings += [f"model.num_threads={len(usable_cpus())}", f"model.cpus={','.join(map(str, usable_cpus()))}"]
    with start_cluster(None, *settings) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster)


@pytest.fixture(autouse=True)
def whole_again(faulty):
    """Every test begins with all nodes serving and ends with nothing held."""
    faulty.wait_until_all_serve()
    yield
    for node in faulty.cluster.nodes:
        with contextlib.suppress(NotFoundError):  # the process does not run
            faulty.cluster.kill(node.name, signal.SIGCONT)
    faulty.wait_until_all_serve()
    faulty.wait_until_nothing_is_held()


@pytest.fixture(scope="module")
def undisturbed(faulty):
    faulty.wait_until_all_serve()
    token_ids, summary = faulty.generate(PROMPT, **LONG)
    assert summary.metrics.speculation.num_accepted_draft_tokens > 0
    return token_ids


def stream_with_a_fault(faulty, after_tokens, fault, **options):
    """Returns the token ids of a stream during which `fault()` is called once, after `after_tokens` tokens."""
    with faulty.client.generate(PROMPT, **{**LONG, **options}) as stream:
        is_done = False
        for _ in stream:
            if not is_done and len(stream.token_ids()) >= after_tokens:
                fault()
                is_done = True
        assert is_done
        return stream.token_ids()


@pytest.mark.parametrize(
    ("name", "number", "after_tokens"),
    [("draft-0", signal.SIGKILL, 200), ("draft-0", signal.SIGSTOP, 1), ("prefill-0", signal.SIGKILL, 50)],
)
def test_losing_a_node_beside_the_decode_node_changes_no_token(faulty, undisturbed, name, number, after_tokens):
    assert stream_with_a_fault(faulty, after_tokens, lambda: faulty.cluster.kill(name, number)) == undisturbed


def test_a_draft_node_that_comes_back_in_mid_stream_changes_no_token(faulty, undisturbed):
    lose = functools.partial(lose_for_a_while, faulty, "draft-0", signal.SIGSTOP)
    assert stream_with_a_fault(faulty, 100, lose) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_waits_until_the_only_decode_node_is_back(faulty, undisturbed, number):
    lose = functools.partial(lose_for_a_while, faulty, "decode-0", number)
    assert stream_with_a_fault(faulty, 20, lose) == undisturbed


def test_a_constrained_answer_goes_on_in_its_grammar_on_the_node_that_is_back(faulty):
    """An answer's place in its grammar depends only on its tokens, so any node can find it."""
    options = {"regex": "([a-f]{1,9}[0-9 ]){30,60}end", "max_tokens": 500, "logit_bias": {}, "ignore_eos": False}
    whole, _ = faulty.generate(PROMPT, **{**LONG, **options})
    assert len(whole) > 60
    plain, _ = faulty.generate(PROMPT, speculation=False, **{**LONG, **options})
    assert plain == whole
    lose = functools.partial(lose_for_a_while, faulty, "decode-0", signal.SIGKILL)
    assert stream_with_a_fault(faulty, 20, lose, **options) == whole


def lose_for_a_while(faulty, name, number):
    """Kills a node, which the supervisor restarts, or freezes it until the router has declared it lost."""
    faulty.cluster.kill(name, number)
    if number is signal.SIGSTOP:
        faulty.wait_for(lambda status: any(node.state.name == "LOST" for node in status.nodes))
        faulty.cluster.kill(name, signal.SIGCONT)


def test_nodes_go_on_beside_one_that_keeps_the_processors_for_ever(faulty, undisturbed):
    """The test's process takes a turn on the shared processors and shows no sign of life, as a frozen node would."""
    library = choose_kernels().library
    if library is None:
        pytest.skip("turns need native kernels")
    (shared,) = {node.description["cpu_turns"] for node in faulty.cluster.nodes if "cpu_turns" in node.description}
    num_taken = logs_of(faulty).count(TURN_TAKEN_OVER)
    turns = SharedTurns(KernelLibrary(library), Path(shared))
    assert turns.take(10.0)
    assert turns.keep(0.5)
    assert faulty.generate(PROMPT, **LONG)[0] == undisturbed
    assert not turns.keep(0.5)  # the turn was taken away
    assert logs_of(faulty).count(TURN_TAKEN_OVER) > num_taken


def logs_of(faulty):
    return "".join(node.log_path.read_text() for node in faulty.cluster.nodes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nodes_free_the_work_of_a_lost_router(faulty, number):
    decode, router = faulty.cluster.node("decode-0").address, faulty.cluster.node("router")
    # The work is long enough to last until the node notices the loss.
    stream = faulty.client.generate(PROMPT, max_tokens=1800, seed=3, ignore_eos=True, speculation=False, n=16)
    deltas = iter(stream)
    next(deltas)
    faulty.cluster.kill("router", number)
    assert asyncio.run(seconds_until_free(decode)) < LOST_SECONDS
    if number is signal.SIGSTOP:
        faulty.cluster.kill("router", signal.SIGCONT)
        assert next(deltas).token_ids, "the answer goes on once the router does"
        stream.cancel()
    else:
        with pytest.raises(OutriderError):
            for _ in deltas:
                pass
    # The supervisor may not have seen the kill yet, so the state SERVING is not enough.
    restarts = router.num_restarts + (number is signal.SIGKILL)
    wait_for_node(
        faulty.cluster,
        "router",
        lambda node: node.num_restarts >= restarts and node.state is ChildState.SERVING,
        timeout_seconds=START_SECONDS,
    )
    faulty.client = Client(faulty.router_address)


async def seconds_until_free(decode_address):
    started = time.monotonic()
    async with open_channel(decode_address) as channel:
        request = node_pb2.WatchNodeRequest(interval_milliseconds=100)
        reports = node_pb2_grpc.NodeServiceStub(channel).Watch(request)
        try:
            async with asyncio.timeout(3 * LOST_SECONDS):
                async for proto in reports:
                    report = REPORT.from_proto(proto)
                    if report.load.kv_blocks_free == report.load.kv_blocks_total and report.load.num_running == 0:
                        return time.monotonic() - started
        finally:
            reports.cancel()
    raise AssertionError("the reports ended")
