"""router.proto's answers ⇄ `outrider.answer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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
from outrider.request import FinishReason, TokenLogprobs
from outrider.v1 import router_pb2
from outrider.wire.enums import FINISH_REASONS


def event_to_proto(event: AnswerEvent) -> router_pb2.GenerateResponse:
    match event:
        case Delta():
            return _delta_response(event)
        case Finished():
            return router_pb2.GenerateResponse(finished=finished_to_proto(event))
        case Started():
            return router_pb2.GenerateResponse(request_id=event.request_id, started=started_to_proto(event))
        case Summary():
            return router_pb2.GenerateResponse(request_id=event.request_id, summary=summary_to_proto(event))


def event_from_proto(proto: router_pb2.GenerateResponse) -> AnswerEvent | None:
    """None for an event that this version does not know."""
    match proto.WhichOneof("event"):
        case "delta":
            return delta_from_proto(proto.delta)
        case "finished":
            return finished_from_proto(proto.finished)
        case "started":
            return started_from_proto(proto.started, request_id=proto.request_id)
        case "summary":
            return summary_from_proto(proto.summary, request_id=proto.request_id)
    return None


def complete_to_proto(events: Sequence[AnswerEvent], *, num_samples: int) -> router_pb2.CompleteResponse:
    """All events of an answer, folded into one message."""
    response = router_pb2.CompleteResponse()
    texts: list[list[str]] = [[] for _ in range(num_samples)]
    completions = [response.completions.add() for _ in range(num_samples)]
    for event in events:
        match event:
            case Delta():
                completion = completions[event.sample]
                completion.token_ids.extend(event.token_ids)
                completion.logprobs.extend(map(token_logprobs_to_proto, event.logprobs))
                texts[event.sample].append(event.text)
            case Finished():
                completions[event.sample].finished.CopyFrom(finished_to_proto(event))
            case Started():
                response.request_id = event.request_id
                response.started.CopyFrom(started_to_proto(event))
            case Summary():
                response.summary.CopyFrom(summary_to_proto(event))
    for completion, parts in zip(completions, texts, strict=True):
        completion.text = "".join(parts)
    return response


def complete_from_proto(proto: router_pb2.CompleteResponse) -> CompleteResult:
    return CompleteResult(
        request_id=proto.request_id,
        started=started_from_proto(proto.started, request_id=proto.request_id),
        completions=tuple(
            Completion(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finished=finished_from_proto(completion.finished),
                logprobs=logprobs_from_proto(completion.logprobs),
            )
            for completion in proto.completions
        ),
        summary=summary_from_proto(proto.summary, request_id=proto.request_id),
    )


# ---------------------------------------------------------------- the events


def started_to_proto(event: Started) -> router_pb2.Started:
    return router_pb2.Started(
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        model=event.model,
        router=event.router,
        prompt_logprobs=map(token_logprobs_to_proto, event.prompt_logprobs),
    )


def started_from_proto(proto: router_pb2.Started, *, request_id: str) -> Started:
    return Started(
        request_id=request_id,
        num_prompt_tokens=proto.num_prompt_tokens,
        seed=proto.seed,
        model=proto.model,
        router=proto.router,
        prompt_logprobs=logprobs_from_proto(proto.prompt_logprobs),
    )


def _delta_response(event: Delta) -> router_pb2.GenerateResponse:
    """One for every token of every stream: filled in place, which takes half the time of keyword arguments."""
    response = router_pb2.GenerateResponse()
    delta = response.delta
    delta.start_position = event.start_position  # never 0: also what makes `delta` present
    delta.token_ids.extend(event.token_ids)
    if event.text:
        delta.text = event.text
    if event.sample:
        delta.sample = event.sample
    if event.logprobs:
        delta.logprobs.extend(map(token_logprobs_to_proto, event.logprobs))
    return response


def delta_from_proto(proto: router_pb2.Delta) -> Delta:
    return Delta(
        sample=proto.sample,
        start_position=proto.start_position,
        token_ids=tuple(proto.token_ids),
        text=proto.text,
        logprobs=logprobs_from_proto(proto.logprobs),
    )


def finished_to_proto(event: Finished) -> router_pb2.Finished:
    return router_pb2.Finished(
        sample=event.sample,
        reason=FINISH_REASONS.to_proto(event.reason),
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
    )


def finished_from_proto(proto: router_pb2.Finished) -> Finished:
    """A reason that this version does not know is ABORTED."""
    return Finished(
        sample=proto.sample,
        reason=FINISH_REASONS.known_from_proto(proto.reason) or FinishReason.ABORTED,
        stop_string=proto.stop_string if proto.HasField("stop_string") else None,
        stop_token_id=proto.stop_token_id if proto.HasField("stop_token_id") else None,
    )


def token_logprobs_to_proto(value: TokenLogprobs) -> router_pb2.TokenLogprobs:
    return router_pb2.TokenLogprobs(
        token_id=value.token_id,
        logprob=None if math.isnan(value.logprob) else value.logprob,
        rank=value.rank,
        top=[router_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top],
    )


def logprobs_from_proto(protos: Iterable[router_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """A logprob that is unset (a prompt's first token) is NaN."""
    return tuple(
        TokenLogprobs(
            token_id=proto.token_id,
            logprob=proto.logprob if proto.HasField("logprob") else math.nan,
            rank=proto.rank,
            top=tuple((entry.token_id, entry.logprob) for entry in proto.top),
        )
        for proto in protos
    )


# ---------------------------------------------------------------- the summary


def summary_to_proto(event: Summary) -> router_pb2.Summary:
    usage, metrics = event.usage, event.metrics
    transfer, speculation = metrics.kv_transfer, metrics.speculation
    return router_pb2.Summary(
        usage=router_pb2.Usage(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_generated_tokens=usage.num_generated_tokens,
        ),
        metrics=router_pb2.RequestMetrics(
            queue_seconds=metrics.queue_seconds,
            ttft_seconds=metrics.ttft_seconds,
            e2e_seconds=metrics.e2e_seconds,
            prefill_seconds=metrics.prefill_seconds,
            kv_transfer=router_pb2.KvTransferMetrics(
                connector=transfer.connector,
                bytes=transfer.bytes,
                seconds=transfer.seconds,
                exposed_seconds=transfer.exposed_seconds,
            ),
            speculative_decoding=router_pb2.SpeculationMetrics(
                num_spec_steps=speculation.num_spec_steps,
                num_draft_tokens=speculation.num_draft_tokens,
                num_accepted_draft_tokens=speculation.num_accepted_draft_tokens,
                draft_acceptance_rate=speculation.draft_acceptance_rate,
                mean_acceptance_length=speculation.mean_acceptance_length,
                acceptance_histogram=speculation.acceptance_histogram,
                look_ahead_hit_rate=speculation.look_ahead_hit_rate,
            ),
            attempts=metrics.attempts,
            nodes=metrics.nodes,
        ),
    )


def summary_from_proto(proto: router_pb2.Summary, *, request_id: str) -> Summary:
    metrics, transfer, speculation = proto.metrics, proto.metrics.kv_transfer, proto.metrics.speculative_decoding
    return Summary(
        request_id=request_id,
        usage=Usage(
            num_prompt_tokens=proto.usage.num_prompt_tokens,
            num_cached_tokens=proto.usage.num_cached_tokens,
            num_generated_tokens=proto.usage.num_generated_tokens,
        ),
        metrics=RequestMetrics(
            queue_seconds=metrics.queue_seconds,
            ttft_seconds=metrics.ttft_seconds,
            e2e_seconds=metrics.e2e_seconds,
            prefill_seconds=metrics.prefill_seconds,
            kv_transfer=KvTransferMetrics(
                connector=transfer.connector,
                bytes=transfer.bytes,
                seconds=transfer.seconds,
                exposed_seconds=transfer.exposed_seconds,
            ),
            speculation=SpeculationMetrics(
                num_spec_steps=speculation.num_spec_steps,
                num_draft_tokens=speculation.num_draft_tokens,
                num_accepted_draft_tokens=speculation.num_accepted_draft_tokens,
                draft_acceptance_rate=speculation.draft_acceptance_rate,
                mean_acceptance_length=speculation.mean_acceptance_length,
                acceptance_histogram=tuple(speculation.acceptance_histogram),
                look_ahead_hit_rate=speculation.look_ahead_hit_rate,
            ),
            attempts=metrics.attempts,
            nodes=tuple(metrics.nodes),
        ),
    )
