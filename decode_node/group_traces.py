"""Spans of sequence groups, made from the routers' commands and the engine's events on the event loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span

from outrider.service.telemetry.tracing import Tracer, caller_of, fail, traceparent_of
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    Rejected,
    SampleDone,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
)

MAX_EVENTS = 32
"""Maximum number of events of one span, since a group's KV transfer may be retried any number of times."""


@dataclass(slots=True)
class _TracedGroup:
    opened: OpenSequenceGroup
    span: Span
    running: set[int]  # samples
    finish_reasons: list[str] = field(default_factory=list)
    num_events: int = 0
    num_steps: int = 0  # over all samples, like the next four
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0

    def add_event(self, name: str, **attributes: str | int) -> None:
        if self.num_events < MAX_EVENTS:
            self.num_events += 1
            self.span.add_event(name, {f"outrider.{key}": value for key, value in attributes.items()})

    def take(self, event: SequenceGroupEvent) -> None:
        match event:
            case SampleTokens():
                if not self.num_steps:
                    self.add_event("first_token")
                self.num_steps += 1
                self.num_tokens += len(event.token_ids)
                self.num_draft_tokens += event.speculation.num_draft_tokens
                self.num_accepted += event.speculation.num_accepted_draft_tokens
            case SampleDone():
                self.running.discard(event.sample)
                self.finish_reasons.append(event.reason.name.lower())
            case Granted():
                self.add_event("granted", num_held_tokens=event.held_prefix_length)
            case KvReady():
                self.add_event("kv_ready", connector=event.connector, kv_bytes=event.kv_bytes)
            case KvFailed():
                self.add_event("kv_failed")
            case Rejected():
                self.fail(event.reason.name)
            case SequenceGroupFailed():
                self.fail("GROUP_FAILED")

    def fail(self, error: str) -> None:
        self.running.clear()
        fail(self.span, error)

    def end(self) -> None:
        self.span.set_attributes(
            {
                "gen_ai.request.id": self.opened.request_id,
                "gen_ai.usage.output_tokens": self.num_tokens,
                "gen_ai.response.finish_reasons": self.finish_reasons,
                "outrider.num_samples": len(self.opened.samples),
                "outrider.num_steps": self.num_steps,
                "outrider.num_draft_tokens": self.num_draft_tokens,
                "outrider.num_accepted_draft_tokens": self.num_accepted,
                "outrider.num_preemptions": self.num_preemptions,
            }
        )
        self.span.end()


class GroupTraces:
    """The spans of traced requests' groups. A span lasts from its group's open to the group's end. Event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._groups: dict[tuple[int, bytes], _TracedGroup] = {}  # by session and group

    def open(self, session_id: int, opened: OpenSequenceGroup) -> OpenSequenceGroup:
        """Returns the group with its own span as the parent of draft nodes' spans, or unchanged if it is not traced."""
        if not opened.traceparent:
            return opened
        span = self._tracer.join("decode", caller_of(opened.traceparent))
        if not span.is_recording():
            return opened
        samples = {start.sample for start in opened.samples}
        self._groups[session_id, opened.sequence_group_id] = _TracedGroup(opened, span, samples)
        return replace(opened, traceparent=traceparent_of(span))

    def observe(self, session_id: int, events: Iterable[SequenceGroupEvent]) -> None:
        if not self._groups:
            return
        for event in events:
            if (group := self._groups.get((session_id, event.sequence_group_id))) is not None:
                group.take(event)
                self._end_if_over(session_id, group)

    def observe_preempted(self, groups: Iterable[tuple[int, bytes]]) -> None:
        """Counts one preempted sequence of each group; a group is given as (session, group id)."""
        for key in groups:
            if (group := self._groups.get(key)) is not None:
                group.num_preemptions += 1

    def cancel(self, session_id: int, cancel: CancelSequenceGroup) -> None:
        """Records a cancel, after which the engine sends no further event of these samples."""
        if (group := self._groups.get((session_id, cancel.sequence_group_id))) is not None:
            group.add_event("cancelled")
            group.running.difference_update(cancel.samples or tuple(group.running))
            self._end_if_over(session_id, group)

    def end_session(self, session_id: int) -> None:
        """Ends the spans of a router whose session has ended, since its groups are freed without events."""
        for group in [group for key, group in self._groups.items() if key[0] == session_id]:
            group.fail("SESSION_ENDED")
            self._end_if_over(session_id, group)

    def _end_if_over(self, session_id: int, group: _TracedGroup) -> None:
        if not group.running:
            del self._groups[session_id, group.opened.sequence_group_id]
            group.end()
