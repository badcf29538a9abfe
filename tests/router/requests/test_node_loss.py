"""Nodes that die, freeze, fail, restart or serve another model."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import structlog

from outrider.errors import MismatchError
from outrider.node import FeatureFormat, NodeRole, NodeState
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.fake_resolver import FakeResolver
from tests.support.router_fakes import FakeDecodeNode, FakeNode, FakePrefillNode, fake_model_info
from tests.support.router_fakes.decode_node import letters

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def start_stream(cluster, *, num_tokens=400, **fields):
    """Starts a long request. Returns a task that ends with its answer."""
    return asyncio.ensure_future(cluster.generate(max_tokens=num_tokens, **fields))


async def status_of(cluster, name):
    watch = cluster.stub.WatchCluster(router_pb2.WatchClusterRequest())
    view = await watch.read()
    watch.cancel()
    return next(node for node in view.nodes if node.name == name)


async def test_without_a_decode_node_a_request_waits_as_long_as_is_configured(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve(no_node_timeout_seconds=0.5)
    streaming = asyncio.ensure_future(cluster.fail(max_tokens=400))
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    await cluster.decode.stop()
    failure = await streaming
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NO_NODE")
    assert failure.retry_seconds > 0
    await cluster.eventually(lambda: cluster.prefill.num_active == 0)
    status = await status_of(cluster, "decode-0")
    assert status.state == router_pb2.NODE_STATE_LOST
    assert (status.step, status.num_running, status.kv_blocks_total) == (0, 0, 0)
    assert status.condition.startswith("unreachable: ")
    failure = await cluster.fail(max_tokens=8)
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NO_NODE"), "a new request is told as well"


@pytest.mark.parametrize("how", ["frozen", "restarted", "session broken", 8, 14, 2, 13])
async def test_an_answer_goes_on_when_its_only_decode_node_is_back_or_gives_it_up(cluster, how):
    """If `how` is a number, it is the gRPC status with which the node fails the group."""
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = start_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    if how == "frozen":
        cluster.decode.freeze()
        await cluster.eventually(lambda: not cluster.service.nodes.decode_nodes)
        cluster.decode.thaw()
    elif how == "restarted":
        gone, cluster.decode = cluster.decode, FakeDecodeNode()
        await gone.stop()
        await cluster.decode.start(gone.address)
        cluster.stack.push_async_callback(cluster.decode.stop)
    elif how == "session broken":
        await cluster.decode.break_sessions()
    else:
        cluster.decode.fail_groups(code=how)
    answer = await asyncio.wait_for(streaming, PATIENCE_SECONDS)
    again = cluster.decode.opened[-1]
    assert answer.token_ids() == letters(again, 0)
    assert len(again.samples[0].generated_token_ids) > 2
    assert answer.summary.metrics.attempts == 2
    assert cluster.service.requests.cluster_status().num_moves == 1
    assert len(cluster.decode.opened) == (1 if how == "restarted" else 2)
    assert (await status_of(cluster, "decode-0")).state == router_pb2.NODE_STATE_SERVING
    await cluster.is_empty()


@pytest.mark.parametrize("how", ["dies", "freezes"])
async def test_a_lost_prefill_node_without_another_leaves_the_prompt_to_the_decode_node(cluster, how):
    await cluster.serve()
    cluster.prefill.prefill_seconds = 4 * PATIENCE_SECONDS
    streaming = start_stream(cluster, num_tokens=20)
    await cluster.eventually(lambda: cluster.prefill.num_active == 1)
    if how == "dies":
        await cluster.prefill.stop()
    else:
        cluster.prefill.freeze()
    answer = await asyncio.wait_for(streaming, PATIENCE_SECONDS)
    assert len(answer.token_ids()) == 20
    retargeted = [command.transfer_id for command in cluster.decode.retargeted]
    assert retargeted[-1] == b""  # the router may try the lost node once more before it notices the loss
    assert answer.summary.metrics.attempts == 1 + len(retargeted) <= 3
    assert len(cluster.decode.opened) == 1, "the reservation stayed"


DIFFERENCES = {
    "in bfloat16, {} in float32: model.dtype of all prefill and decode nodes must be the same": {"dtype": "bfloat16"},
    "stranger serves other (264 tokens), {} fake-model (264 tokens)": {"name": "other"},
    "stranger has different weights, configuration or tokenizer of fake-model than {}": {},
}


@pytest.mark.parametrize(("told", "differs"), DIFFERENCES.items(), ids=["dtype", "name", "weights"])
async def test_a_node_with_another_model_is_refused_and_what_differs_is_named(cluster, told, differs):
    other = FakeDecodeNode(name="stranger", model=fake_model_info(fingerprint="0" * 64, **differs))
    other.state = NodeState.STARTING
    cluster.nodes.append(other)
    await cluster.serve()
    other.state = NodeState.SERVING
    links = cluster.service.nodes._links
    await cluster.eventually(lambda: any(link.refusal for link in links()))
    refused = next(link for link in links() if link.refusal)
    assert refused.refusal.endswith(told.format(cluster.service.nodes.served.node))
    for _ in range(4):
        assert (await cluster.generate(max_tokens=8)).token_ids()
    assert other.opened == []
    status = await status_of(cluster, "stranger")
    assert status.state == router_pb2.NODE_STATE_LOST
    assert status.condition == f"refused: {refused.refusal}"
    assert (await status_of(cluster, "decode-0")).condition == ""


FEATURES = FeatureFormat(fingerprint="1" * 64, width=576, dtype="bfloat16", taps=(2, 15, 27))


@pytest.mark.parametrize(("kind", "has"), [(FakeDecodeNode, True), (FakeDecodeNode, False), (FakePrefillNode, True)])
async def test_nodes_of_different_features_are_not_paired_and_both_are_named(cluster, kind, has):
    """A prompt's features go to the decode node with its KV, so all nodes must compute the same features or none."""
    cluster.decode.model = cluster.prefill.model = fake_model_info(features=None if has else FEATURES)
    other = kind(name="stranger", model=fake_model_info(features=FEATURES if has else None))
    other.state = NodeState.STARTING
    cluster.nodes.append(other)
    await cluster.serve()
    other.state = NodeState.SERVING
    links = cluster.service.nodes._links
    await cluster.eventually(lambda: any(link.refusal for link in links()))
    refused = next(link for link in links() if link.refusal)
    for part in ("stranger", "1" * 16, "taps 2, 15, 27", "none", "model.head"):
        assert part in refused.refusal
    assert cluster.decode.name in refused.refusal or cluster.prefill.name in refused.refusal
    for _ in range(4):
        assert (await cluster.generate(max_tokens=8)).token_ids()
    assert not (other.opened if kind is FakeDecodeNode else other.requests)
    for node in (cluster.decode, cluster.prefill):  # once these nodes have left, the stranger is approved
        cluster.nodes.remove(node)
        await node.stop()
    await cluster.eventually(lambda: refused.is_serving)


async def test_a_session_refused_by_the_node_names_both(cluster):
    await cluster.serve()
    cluster.decode.model = fake_model_info(fingerprint="9" * 64)
    link = cluster.service.nodes.decode_nodes[0]
    await cluster.decode.break_sessions()
    await cluster.eventually(lambda: bool(link.refusal))
    assert link.refusal.startswith("decode-0 has different weights")
    assert MismatchError("").reason == "MISMATCH"


async def test_a_head_in_decode_nodes_names_the_proposer_beside_draft_nodes_that_look_up(cluster):
    cluster.decode.model = fake_model_info(proposer="eagle3:parrot")
    cluster.nodes.append(FakeNode(NodeRole.DRAFT, name="draft-0", model=fake_model_info(proposer="ngram")))
    await cluster.serve()
    await cluster.eventually(lambda: cluster.service.nodes.proposer()[0] == "eagle3:parrot")


async def test_draft_nodes_are_watched_and_name_the_proposer(cluster):
    model = fake_model_info(fingerprint="d" * 64, proposer="draft_model:tiny", num_speculative_tokens=6)
    cluster.nodes.append(FakeNode(NodeRole.DRAFT, name="draft-0", model=model))
    await cluster.serve()
    await cluster.eventually(lambda: cluster.service.nodes.proposer()[0] == "draft_model:tiny")
    model = await cluster.stub.GetModel(router_pb2.GetModelRequest())
    assert (model.proposer, model.num_speculative_tokens) == ("draft_model:tiny", 4)
    assert (await status_of(cluster, "draft-0")).role == router_pb2.NODE_ROLE_DRAFT
    with structlog.testing.capture_logs() as log:
        await cluster.nodes.pop().stop()
        await cluster.eventually(
            lambda: ("node lost", "draft-0") in [(line["event"], line.get("node")) for line in log]
        )


async def test_a_draft_node_of_another_vocabulary_is_refused(cluster):
    model = fake_model_info(vocabulary_fingerprint="b" * 64)
    cluster.nodes.append(FakeNode(NodeRole.DRAFT, name="draft-0", model=model))
    await cluster.serve()
    links = cluster.service.nodes._links
    await cluster.eventually(lambda: any("drafters need the target's tokenizer" in link.refusal for link in links()))


async def test_the_router_waits_until_nodes_serve(cluster):
    cluster.decode.state = NodeState.STARTING
    await cluster.start()
    starting = asyncio.ensure_future(cluster.service.start(cluster.address))
    await cluster.eventually(lambda: len(cluster.service.nodes.prefill_nodes) == 1)
    assert not starting.done()
    failure = await cluster.fail(max_tokens=8)
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NO_NODE")
    assert (await status_of(cluster, "decode-0")).state == router_pb2.NODE_STATE_STARTING
    cluster.decode.state = NodeState.SERVING
    await asyncio.wait_for(starting, PATIENCE_SECONDS)
    assert (await cluster.generate(max_tokens=8)).token_ids()


async def test_a_name_with_several_addresses_is_several_nodes_and_changes_are_followed(cluster):
    second = FakeDecodeNode(name="decode-1")
    addresses: dict[str, list[str]] = {}

    async def resolve(target):
        return addresses.get(target, [target])

    for node in (cluster.decode, second, cluster.prefill):
        await node.start()
    cluster.stack.push_async_callback(second.stop)
    addresses["decode.test:1"] = [cluster.decode.address]
    await cluster.serve(resolver=resolve, decode_targets=("decode.test:1",), resolve_interval_seconds=0.1)
    assert len(cluster.service.nodes.decode_nodes) == 1
    addresses["decode.test:1"] = [cluster.decode.address, second.address]
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 2)
    await asyncio.gather(*(cluster.generate(text=f"{i}", max_tokens=20) for i in range(8)))
    assert cluster.decode.opened
    assert second.opened
    await second.stop()
    addresses["decode.test:1"] = [cluster.decode.address]
    await cluster.eventually(lambda: len(cluster.service.nodes.statuses()) == 2)


async def test_the_requests_of_a_node_that_drains_and_is_gone_from_dns_end_and_it_is_then_forgotten(cluster):
    second = FakeDecodeNode(name="decode-1")
    cluster.decode.step_seconds = second.step_seconds = 0.02
    for node in (cluster.decode, second, cluster.prefill):
        await node.start()
    cluster.stack.push_async_callback(second.stop)
    resolver = FakeResolver(
        {"decode.test:1": [cluster.decode.address], cluster.prefill.address: [cluster.prefill.address]}
    )
    await cluster.serve(resolver=resolver, decode_targets=("decode.test:1",), resolve_interval_seconds=0.1)
    running = asyncio.ensure_future(cluster.generate(max_tokens=50))
    await cluster.eventually(lambda: cluster.decode.groups)
    cluster.decode.state = NodeState.DRAINING
    resolver.set("decode.test:1", second.address)
    num_lookups = resolver.num_lookups
    await cluster.eventually(lambda: resolver.num_lookups > num_lookups + 4)  # two lookups per name
    assert not running.done()
    assert len((await running).token_ids()) == 50
    await cluster.decode.stop()
    await cluster.eventually(
        lambda: [status.name for status in cluster.service.nodes.statuses()] == ["prefill-0", "decode-1"]
    )


async def test_a_name_that_is_not_known_is_a_node_that_is_not_there_and_the_router_says_so(cluster, monkeypatch):
    monkeypatch.setattr("router.nodes.directory.WAITING_LOG_SECONDS", 0.05)
    await cluster.prefill.start()
    resolver = FakeResolver({cluster.prefill.address: [cluster.prefill.address]})
    with structlog.testing.capture_logs() as log:
        await cluster.start(resolver=resolver, decode_targets=("decode.test:1",), resolve_interval_seconds=0.1)
        starting = asyncio.ensure_future(cluster.service.start(cluster.address))
        await cluster.eventually(lambda: any(line["event"] == "waiting for nodes" for line in log))
    waiting = [line for line in log if line["event"] == "waiting for nodes"][-1]
    assert "a decode node" in waiting["missing"]
    assert waiting["unresolved"] == {"decode.test:1": "[Errno -2] Name or service not known"}
    status = await status_of(cluster, "decode@decode.test:1")
    assert (status.state, status.target) == (router_pb2.NODE_STATE_STARTING, "decode.test:1")
    assert status.condition == "unreachable: [Errno -2] Name or service not known"
    resolver.set("decode.test:1", cluster.decode.address)
    await asyncio.wait_for(starting, PATIENCE_SECONDS)
    assert (await cluster.generate(max_tokens=8)).token_ids()


async def test_one_node_under_two_names_is_one_node(cluster):
    async def resolve(target):
        return [f"ipv4:{cluster.decode.address}"] if target == "alias:1" else [target]

    await cluster.decode.start()
    targets = (cluster.decode.address, "alias:1")
    await cluster.serve(resolver=resolve, decode_targets=targets)
    links = cluster.service.nodes._links
    await cluster.eventually(
        lambda: [link.is_alias for link in links() if link.role is NodeRole.DECODE].count(True) == 1
    )
    assert (await cluster.generate(max_tokens=8)).token_ids()
    assert [status.name for status in cluster.service.nodes.statuses()] == ["prefill-0", "decode-0"]
    assert cluster.decode.num_sessions == 1


async def test_nodes_that_are_equal_take_turns(node_pair):
    await node_pair.serve()
    used = []
    for index in range(8):
        answer = await node_pair.generate(text=f"prompt {index}", max_tokens=2)
        used += answer.summary.metrics.nodes
        await node_pair.is_empty()
    assert sorted(set(used)) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert {used.count(name) for name in set(used)} == {4}


async def test_equal_prompts_go_to_the_node_that_holds_their_prefix(node_pair):
    await node_pair.serve()
    prompt = "a long common beginning " * 10
    for index in range(6):
        await node_pair.generate(text=prompt + str(index), max_tokens=2)
    assert sorted(len(node.opened) for node in node_pair.decodes) == [0, 6]
