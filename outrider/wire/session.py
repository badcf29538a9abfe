"""session.proto ⇄ `outrider.session`."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.errors import InvalidRequestError
from outrider.node import NodeInfo, NodeReport
from outrider.request import LogprobsRequest
from outrider.session import (
    NO_SPECULATION,
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
    SequenceGroupCommand,
    SequenceGroupEvent,
    SequenceGroupFailed,
    SpeculationCounts,
)
from outrider.v1 import session_pb2
from outrider.wire.answer import logprobs_from_proto, token_logprobs_to_proto
from outrider.wire.enums import FINISH_REASONS, LOGPROBS_MODES, VERIFICATION_METHODS, EnumTable
from outrider.wire.node import info_from_proto, info_to_proto, report_from_proto, report_to_proto
from outrider.wire.request import (
    logprobs_mode_from_proto,
    sampling_from_proto,
    sampling_to_proto,
    verification_method_from_proto,
)

ID_BYTES = 16

_REJECT_REASONS = EnumTable(RejectReason, session_pb2.RejectReason, "REJECT_REASON")


def command_to_proto(command: SequenceGroupCommand) -> session_pb2.SessionCommand:
    match command:
        case OpenSequenceGroup():
            return session_pb2.SessionCommand(open=_open_to_proto(command))
        case RetargetSequenceGroup():
            return session_pb2.SessionCommand(
                retarget=session_pb2.RetargetSequenceGroup(
                    sequence_group_id=command.sequence_group_id, transfer_id=command.transfer_id
                )
            )
        case CancelSequenceGroup():
            return session_pb2.SessionCommand(
                cancel=session_pb2.CancelSequenceGroup(
                    sequence_group_id=command.sequence_group_id, samples=command.samples
                )
            )


def _open_to_proto(command: OpenSequenceGroup) -> session_pb2.OpenSequenceGroup:
    proto = session_pb2.OpenSequenceGroup(
        sequence_group_id=command.sequence_group_id,
        transfer_id=command.transfer_id,
        request_id=command.request_id,
        prompt_token_ids=command.prompt_token_ids,
        samples=[
            session_pb2.SampleStart(sample=start.sample, generated_token_ids=start.generated_token_ids)
            for start in command.samples
        ],
        sampling=sampling_to_proto(command.sampling),
        stop_token_ids=command.stop_token_ids,
        num_speculative_tokens=command.num_speculative_tokens,
        verification_method=VERIFICATION_METHODS.to_proto(command.verification_method),
        priority=command.priority,
        cache_salt=command.cache_salt,
    )
    if command.logprobs is not None:
        proto.top_logprobs = command.logprobs.num_top
        proto.logprobs_mode = LOGPROBS_MODES.to_proto(command.logprobs.mode)
    return proto


def command_from_proto(proto: session_pb2.SessionCommand) -> SequenceGroupCommand:
    """Raises InvalidRequestError for a message without a command or with ids of the wrong size."""
    match proto.WhichOneof("command"):
        case "open":
            return _open_from_proto(proto.open)
        case "retarget":
            retarget = proto.retarget
            if len(retarget.transfer_id) not in (0, ID_BYTES):
                raise InvalidRequestError("a transfer_id is 16 bytes, or empty", field="retarget")
            return RetargetSequenceGroup(sequence_group_id=retarget.sequence_group_id, transfer_id=retarget.transfer_id)
        case "cancel":
            return CancelSequenceGroup(
                sequence_group_id=proto.cancel.sequence_group_id, samples=tuple(proto.cancel.samples)
            )
        case kind:
            raise InvalidRequestError(f"a session command of kind {kind!r} is not expected here", field="command")


def _open_from_proto(opened: session_pb2.OpenSequenceGroup) -> OpenSequenceGroup:
    if len(opened.sequence_group_id) != ID_BYTES or len(opened.transfer_id) != ID_BYTES:
        raise InvalidRequestError("sequence_group_id and transfer_id are 16 bytes each", field="open")
    return OpenSequenceGroup(
        sequence_group_id=opened.sequence_group_id,
        transfer_id=opened.transfer_id,
        request_id=opened.request_id,
        prompt_token_ids=tuple(opened.prompt_token_ids),
        samples=tuple(SampleStart(start.sample, tuple(start.generated_token_ids)) for start in opened.samples),
        sampling=sampling_from_proto(opened.sampling),
        stop_token_ids=tuple(opened.stop_token_ids),
        logprobs=LogprobsRequest(num_top=opened.top_logprobs, mode=logprobs_mode_from_proto(opened.logprobs_mode))
        if opened.HasField("top_logprobs")
        else None,
        num_speculative_tokens=opened.num_speculative_tokens if opened.HasField("num_speculative_tokens") else None,
        verification_method=verification_method_from_proto(opened.verification_method),
        priority=opened.priority,
        cache_salt=opened.cache_salt,
    )


def report_message_to_proto(
    report: NodeReport, events: Iterable[SequenceGroupEvent], *, hello: NodeInfo | None = None
) -> session_pb2.SessionReport:
    message = session_pb2.SessionReport(node=report_to_proto(report))
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
    return hello, report_from_proto(proto.node), [event_from_proto(event) for event in proto.events]


def event_to_proto(event: SequenceGroupEvent) -> session_pb2.SequenceGroupEvent:
    proto = session_pb2.SequenceGroupEvent(sequence_group_id=event.sequence_group_id)
    match event:
        case SampleTokens():
            _add_tokens(event, proto.tokens, {})
        case SampleDone():
            proto.done.CopyFrom(
                session_pb2.SampleDone(
                    sample=event.sample, reason=FINISH_REASONS.to_proto(event.reason), stop_token_id=event.stop_token_id
                )
            )
        case Granted():
            proto.granted.CopyFrom(
                session_pb2.Granted(
                    transfer_id=event.transfer_id,
                    kv_address=event.kv_address,
                    held_prefix_length=event.held_prefix_length,
                    num_tokens_to_compute=event.num_tokens_to_compute,
                )
            )
        case Rejected():
            proto.rejected.CopyFrom(
                session_pb2.Rejected(
                    reason=_REJECT_REASONS.to_proto(event.reason),
                    message=event.message,
                    kv_blocks_needed=event.kv_blocks_needed,
                    num_sequences_needed=event.num_sequences_needed,
                    wait_microseconds=round(event.wait_seconds * 1e6),
                )
            )
        case KvReady():
            proto.kv_ready.CopyFrom(
                session_pb2.KvReady(
                    transfer_id=event.transfer_id,
                    connector=event.connector,
                    kv_bytes=event.kv_bytes,
                    transfer_microseconds=round(event.transfer_seconds * 1e6),
                )
            )
        case KvFailed():
            proto.kv_failed.CopyFrom(session_pb2.KvFailed(transfer_id=event.transfer_id, message=event.message))
        case SequenceGroupFailed():
            proto.failed.CopyFrom(session_pb2.SequenceGroupFailed(code=event.code, message=event.message))
    return proto


def event_from_proto(proto: session_pb2.SequenceGroupEvent) -> SequenceGroupEvent:
    """Raises: InvalidRequestError for an event of no known kind; ValueError for a reason that is not known."""
    group_id = proto.sequence_group_id
    match proto.WhichOneof("event"):
        case "tokens":
            tokens = proto.tokens
            return SampleTokens(
                group_id,
                tokens.sample,
                tokens.start_position,
                tuple(tokens.token_ids[:]),  # a slice is copied at once, an iterator calls for each
                logprobs_from_proto(tokens.logprobs) if tokens.logprobs else (),
                _counts_from_proto(tokens.speculation) if tokens.HasField("speculation") else NO_SPECULATION,
            )
        case "done":
            return SampleDone(
                sequence_group_id=group_id,
                sample=proto.done.sample,
                reason=FINISH_REASONS.from_proto(proto.done.reason),
                stop_token_id=proto.done.stop_token_id if proto.done.HasField("stop_token_id") else None,
            )
        case "granted":
            return Granted(
                sequence_group_id=group_id,
                transfer_id=proto.granted.transfer_id,
                kv_address=proto.granted.kv_address,
                held_prefix_length=proto.granted.held_prefix_length,
                num_tokens_to_compute=proto.granted.num_tokens_to_compute,
            )
        case "rejected":
            return Rejected(
                sequence_group_id=group_id,
                reason=_REJECT_REASONS.from_proto(proto.rejected.reason),
                message=proto.rejected.message,
                kv_blocks_needed=proto.rejected.kv_blocks_needed,
                num_sequences_needed=proto.rejected.num_sequences_needed,
                wait_seconds=proto.rejected.wait_microseconds / 1e6,
            )
        case "kv_ready":
            return KvReady(
                sequence_group_id=group_id,
                transfer_id=proto.kv_ready.transfer_id,
                connector=proto.kv_ready.connector,
                kv_bytes=proto.kv_ready.kv_bytes,
                transfer_seconds=proto.kv_ready.transfer_microseconds / 1e6,
            )
        case "kv_failed":
            return KvFailed(
                sequence_group_id=group_id, transfer_id=proto.kv_failed.transfer_id, message=proto.kv_failed.message
            )
        case "failed":
            return SequenceGroupFailed(sequence_group_id=group_id, code=proto.failed.code, message=proto.failed.message)
        case other:
            raise InvalidRequestError(f"a session event of kind {other!r} is not known", field="event")


def _add_tokens(
    event: SampleTokens, proto: session_pb2.SampleTokens, counts: dict[int, session_pb2.SpeculationCounts]
) -> None:
    """Fills in `proto`. `counts`: those of the same message by identity, as most verifications go like another one."""
    if event.sample:
        proto.sample = event.sample
    proto.start_position = event.start_position
    proto.token_ids.extend(event.token_ids)
    if event.logprobs:
        proto.logprobs.extend(map(token_logprobs_to_proto, event.logprobs))
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
    if not proto.num_spec_steps:  # wanted, and nothing was there: one for nearly every token of plain text
        return SpeculationCounts(num_wanting_steps=proto.num_wanting_steps, num_hit_steps=proto.num_hit_steps)
    return SpeculationCounts(
        num_spec_steps=proto.num_spec_steps,
        num_draft_tokens=proto.num_draft_tokens,
        num_accepted_draft_tokens=proto.num_accepted_draft_tokens,
        acceptance_histogram=tuple(proto.acceptance_histogram),
        num_wanting_steps=proto.num_wanting_steps,
        num_hit_steps=proto.num_hit_steps,
    )
