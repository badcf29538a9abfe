"""Converts the answers of router.proto to and from `outrider.answer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError

from outrider.answer import (
    AnswerEvent,
    CompleteResult,
    Completion,
    Delta,
    Finished,
    KvTransferMetrics,
    RequestMetrics,
    SpeculationMetrics,
    Started,
    Summary,
    Usage,
)
from outrider.errors import InternalError
from outrider.request import FinishReason, TokenLogprobs
from outrider.v1 import router_pb2
from outrider.wire.enums import FINISH_REASONS
from outrider.wire.fields import Conversion, Fields

_MOST_HEADER_BYTES = 64
"""Maximum bytes of the tags and lengths of a message's own fields."""
_LENGTH_BYTES = 4
"""Bytes of the tag and length of a TokenLogprobs, which has at most 21 entries."""
_MOST_LOGPROBS_BYTES = 20
"""Maximum bytes of a TokenLogprobs with its tag and length, but without alternatives."""
_MOST_LOGPROB_BYTES = 13  # maximum bytes of each alternative


def event_to_proto(event: AnswerEvent) -> router_pb2.GenerateResponse:
    match event:
        case Delta():
            return _delta_response(event)
        case Finished():
            return router_pb2.GenerateResponse(finished=FINISHED.to_proto(event))
        case Started():
            return router_pb2.GenerateResponse(request_id=event.request_id, started=_started_to_proto(event))
        case Summary():
            return router_pb2.GenerateResponse(request_id=event.request_id, summary=SUMMARY.to_proto(event))


def event_from_proto(proto: router_pb2.GenerateResponse) -> AnswerEvent | None:
    """Returns the event; None if this version does not know it."""
    match proto.WhichOneof("event"):
        case "delta":
            delta = proto.delta
            logprobs = logprobs_from_proto(delta.logprobs)
            return Delta(delta.sample, delta.start_position, tuple(delta.token_ids), delta.text, logprobs)
        case "finished":
            return FINISHED.from_proto(proto.finished)
        case "started":
            return STARTED.from_proto(proto.started, request_id=proto.request_id)
        case "summary":
            return SUMMARY.from_proto(proto.summary, request_id=proto.request_id)
    return None


class CompleteResponseBuilder:
    """Folds the events of an answer, each added once, into one message."""

    def __init__(self, num_samples: int) -> None:
        self._response = router_pb2.CompleteResponse()
        self._completions = [self._response.completions.add() for _ in range(num_samples)]
        self._texts: list[list[str]] = [[] for _ in range(num_samples)]
        self.num_bytes = _MOST_HEADER_BYTES * (num_samples + 1)
        """The message's size in bytes, or slightly more."""

    def add(self, event: AnswerEvent) -> None:
        match event:
            case Delta():
                completion = self._completions[event.sample]
                completion.token_ids.extend(event.token_ids)
                logprobs = [token_logprobs_to_proto(value) for value in event.logprobs]
                completion.logprobs.extend(logprobs)
                self._texts[event.sample].append(event.text)
                self.num_bytes += len(event.text.encode()) + sum(map(_varint_bytes, event.token_ids))
                self.num_bytes += sum(_LENGTH_BYTES + message.ByteSize() for message in logprobs)
            case Finished():
                self._completions[event.sample].finished.CopyFrom(FINISHED.to_proto(event))
                self.num_bytes += self._completions[event.sample].finished.ByteSize()
            case Started():
                self._response.request_id = event.request_id
                self._response.started.CopyFrom(_started_to_proto(event))
                self.num_bytes += self._response.started.ByteSize() + len(event.request_id)
            case Summary():
                self._response.summary.CopyFrom(SUMMARY.to_proto(event))
                self.num_bytes += self._response.summary.ByteSize()

    def build(self) -> router_pb2.CompleteResponse:
        for completion, parts in zip(self._completions, self._texts, strict=True):
            completion.text = "".join(parts)
        return self._response


class PackedLogprobs(Sequence[TokenLogprobs]):
    """A prompt's logprobs in the nodes' encoding, which a router forwards as bytes. They are decoded on access.

    A prompt of 2000 tokens with 20 alternatives has 42,000 entries; decoding them would block an event loop.
    """

    def __init__(self, packed: bytes) -> None:
        """`packed`: concatenated results of `pack_logprobs`."""
        self.packed = packed

    @cached_property
    def _values(self) -> tuple[TokenLogprobs, ...]:
        return logprobs_from_proto(router_pb2.Started.FromString(self.packed).prompt_logprobs)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


def pack_logprobs(logprobs: Iterable[TokenLogprobs]) -> bytes:
    """Serializes the logprobs as a Started message that has no other field."""
    return router_pb2.Started(prompt_logprobs=map(token_logprobs_to_proto, logprobs)).SerializeToString()


def num_packed_logprobs(packed: bytes) -> int:
    """Returns the number of packed logprobs. Raises: InternalError if `packed` is invalid."""
    try:
        return len(router_pb2.Started.FromString(packed).prompt_logprobs)
    except DecodeError as error:
        raise InternalError("logprobs of a prompt cannot be read") from error


def max_logprobs_bytes(num_tokens: int, num_top: int) -> int:
    """Returns the maximum bytes of the packed logprobs of `num_tokens` tokens, with `num_top` alternatives each."""
    return num_tokens * (_MOST_LOGPROBS_BYTES + num_top * _MOST_LOGPROB_BYTES)


def _started_to_proto(event: Started) -> router_pb2.Started:
    logprobs = event.prompt_logprobs
    if not isinstance(logprobs, PackedLogprobs):
        return STARTED.to_proto(event)
    proto = STARTED.to_proto(replace(event, prompt_logprobs=()))
    proto.MergeFromString(logprobs.packed)
    return proto


def _varint_bytes(value: int) -> int:
    return (value.bit_length() + 6) // 7 or 1


def complete_from_proto(proto: router_pb2.CompleteResponse) -> CompleteResult:
    return CompleteResult(
        request_id=proto.request_id,
        started=STARTED.from_proto(proto.started, request_id=proto.request_id),
        completions=tuple(
            Completion(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finished=FINISHED.from_proto(completion.finished),
                logprobs=logprobs_from_proto(completion.logprobs),
            )
            for completion in proto.completions
        ),
        summary=SUMMARY.from_proto(proto.summary, request_id=proto.request_id),
    )


# ---------------------------------------------------------------- the events


def _delta_response(event: Delta) -> router_pb2.GenerateResponse:
    """Converts a delta. Called for every token of every stream, so it fills fields in place, which is twice as fast as
    passing keyword arguments.
    """
    response = router_pb2.GenerateResponse()
    delta = response.delta
    delta.start_position = event.start_position  # never 0, so it also makes `delta` present
    delta.token_ids.extend(event.token_ids)
    if event.text:
        delta.text = event.text
    if event.sample:
        delta.sample = event.sample
    if event.logprobs:
        delta.logprobs.extend(map(token_logprobs_to_proto, event.logprobs))
    return response


def token_logprobs_to_proto(value: TokenLogprobs) -> router_pb2.TokenLogprobs:
    message = router_pb2.TokenLogprobs(
        token_id=value.token_id,
        logprob=None if math.isnan(value.logprob) else value.logprob,
        rank=value.rank,
        top=[router_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top],
    )
    if value.token_bytes:
        message.token_bytes = value.token_bytes
        for entry, token_bytes in zip(message.top, value.top_bytes, strict=True):
            entry.token_bytes = token_bytes
    return message


def logprobs_from_proto(protos: Iterable[router_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(map(_token_logprobs_from_proto, protos))


def _token_logprobs_from_proto(proto: router_pb2.TokenLogprobs) -> TokenLogprobs:
    """Converts logprobs; an unset logprob (of a prompt's first token) becomes NaN."""
    return TokenLogprobs(
        token_id=proto.token_id,
        logprob=proto.logprob if proto.HasField("logprob") else math.nan,
        rank=proto.rank,
        top=tuple((entry.token_id, entry.logprob) for entry in proto.top),
        token_bytes=proto.token_bytes,
        top_bytes=tuple(entry.token_bytes for entry in proto.top) if proto.token_bytes else (),
    )


STARTED = Fields(
    Started,
    router_pb2.Started,
    elsewhere=("request_id",),
    prompt_logprobs=Conversion(token_logprobs_to_proto, _token_logprobs_from_proto),
)
FINISHED = Fields(Finished, router_pb2.Finished, reason=FINISH_REASONS.from_proto_or(FinishReason.ABORTED))
SUMMARY = Fields(
    Summary,
    router_pb2.Summary,
    elsewhere=("request_id",),
    usage=Fields(Usage, router_pb2.Usage),
    metrics=Fields(
        RequestMetrics,
        router_pb2.RequestMetrics,
        names={"speculation": "speculative_decoding"},
        kv_transfer=Fields(KvTransferMetrics, router_pb2.KvTransferMetrics),
        speculation=Fields(SpeculationMetrics, router_pb2.SpeculationMetrics),
    ),
)
