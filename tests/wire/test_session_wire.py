"""All messages between router and decode node survive the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.errors import InvalidRequestError
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.protocol_versions import ProtocolVersions
from outrider.request import (
    Adapter,
    FinishReason,
    LogprobsMode,
    LogprobsRequest,
    RequestOptions,
    SamplingParams,
    TokenLogprobs,
    VerificationMethod,
)
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
    SpeculationCounts,
)
from outrider.v1 import node_pb2, router_pb2, session_pb2
from outrider.wire.node import REPORT, ReportWriter
from outrider.wire.session import (
    command_from_proto,
    command_to_proto,
    event_from_proto,
    event_to_proto,
    report_message_from_proto,
    report_message_to_proto,
)

ID = bytes(range(16))


@pytest.mark.parametrize(
    "command",
    [
        OpenSequenceGroup(
            sequence_group_id=ID,
            transfer_id=ID[::-1],
            request_id="request",
            prompt_token_ids=(1, 2, 3),
            samples=(SampleStart(0),),
            options=RequestOptions(sampling=SamplingParams(seed=2**64 - 1, max_tokens=1)),
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
        OpenSequenceGroup(
            sequence_group_id=ID,
            transfer_id=ID[::-1],
            request_id="request",
            prompt_token_ids=(1, 2, 3),
            samples=(SampleStart(0, (4, 5)), SampleStart(2), SampleStart(3, (6,))),
            options=RequestOptions(
                sampling=SamplingParams(
                    seed=7,
                    max_tokens=9,
                    temperature=0.5,
                    top_p=0.75,
                    top_k=40,
                    min_p=0.125,
                    presence_penalty=-0.5,
                    frequency_penalty=0.25,
                    repetition_penalty=1.25,
                    logit_bias=((3, -1.5), (900, 2.0)),
                    n=4,
                    min_tokens=2,
                ),
                stop_token_ids=(2, 0),
                logprobs=LogprobsRequest(num_top=0, mode=LogprobsMode.SAMPLED),
                num_speculative_tokens=0,
                priority=-3,
                cache_salt=b"alice",
                verification_method=VerificationMethod.TYPICAL,
            ),
        ),
        RetargetSequenceGroup(sequence_group_id=ID, transfer_id=ID[::-1]),
        RetargetSequenceGroup(sequence_group_id=ID, transfer_id=b"", keeps_received=True),
        CancelSequenceGroup(sequence_group_id=ID),
        CancelSequenceGroup(sequence_group_id=ID, samples=(0, 3)),
    ],
)
def test_commands_survive_the_wire(command):
    data = command_to_proto(command).SerializeToString()
    assert command_from_proto(session_pb2.SessionCommand.FromString(data)) == command


@pytest.mark.parametrize(
    "event",
    [
        Granted(sequence_group_id=ID, transfer_id=ID, kv_address="h:1", held_prefix_length=16, num_tokens_to_compute=1),
        Rejected(sequence_group_id=ID, reason=RejectReason.DRAINING, message="leaving"),
        Rejected(
            sequence_group_id=ID,
            reason=RejectReason.NO_ROOM,
            message="full",
            kv_blocks_needed=40,
            num_sequences_needed=3,
            wait_seconds=0.25,
        ),
        KvReady(sequence_group_id=ID, transfer_id=ID, connector="grpc", kv_bytes=2**40, transfer_seconds=0.25),
        KvFailed(sequence_group_id=ID, transfer_id=ID[::-1], message="k layers 0-1 tokens 0-15 are missing"),
        SampleTokens(sequence_group_id=ID, sample=2, start_position=7, token_ids=(1, 2)),
        SampleTokens(
            sequence_group_id=ID,
            sample=0,
            start_position=7,
            token_ids=(1,),
            logprobs=(TokenLogprobs(1, -0.5, 2, ((5, -0.25), (1, -0.5))),),
            speculation=SpeculationCounts(
                num_spec_steps=1,
                num_draft_tokens=3,
                num_accepted_draft_tokens=2,
                acceptance_histogram=(0, 0, 1),
                num_wanting_steps=1,
                num_hit_steps=1,
            ),
            rejected_draft_token_ids=(9, 2**32 - 1),
        ),
        SampleDone(sequence_group_id=ID, sample=1, reason=FinishReason.STOP, stop_token_id=0),
        SampleDone(sequence_group_id=ID, sample=1, reason=FinishReason.LENGTH),
        SequenceGroupFailed(sequence_group_id=ID, code=14, message="gone"),
    ],
)
def test_events_survive_the_wire(event):
    data = event_to_proto(event).SerializeToString()
    assert event_from_proto(session_pb2.SequenceGroupEvent.FromString(data)) == event


def test_a_report_survives_the_wire():
    info = NodeInfo(
        incarnation=ID,
        name="decode@h:1",
        role=NodeRole.DECODE,
        state=NodeState.SERVING,
        version="1",
        protocol_versions=ProtocolVersions(oldest=3, newest=5),
        model=ModelInfo(
            name="m",
            vocab_size=10,
            max_model_len=20,
            eos_token_ids=(1, 2),
            dtype="float32",
            fingerprint="f",
            vocabulary_fingerprint="v",
        ),
    )
    report = NodeReport(
        state=NodeState.DRAINING,
        incarnation=ID,
        mark=9,
        num_steps=5,
        expected_step_seconds=0.5,
        step_age_seconds=0.25,
        load=NodeLoad(num_running=1, kv_blocks_total=4, kv_blocks_free=3, num_sequences_free=7),
    )
    done = SampleDone(sequence_group_id=ID, sample=0, reason=FinishReason.LENGTH)
    message = report_message_to_proto(ReportWriter().to_proto(report), [done], hello=info)
    parsed = report_message_from_proto(session_pb2.SessionReport.FromString(message.SerializeToString()))
    assert parsed == (info, report, [done])


def test_a_stream_has_the_adapters_only_when_they_have_changed():
    sql, law = Adapter("sql", "a1" * 32), Adapter("law", "b2" * 32)
    writer = ReportWriter()

    def send(adapters):
        return REPORT.from_proto(writer.to_proto(replace(report, adapters=adapters))).adapters

    report = NodeReport(state=NodeState.SERVING, incarnation=ID)
    assert send((sql, law)) == (sql, law)
    assert send((sql, law)) is None
    assert send(()) == ()
    assert send(()) is None
    assert send((law,)) == (law,)
    assert send(None) is None
    assert REPORT.from_proto(ReportWriter().to_proto(report)).adapters is None


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), float("-inf")])
def test_a_rate_that_is_no_number_is_zero(rate):
    """A node's values are displayed, and written as JSON, which has only finite numbers."""
    rates = ("tokens_per_second", "mean_acceptance_length", "look_ahead_hit_rate", "kv_bytes_per_second")
    load = node_pb2.NodeLoad(num_running=2, **dict.fromkeys(rates, rate))
    proto = node_pb2.NodeReport(state=router_pb2.NODE_STATE_SERVING, incarnation=ID, load=load)
    assert REPORT.from_proto(proto).load == NodeLoad(num_running=2)


def test_an_id_of_the_wrong_size_is_refused():
    opened = session_pb2.OpenSequenceGroup(sequence_group_id=b"short", transfer_id=ID)
    retarget = session_pb2.RetargetSequenceGroup(sequence_group_id=ID, transfer_id=b"short")
    for proto in (session_pb2.SessionCommand(open=opened), session_pb2.SessionCommand(retarget=retarget)):
        with pytest.raises(InvalidRequestError, match="16 bytes"):
            command_from_proto(proto)


@pytest.mark.parametrize(
    ("starts", "shared"),
    [
        ([()], (1, 2)),
        ([(4,)], (1, 2, 3)),
        ([(), ()], (1, 2)),
        ([(4, 5, 6), (4, 5, 7)], (1, 2, 3, 4, 5)),
        ([(4, 5, 6), (4, 5)], (1, 2, 3, 4)),  # the shorter sample computes its last token's KV in its first step
        ([(4, 5), (6, 7)], (1, 2, 3)),
        ([(4, 5), ()], (1, 2)),
    ],
)
def test_kv_is_wanted_of_what_all_samples_begin_with(starts, shared):
    group = OpenSequenceGroup(
        sequence_group_id=ID,
        transfer_id=ID,
        request_id="request",
        prompt_token_ids=(1, 2, 3),
        samples=tuple(SampleStart(sample, tokens) for sample, tokens in enumerate(starts)),
        options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=9, n=len(starts))),
    )
    assert group.shared_token_ids() == shared


def test_an_empty_message_is_refused():
    with pytest.raises(InvalidRequestError):
        command_from_proto(session_pb2.SessionCommand())
    with pytest.raises(InvalidRequestError):
        event_from_proto(session_pb2.SequenceGroupEvent(sequence_group_id=ID))
