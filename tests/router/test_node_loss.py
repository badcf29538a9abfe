"""Nodes that die, freeze, fail, restart or do not fit."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import structlog

from outrider.errors import MismatchError
from outrider.node import NodeRole, NodeState
from outrider.service.resolver import FakeResolver
from outrider.v1 import router_pb2
from router.fakes import FakeDecodeNode, FakeNode, FakePrefillNode, fake_model_info

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def failing_stream(cluster, request_id="", **sampling):
    """Starts a long request; gives a task that ends with its failure."""
    call = cluster.stub.Generate(
        cluster.request(request_id=request_id, sampling=cluster.sampling(**{"max_tokens": 400} | sampling))
    )

    async def read():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return cluster.failure_of(caught.value)

    return asyncio.ensure_future(read())


async def status_of(cluster, name):
    watch = cluster.stub.WatchCluster(router_pb2.WatchClusterRequest())
    view = await watch.read()
    watch.cancel()
    return next(node for node in view.nodes if node.name == name)


async def test_a_decode_node_that_dies_is_unavailable_with_retry_info_at_once(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    await cluster.decode.stop()
    failure = await asyncio.wait_for(streaming, 2)
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NODE_LOST")
    assert failure.retry_seconds > 0
    await cluster.eventually(lambda: cluster.prefill.num_active == 0)
    status = await status_of(cluster, "decode-0")
    assert status.state == router_pb2.NODE_STATE_LOST
    assert (status.step, status.num_running, status.kv_blocks_total) == (0, 0, 0)


async def test_a_restarted_decode_node_serves_the_next_request(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    port = int(cluster.decode.address.rpartition(":")[2])
    await cluster.decode.stop()
    await streaming
    waiting = asyncio.ensure_future(cluster.generate(sampling=cluster.sampling()))  # waits for the node
    restarted = FakeDecodeNode()
    cluster.prefill._decode_nodes = (restarted,)
    await restarted.start(port)
    cluster.stack.push_async_callback(restarted.stop)
    assert (await waiting).token_ids()
    assert (await status_of(cluster, "decode-0")).state == router_pb2.NODE_STATE_SERVING


async def test_a_frozen_decode_node_is_lost_when_its_progress_stops(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    cluster.decode.freeze()
    failure = await asyncio.wait_for(streaming, 4)
    assert failure.code is UNAVAILABLE
    assert "progress" in failure.message
    cluster.decode.thaw()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 1)
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()
    await cluster.is_empty()


@pytest.mark.parametrize("how", ["dies", "freezes"])
async def test_a_prefill_node_that_is_lost_fails_only_the_requests_on_it(cluster, how):
    cluster.decode.step_seconds = 0.01
    await cluster.serve()
    ready = asyncio.ensure_future(cluster.generate(request_id="ready", sampling=cluster.sampling(max_tokens=150)))
    await cluster.eventually(lambda: any(group.is_ready for group in cluster.decode.groups))
    cluster.prefill.prefill_seconds = 30.0
    prefilling = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.prefill.num_active == 1)
    if how == "dies":
        await cluster.prefill.stop()
    else:
        cluster.prefill.freeze()
    failure = await asyncio.wait_for(prefilling, 4)
    assert failure.code is UNAVAILABLE
    assert failure.retry_seconds > 0
    await cluster.eventually(lambda: len(cluster.decode.groups) == 1, seconds=1, what="the failed group is freed")
    assert len((await ready).token_ids()) == 150


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION]
)
async def test_a_prefill_that_fails_is_unavailable_and_frees_the_group(cluster, code):
    cluster.prefill.fails_with = code
    await cluster.serve()
    failure = await (await failing_stream(cluster))
    assert failure.code is UNAVAILABLE
    assert failure.retry_seconds > 0
    assert "prefill-0" in failure.message
    await cluster.is_empty()
    cluster.prefill.fails_with = None
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()


async def test_kv_that_never_arrives_is_unavailable(cluster):
    cluster.prefill.pushes = False
    await cluster.serve(kv_ready_timeout_seconds=1.0)
    failure = await (await failing_stream(cluster))
    assert failure.code is UNAVAILABLE
    assert "did not arrive" in failure.message
    await cluster.is_empty()


async def test_a_decode_node_that_does_not_answer_an_open_is_unavailable(cluster):
    cluster.decode.answers_opens = False
    await cluster.serve(open_timeout_seconds=1.0)
    failure = await asyncio.wait_for(await failing_stream(cluster), 5)
    assert failure.code is UNAVAILABLE
    assert "does not answer" in failure.message
    await cluster.is_empty()


async def test_a_broken_session_is_dialled_again(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    await cluster.decode.break_sessions()
    assert (await asyncio.wait_for(streaming, 2)).code is UNAVAILABLE
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 1)
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()
    await cluster.is_empty()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (8, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (3, grpc.StatusCode.INVALID_ARGUMENT),
        (14, UNAVAILABLE),
        (2, UNAVAILABLE),
        (13, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_group_that_a_node_gives_up_has_its_code(cluster, code, expected):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    cluster.decode.fail_groups(code=code, message="cannot go on")
    assert (await streaming).code is expected
    await cluster.is_empty()


async def test_tokens_at_a_wrong_position_are_never_passed_on(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    streaming = await failing_stream(cluster)
    await cluster.eventually(lambda: any(group.num_sent[0] > 2 for group in cluster.decode.groups))
    for group in cluster.decode.groups:
        group.num_sent[0] += 1
    assert (await streaming).code is grpc.StatusCode.INTERNAL
    await cluster.is_empty()


async def test_a_node_with_another_fingerprint_is_refused_and_both_are_named(cluster):
    other = FakeDecodeNode(name="stranger", model=fake_model_info(fingerprint="0" * 64))
    other.state = NodeState.STARTING
    cluster.nodes.append(other)
    await cluster.serve()
    other.state = NodeState.SERVING
    links = cluster.service.nodes._links
    await cluster.eventually(lambda: any(link.refusal for link in links()))
    refused = next(link for link in links() if link.refusal)
    served_by = cluster.service.nodes.served.node
    for part in ("stranger", "0" * 64, served_by, "f" * 64):
        assert part in refused.refusal
    for _ in range(4):
        assert (await cluster.generate(sampling=cluster.sampling())).token_ids()
    assert other.opened == []
    assert (await status_of(cluster, "stranger")).state == router_pb2.NODE_STATE_LOST


async def test_a_session_refused_by_the_node_names_both(cluster):
    await cluster.serve()
    cluster.decode.model = fake_model_info(fingerprint="9" * 64)
    link = cluster.service.nodes.decode_nodes[0]
    await cluster.decode.break_sessions()
    await cluster.eventually(lambda: bool(link.refusal))
    assert "9" * 64 in link.refusal
    assert "f" * 64 in link.refusal
    assert MismatchError("").reason == "MISMATCH"


async def test_draft_nodes_are_watched_and_name_the_proposer(cluster):
    model = fake_model_info(fingerprint="d" * 64, proposer="draft_model:tiny", num_speculative_tokens=6)
    cluster.nodes.append(FakeNode(NodeRole.DRAFT, name="draft-0", model=model))
    await cluster.serve()
    await cluster.eventually(lambda: cluster.service.nodes.proposer()[0] == "draft_model:tiny")
    model = await cluster.stub.GetModel(router_pb2.GetModelRequest())
    assert (model.proposer, model.num_speculative_tokens) == ("draft_model:tiny", 4)
    assert (await status_of(cluster, "draft-0")).role == router_pb2.NODE_ROLE_DRAFT


async def test_a_draft_node_of_another_vocabulary_is_refused(cluster):
    model = fake_model_info(vocabulary_fingerprint="b" * 64)
    cluster.nodes.append(FakeNode(NodeRole.DRAFT, name="draft-0", model=model))
    await cluster.serve()
    links = cluster.service.nodes._links
    await cluster.eventually(lambda: any("b" * 64 in link.refusal and "a" * 64 in link.refusal for link in links()))


async def test_the_router_waits_until_nodes_serve(cluster):
    cluster.decode.state = NodeState.STARTING
    await cluster.start()
    starting = asyncio.ensure_future(cluster.service.start(cluster.address))
    await cluster.eventually(lambda: len(cluster.service.nodes.prefill_nodes) == 1)
    assert not starting.done()
    failure = await cluster.fail(sampling=cluster.sampling())
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NO_NODE")
    assert (await status_of(cluster, "decode-0")).state == router_pb2.NODE_STATE_STARTING
    cluster.decode.state = NodeState.SERVING
    await asyncio.wait_for(starting, 5)
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()


async def test_without_nodes_waiting_requests_are_unavailable_after_a_while(cluster):
    await cluster.serve(no_node_timeout_seconds=0.2)
    await cluster.prefill.stop()
    await cluster.eventually(lambda: not cluster.service.nodes.prefill_nodes)
    failure = await cluster.fail(sampling=cluster.sampling())
    assert (failure.code, failure.reason) == (UNAVAILABLE, "NO_NODE")
    assert failure.retry_seconds > 0


async def test_a_draining_node_gets_no_new_request_and_finishes_its_own(cluster):
    second = FakeDecodeNode(name="decode-1")
    cluster.nodes.append(second)
    cluster.prefill._decode_nodes = (cluster.decode, second)
    for node in (cluster.decode, second):
        node.step_seconds = 0.005
    await cluster.serve()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 2)
    running = asyncio.ensure_future(cluster.generate(sampling=cluster.sampling(max_tokens=100)))
    await cluster.eventually(lambda: cluster.decode.groups or second.groups)
    busy, free = (cluster.decode, second) if cluster.decode.groups else (second, cluster.decode)
    busy.state = NodeState.DRAINING
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 1)
    for _ in range(3):
        await cluster.generate(sampling=cluster.sampling(max_tokens=2))
    assert (len(busy.opened), len(free.opened)) == (1, 3)
    assert len((await running).token_ids()) == 100


async def test_a_name_with_several_addresses_is_several_nodes_and_changes_are_followed(cluster):
    second = FakeDecodeNode(name="decode-1")
    cluster.prefill._decode_nodes = (cluster.decode, second)
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
    await asyncio.gather(*(cluster.generate(text=f"{i}", sampling=cluster.sampling(max_tokens=20)) for i in range(8)))
    assert cluster.decode.opened
    assert second.opened
    await second.stop()
    addresses["decode.test:1"] = [cluster.decode.address]
    await cluster.eventually(lambda: len(cluster.service.nodes.statuses()) == 2)


async def test_a_node_that_drains_and_is_gone_from_dns_finishes_its_requests_and_is_then_forgotten(cluster):
    second = FakeDecodeNode(name="decode-1")
    cluster.prefill._decode_nodes = (cluster.decode, second)
    cluster.decode.step_seconds = 0.02
    for node in (cluster.decode, second, cluster.prefill):
        await node.start()
    cluster.stack.push_async_callback(second.stop)
    resolver = FakeResolver(
        {"decode.test:1": [cluster.decode.address], cluster.prefill.address: [cluster.prefill.address]}
    )
    await cluster.serve(resolver=resolver, decode_targets=("decode.test:1",), resolve_interval_seconds=0.1)
    running = asyncio.ensure_future(cluster.generate(sampling=cluster.sampling(max_tokens=50)))
    await cluster.eventually(lambda: cluster.decode.groups)
    cluster.decode.state = NodeState.DRAINING
    resolver.set("decode.test:1", second.address)
    num_lookups = resolver.num_lookups
    await cluster.eventually(lambda: resolver.num_lookups > num_lookups + 4)  # two of each name
    assert not running.done()
    assert len((await running).token_ids()) == 50
    await cluster.decode.stop()
    await cluster.eventually(
        lambda: [status.name for status in cluster.service.nodes.statuses()] == ["prefill-0", "decode-1"]
    )


async def test_a_name_that_is_not_known_is_a_node_that_is_not_there_and_the_router_says_so(cluster, monkeypatch):
    monkeypatch.setattr("router.node_directory.WAITING_LOG_SECONDS", 0.05)
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
    await cluster.decode.start()
    resolver.set("decode.test:1", cluster.decode.address)
    await asyncio.wait_for(starting, 5)
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()


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
    assert (await cluster.generate(sampling=cluster.sampling())).token_ids()
    assert [status.name for status in cluster.service.nodes.statuses()] == ["prefill-0", "decode-0"]
    assert cluster.decode.num_sessions == 1


async def test_nodes_that_are_equal_take_turns(cluster):
    decodes = [cluster.decode, FakeDecodeNode(name="decode-1")]
    cluster.prefill._decode_nodes = tuple(decodes)
    prefills = [cluster.prefill, FakePrefillNode(decodes, name="prefill-1")]
    cluster.nodes += [decodes[1], prefills[1]]
    await cluster.serve()
    view = cluster.service.nodes
    await cluster.eventually(lambda: len(view.decode_nodes) == len(view.prefill_nodes) == 2)
    used = []
    for index in range(8):
        answer = await cluster.generate(text=f"prompt {index}", sampling=cluster.sampling(max_tokens=2))
        used += answer.summary.metrics.nodes
        await cluster.is_empty()
    assert sorted(set(used)) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert {used.count(name) for name in set(used)} == {4}


async def test_equal_prompts_go_to_the_node_that_holds_their_prefix(cluster):
    second = FakeDecodeNode(name="decode-1")
    cluster.nodes.append(second)
    cluster.prefill._decode_nodes = (cluster.decode, second)
    await cluster.serve()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 2)
    prompt = "a long common beginning " * 10
    for index in range(6):
        await cluster.generate(text=prompt + str(index), sampling=cluster.sampling(max_tokens=2))
    assert sorted((len(cluster.decode.opened), len(second.opened))) == [0, 6]


async def test_drain_lets_running_requests_end_and_takes_no_new_ones(cluster):
    cluster.decode.step_seconds = 0.002
    await cluster.serve()
    running = asyncio.ensure_future(cluster.generate(sampling=cluster.sampling(max_tokens=100)))
    await cluster.eventually(lambda: cluster.decode.num_blocks_used > 0)
    draining = asyncio.ensure_future(cluster.service.drain(10))
    await cluster.eventually(lambda: cluster.service.servicer.is_draining)
    assert (await cluster.fail(sampling=cluster.sampling())).code is UNAVAILABLE
    assert len((await running).token_ids()) == 100
    await asyncio.wait_for(draining, 1)
