"""Any bytes to any method of the router give a meaningful status, and no other client waits."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from outrider.v1 import router_pb2
from tests.fuzz.messages import fuzzed, wire_bytes
from tests.router.threaded_router import ThreadedRouter

R, E = router_pb2, vllm_engine_pb2
ENGINE = "/vllm.grpc.engine.VllmEngine/"
METHODS = {
    "Generate": R.GenerateRequest,
    "Complete": R.GenerateRequest,
    "Resume": R.ResumeRequest,
    "Abort": R.AbortRequest,
    "Tokenize": R.TokenizeRequest,
    "Detokenize": R.DetokenizeRequest,
    "GetModel": R.GetModelRequest,
    ENGINE + "Generate": E.GenerateRequest,
    ENGINE + "Abort": E.AbortRequest,
    ENGINE + "GetLoads": E.GetLoadsRequest,
    ENGINE + "Embed": E.EmbedRequest,
}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # the adapter has another fingerprint
}
"""Statuses of a client's own mistakes. UNKNOWN, INTERNAL and UNAVAILABLE would be failures of the router."""
MAX_STALL_SECONDS = 1.0


@pytest.fixture(scope="module")
def serving():
    serving = ThreadedRouter()
    yield serving
    serving.stop()


@pytest.mark.parametrize("method", METHODS)
def test_any_bytes_get_a_status_and_stall_nobody(serving, method):
    short_window = {"resume_window": None} if "resume_window" in METHODS[method].DESCRIPTOR.fields_by_name else {}

    @fuzzed(12)
    @given(data=wire_bytes(METHODS[method], **short_window))
    def send(data):
        status, _ = serving.call(method, data)
        assert status is grpc.StatusCode.OK or status in REFUSALS, (status, data)

    send()
    assert serving.longest_stall_seconds < MAX_STALL_SECONDS
    running = serving.cluster.service.requests
    serving.run(serving.cluster.eventually(lambda: running.is_idle))
    answer = serving.run(serving.cluster.generate(max_tokens=8))
    assert len(answer.token_ids()) == 8


@fuzzed(10)
@given(text=st.text(max_size=200), seed=st.integers(0, 2**64 - 1), num=st.integers(1, 20))
def test_any_text_is_answered_alike_by_both_calls(serving, text, seed, num):
    request = R.GenerateRequest(text=text or "x", sampling=R.SamplingParams(seed=seed, max_tokens=num))
    status, streamed = serving.call("Generate", request.SerializeToString())
    again, (whole,) = serving.call("Complete", request.SerializeToString())
    assert status is again is grpc.StatusCode.OK
    events = [R.GenerateResponse.FromString(data) for data in streamed]
    streamed_ids = [token_id for event in events for token_id in event.delta.token_ids]
    assert streamed_ids == list(R.CompleteResponse.FromString(whole).completions[0].token_ids)
