"""Converts session.proto to and from `outrider.session`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.node import NodeInfo, NodeReport
from outrider.session import (
    NO_SPECULATION,
    CancelSequenceGroup,
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    PromptLogprobs,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupCommand,
    SequenceGroupEvent,
    SequenceGroupFailed,
    SpeculationCounts,
)
from outrider.v1 import node_pb2, session_pb2
from outrider.wire.answer import logprobs_from_proto, token_logprobs_to_proto
from outrider.wire.enums import FINISH_REASONS, EnumTable
from outrider.wire.fields import TRACEPARENT, Fields
from outrider.wire.node import REPORT, info_from_proto, info_to_proto
from outrider.wire.request import OPTIONS

ID_BYTES = 16

_REJECT_REASONS = EnumTable(RejectReason, session_pb2.RejectReason, "REJECT_REASON")


_COMMANDS: dict[str, Fields[Any, Any]] = {
    "open": Fields(
        OpenSequenceGroup,
        session_pb2.OpenSequenceGroup,
        samples=Fields(SampleStart, session_pb2.SampleStart),
        options=OPTIONS,
        traceparent=TRACEPARENT,
    ),
    "retarget": Fields(RetargetSequenceGroup, session_pb2.RetargetSequenceGroup),
    "cancel": Fields(CancelSequenceGroup, session_pb2.CancelSequenceGroup),
}
_COMMAND_KINDS = {fields.value_type: kind for kind, fields in _COMMANDS.items()}

_GROUP = ("sequence_group_id",)
"""Fields of an event that are in the enclosing message instead of the event's own message: the group's id."""
_EVENTS: dict[str, Fields[Any, Any]] = {
    "done": Fields(SampleDone, session_pb2.SampleDone, elsewhere=_GROUP, reason=FINISH_REASONS),
    "granted": Fields(Granted, session_pb2.Granted, elsewhere=_GROUP),
    "rejected": Fields(Rejected, session_pb2.Rejected, elsewhere=_GROUP, reason=_REJECT_REASONS),
    "kv_ready": Fields(KvReady, session_pb2.KvReady, elsewhere=_GROUP),
    "prompt_logprobs": Fields(PromptLogprobs, session_pb2.PromptLogprobs, elsewhere=_GROUP),
    "kv_failed": Fields(KvFailed, session_pb2.KvFailed, elsewhere=_GROUP),
    "failed": Fields(SequenceGroupFailed, session_pb2.SequenceGroupFailed, elsewhere=_GROUP),
}
_EVENT_KINDS = {fields.value_type: kind for kind, fields in _EVENTS.items()}


def command_to_proto(command: SequenceGroupCommand) -> session_pb2.SessionCommand:
    kind = _COMMAND_KINDS[type(command)]
    return session_pb2.SessionCommand(**{kind: _COMMANDS[kind].to_proto(command)})


def command_from_proto(proto: session_pb2.SessionCommand) -> SequenceGroupCommand:
    """Raises: InvalidRequestError if the message has no command, or ids of the wrong size."""
    kind = proto.WhichOneof("command")
    if kind not in _COMMANDS:
        raise InvalidRequestError(f"a session command of kind {kind!r} is not expected here", field="command")
    if kind == "open" and len(proto.open.sequence_group_id) != ID_BYTES:
        raise InvalidRequestError("a sequence_group_id is 16 bytes", field="open")
    message = getattr(proto, kind)
    if kind != "cancel" and len(message.transfer_id) not in (0, ID_BYTES):
        raise InvalidRequestError("a transfer_id is 16 bytes, or empty", field=kind)
    command: SequenceGroupCommand = _COMMANDS[kind].from_proto(message)
    return command


def report_message_to_proto(
    report: node_pb2.NodeReport, events: Iterable[SequenceGroupEvent], *, hello: NodeInfo | None = None
) -> session_pb2.SessionReport:
    """`report`: by the session's `ReportWriter`."""
    message = session_pb2.SessionReport(node=report)
    add = message.events.add
    counts: dict[int, session_pb2.SpeculationCounts] = {}
    for event in events:
        if isinstance(event, SampleTokens):
            _add_tokens(event, add(sequence_group_id=event.sequence_group_id).tokens, counts)
        else:
            add().CopyFrom(event_to_proto(event))
    if hello is not None:
        message.hello.CopyFrom(info_to_proto(hello))
    return message


def report_message_from_proto(
    proto: session_pb2.SessionReport,
) -> tuple[NodeInfo | None, NodeReport, list[SequenceGroupEvent]]:
    hello = info_from_proto(proto.hello) if proto.HasField("hello") else None
    return hello, REPORT.from_proto(proto.node), [event_from_proto(event) for event in proto.events]


def event_to_proto(event: SequenceGroupEvent) -> session_pb2.SequenceGroupEvent:
    proto = session_pb2.SequenceGroupEvent(sequence_group_id=event.sequence_group_id)
    if isinstance(event, SampleTokens):
        _add_tokens(event, proto.tokens, {})
    else:
        kind = _EVENT_KINDS[type(event)]
        getattr(proto, kind).CopyFrom(_EVENTS[kind].to_proto(event))
    return proto


def event_from_proto(proto: session_pb2.SequenceGroupEvent) -> SequenceGroupEvent:
    """Raises: InvalidRequestError if the kind of event is unknown; ValueError if a reason is unknown."""
    group_id, kind = proto.sequence_group_id, proto.WhichOneof("event")
    if kind == "tokens":
        tokens = proto.tokens
        counts = _counts_from_proto(tokens.speculation) if tokens.HasField("speculation") else NO_SPECULATION
        return SampleTokens(
            group_id,
            tokens.sample,
            tokens.start_position,
            tuple(tokens.token_ids[:]),  # slicing makes one copy, iterating one call per token
            logprobs_from_proto(tokens.logprobs) if tokens.logprobs else (),
            counts,
            tuple(tokens.rejected_draft_token_ids[:]) if counts.num_draft_tokens else (),
        )
    if kind not in _EVENTS:
        raise InvalidRequestError(f"a session event of kind {kind!r} is not known", field="event")
    event: SequenceGroupEvent = _EVENTS[kind].from_proto(getattr(proto, kind), sequence_group_id=group_id)
    return event


def _add_tokens(
    event: SampleTokens, proto: session_pb2.SampleTokens, counts: dict[int, session_pb2.SpeculationCounts]
) -> None:
    """Fills in `proto`.

    `counts`: messages already made for this report, by the `id` of their counts, because many events share counts.
    """
    if event.sample:
        proto.sample = event.sample
    proto.start_position = event.start_position
    proto.token_ids.extend(event.token_ids)
    if event.logprobs:
        proto.logprobs.extend(map(token_logprobs_to_proto, event.logprobs))
    if event.rejected_draft_token_ids:
        proto.rejected_draft_token_ids.extend(event.rejected_draft_token_ids)
    speculation = event.speculation
    if speculation.num_wanting_steps or speculation.num_spec_steps:
        found = counts.get(id(speculation))
        if found is None:
            found = counts[id(speculation)] = _counts_to_proto(speculation)
        proto.speculation.CopyFrom(found)


def _counts_to_proto(counts: SpeculationCounts) -> session_pb2.SpeculationCounts:
    return session_pb2.SpeculationCounts(
        num_spec_steps=counts.num_spec_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted_draft_tokens,
        acceptance_histogram=counts.acceptance_histogram,
        num_wanting_steps=counts.num_wanting_steps,
        num_hit_steps=counts.num_hit_steps,
    )


def _counts_from_proto(proto: session_pb2.SpeculationCounts) -> SpeculationCounts:
    if not proto.num_spec_steps:  # drafts were wanted but missing, as happens for nearly every token of plain text
        return SpeculationCounts(num_wanting_steps=proto.num_wanting_steps, num_hit_steps=proto.num_hit_steps)
    return SpeculationCounts(
        num_spec_steps=proto.num_spec_steps,
        num_draft_tokens=proto.num_draft_tokens,
        num_accepted_draft_tokens=proto.num_accepted_draft_tokens,
        acceptance_histogram=tuple(proto.acceptance_histogram),
        num_wanting_steps=proto.num_wanting_steps,
        num_hit_steps=proto.num_hit_steps,
    )
