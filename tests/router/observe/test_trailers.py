"""The figures in every call's trailers, for tools that show nothing else."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.node_stamp import NodeVersion, format_node_versions, parse_node_versions
from outrider.request import VerificationMethod
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS

TOKENS, TTFT, ACCEPTANCE_LENGTH = "outrider-tokens", "outrider-ttft-ms", "outrider-acceptance-length"
DETAILS = "grpc-status-details-bin"


async def finish(call):
    """Returns (trailers, messages, error) of a whole call, streamed or not."""
    messages, error = [], None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            messages = [message async for message in call] if hasattr(call, "read") else [await call]
    except grpc.aio.AioRpcError as caught:
        error = caught
    return dict(await call.trailing_metadata()), messages, error


@pytest.fixture(params=["Generate", "Complete"])
def call(request, cluster):
    def start(**fields):
        return getattr(cluster.stub, request.param)(cluster.request(**fields))

    return start


async def test_an_answer_says_its_tokens_ttft_and_acceptance_length(cluster, call):
    cluster.decode.num_accepted_per_step = 2
    cluster.decode.tokens_per_step = 3
    await cluster.serve()
    trailers, messages, _ = await finish(call(max_tokens=9, n=2))
    metrics = messages[-1].summary.metrics
    assert trailers[TOKENS] == "18"
    assert float(trailers[TTFT]) == pytest.approx(metrics.ttft_seconds * 1e3, abs=0.06)
    assert float(trailers[ACCEPTANCE_LENGTH]) == metrics.speculative_decoding.mean_acceptance_length == 3.0


async def test_an_answer_names_the_nodes_that_worked_on_it(cluster, call):
    cluster.decode.name = "a node; of \x00 ünusual name" + 200 * "!"
    await cluster.serve()
    trailers, _, _ = await finish(call(max_tokens=8))
    decode, prefill = parse_node_versions(trailers["outrider-nodes"])
    assert decode == NodeVersion(("a_node__of____nusual_name" + 200 * "!")[:100], "decode", "fake", "exact (fake)")
    assert prefill == NodeVersion("prefill-0", "prefill", "fake", "exact (fake)")
    many = [NodeVersion(f"node-{number}", "decode", "fake", "exact (fake)") for number in range(100)]
    text = format_node_versions(many)
    assert 900 < len(text) <= 1024
    assert list(parse_node_versions(text)) == many[: len(parse_node_versions(text))]


async def test_what_was_not_measured_is_left_out(cluster, call):
    await cluster.serve()
    trailers, _, _ = await finish(call(max_tokens=8))
    assert (trailers[TOKENS], ACCEPTANCE_LENGTH in trailers) == ("8", False)


@pytest.mark.parametrize(
    ("method", "temperature", "said"),
    [
        ("COUPLED", 1.0, None),
        ("REJECTION", 1.0, "rejection"),
        ("TYPICAL", 1.0, "typical (lossy)"),
        ("TYPICAL", 0.0, None),
    ],
)
async def test_an_answer_says_if_its_tokens_depend_on_drafts(cluster, call, method, temperature, said):
    await cluster.serve()
    speculation = router_pb2.SpeculationOptions(method=f"VERIFICATION_METHOD_{method}")
    trailers, _, _ = await finish(call(temperature=temperature, speculation=speculation))
    assert trailers.get("outrider-verification") == said
    in_force = VerificationMethod[method] if said else VerificationMethod.COUPLED
    assert cluster.decode.opened[-1].options.verification_method is in_force


async def test_the_routers_method_is_that_of_requests_that_name_none(cluster, call):
    await cluster.serve(verification_method="typical")
    trailers, _, _ = await finish(call(temperature=1.0))
    assert trailers["outrider-verification"] == "typical (lossy)"
    model = await cluster.stub.GetModel(router_pb2.GetModelRequest())
    assert model.verification_method == router_pb2.VERIFICATION_METHOD_TYPICAL


async def test_an_aborted_answer_says_what_there_was_of_it(cluster, call):
    cluster.decode.step_seconds = 0.02  # slow, so that the test can interrupt it
    await cluster.serve()
    running = asyncio.ensure_future(finish(call(request_id="doomed", max_tokens=400)))
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    assert (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="doomed"))).aborted
    trailers, messages, error = await running
    assert error is None
    assert int(trailers[TOKENS]) == messages[-1].summary.usage.num_generated_tokens > 0
    assert float(trailers[TTFT]) > 0
    (record,) = cluster.context.records
    assert record.state == "aborted"


async def test_a_failed_answer_has_its_figures_beside_the_errors_details(cluster, call):
    cluster.decode.step_seconds = 0.02  # slow, so that the test can interrupt it
    await cluster.serve(no_node_timeout_seconds=0.3)
    running = asyncio.ensure_future(finish(call(max_tokens=400)))
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    await cluster.decode.stop()
    trailers, _, error = await running
    assert cluster.failure_of(error).reason == "NO_NODE"
    assert 0 < int(trailers[TOKENS]) < 400
    assert float(trailers[TTFT]) > 0


async def test_a_refused_request_has_made_no_token(cluster, call):
    await cluster.serve()
    trailers, _, error = await finish(call(max_tokens=0))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert {key for key in trailers if key.startswith("outrider-")} == {TOKENS}
    assert trailers[TOKENS] == "0"
    assert DETAILS in trailers


async def test_an_answer_that_is_taken_over_counts_the_tokens_of_both_routers(router_pair):
    await router_pair.serve()
    _, started, _ = await router_pair.begin(max_tokens=100)
    stored = router_pair.records.get("r").tokens
    await router_pair.first.eventually(lambda: stored.token_ids().get(0), what="tokens in the store")
    await router_pair.kill_first()
    request = router_pb2.ResumeRequest(request_id="r", next_positions={0: started.num_prompt_tokens})
    trailers, messages, error = await finish(router_pair.second.stub.Resume(request, timeout=PATIENCE_SECONDS))
    assert error is None
    assert trailers[TOKENS] == "100"
    assert messages[-1].summary.usage.num_generated_tokens == 100
    (record,) = router_pair.second.context.records
    assert sum(step.num_tokens for step in record.steps) < record.num_generated_tokens == 100
