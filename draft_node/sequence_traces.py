"""Spans of drafted sequences, made from the messages on one decode node's stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from outrider.service.telemetry.tracing import Tracer, caller_of, fail
from outrider.speculation.draft_stream import DraftStatus, SequenceProposals, SequenceUpdate

MAX_TRACED = 4096
"""Maximum traced sequences of a stream at a time. Further ones have no spans."""


@dataclass(slots=True)
class _TracedSequence:
    span: Span
    num_answers: dict[DraftStatus, int] = field(default_factory=lambda: dict.fromkeys(DraftStatus, 0))
    num_tokens: dict[DraftStatus, int] = field(default_factory=lambda: dict.fromkeys(DraftStatus, 0))

    def take(self, answer: SequenceProposals) -> None:
        if answer.status is DraftStatus.PROPOSED and not self.num_answers[answer.status]:
            self.span.add_event("first_proposal")
        self.num_answers[answer.status] += 1
        self.num_tokens[answer.status] += sum(map(len, answer.branches))

    def end(self, error: str) -> None:
        answers, tokens = self.num_answers, self.num_tokens
        self.span.set_attributes(
            {
                "outrider.num_proposals": answers[DraftStatus.PROPOSED],
                "outrider.num_proposed_tokens": tokens[DraftStatus.PROPOSED],
                "outrider.num_ahead_tokens": tokens[DraftStatus.AHEAD],
                "outrider.num_catch_ups": answers[DraftStatus.CATCHING_UP],
                "outrider.num_refusals": answers[DraftStatus.NO_ROOM] + answers[DraftStatus.UNKNOWN_PREFIX],
            }
        )
        if error:
            fail(self.span, error)
        self.span.end()


class SequenceTraces:
    """The spans of traced requests' sequences, each from its sequence's start to its end. Event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._sequences: dict[int, _TracedSequence] = {}  # by the decode node's id

    def take_updates(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            start = update.start
            if update.closed:
                self._end(update.sequence_id)
            elif start is not None and start.traceparent and update.sequence_id not in self._sequences:
                caller, has_room = caller_of(start.traceparent), len(self._sequences) < MAX_TRACED
                if has_room and (span := self._tracer.join("draft", caller)).is_recording():
                    self._sequences[update.sequence_id] = _TracedSequence(span)

    def take_answers(self, answers: Iterable[SequenceProposals]) -> None:
        for answer in answers if self._sequences else ():
            if (sequence := self._sequences.get(answer.sequence_id)) is not None:
                sequence.take(answer)

    def end(self) -> None:
        """Ends all spans when the stream has ended."""
        for sequence_id in tuple(self._sequences):
            self._end(sequence_id, error="STREAM_ENDED")

    def _end(self, sequence_id: int, *, error: str = "") -> None:
        if (sequence := self._sequences.pop(sequence_id, None)) is not None:
            sequence.end(error)
