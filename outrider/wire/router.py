"""router.proto ⇄ `outrider.request` and `outrider.answer`.

A public request is converted after the router has validated it: what is unset becomes the
contract's default here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.answer import AnswerEvent, Delta, Finished, RequestMetrics, Started, Summary, Usage
from outrider.node import ModelInfo, NodeReport, NodeRole, NodeState
from outrider.request import FinishReason, LogprobsRequest, OutputOptions, Request, SamplingParams, StopConditions
from outrider.v1 import router_pb2
from outrider.wire.sampling import logprobs_mode_from_proto, token_logprobs_to_proto

_REASON_TO_PROTO = {
    FinishReason.STOP: router_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: router_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: router_pb2.FINISH_REASON_ABORTED,
}
_ROLE_TO_PROTO = {
    NodeRole.PREFILL: router_pb2.NODE_ROLE_PREFILL,
    NodeRole.DECODE: router_pb2.NODE_ROLE_DECODE,
    NodeRole.DRAFT: router_pb2.NODE_ROLE_DRAFT,
}
_STATE_TO_PROTO = {
    NodeState.STARTING: router_pb2.NODE_STATE_STARTING,
    NodeState.SERVING: router_pb2.NODE_STATE_SERVING,
    NodeState.DRAINING: router_pb2.NODE_STATE_DRAINING,
    NodeState.LOST: router_pb2.NODE_STATE_LOST,
}


# ---------------------------------------------------------------- requests


def request_from_proto(
    proto: router_pb2.GenerateRequest,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    prompt_text: str,
    seed: int,
    max_tokens: int,
) -> Request:
    """The complete request. `seed` and `max_tokens` are the ones in force; `prompt_text` is for echo."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        prompt_text=prompt_text,
        sampling=sampling_from_request(proto.sampling, seed=seed, max_tokens=max_tokens),
        generated_token_ids=tuple(proto.generated_token_ids),
        stop=StopConditions(
            strings=tuple(proto.stop.strings),
            token_ids=tuple(proto.stop.token_ids),
            ignore_eos=proto.stop.ignore_eos,
            include_match=proto.stop.include_match,
        ),
        output=output_from_proto(proto.output),
        num_speculative_tokens=num_speculative_tokens_from_proto(proto.speculation),
        priority=proto.priority,
    )


def sampling_from_request(proto: router_pb2.SamplingParams, *, seed: int, max_tokens: int) -> SamplingParams:
    """Defaults filled in; floats are the float32 that travelled."""
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=proto.temperature if proto.HasField("temperature") else 1.0,
        top_p=proto.top_p if proto.HasField("top_p") else 1.0,
        top_k=proto.top_k,
        min_p=proto.min_p,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty if proto.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        n=num_samples(proto),
        min_tokens=proto.min_tokens,
    )


def num_samples(proto: router_pb2.SamplingParams) -> int:
    return proto.n if proto.HasField("n") else 1


def output_from_proto(proto: router_pb2.OutputOptions) -> OutputOptions:
    logprobs = None
    if proto.HasField("top_logprobs"):
        logprobs = LogprobsRequest(num_top=proto.top_logprobs, mode=logprobs_mode_from_proto(int(proto.logprobs_mode)))
    return OutputOptions(
        logprobs=logprobs,
        skip_special_tokens=skips_special_tokens(proto),
        echo=proto.echo,
        token_ids_only=proto.token_ids_only,
    )


def skips_special_tokens(proto: router_pb2.OutputOptions | router_pb2.DetokenizeRequest) -> bool:
    """Default true."""
    return proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True


def num_speculative_tokens_from_proto(proto: router_pb2.SpeculationOptions) -> int | None:
    """None: the server's. 0: plain decoding."""
    if proto.HasField("enabled") and not proto.enabled:
        return 0
    return proto.num_speculative_tokens if proto.HasField("num_speculative_tokens") else None


def chat_from_proto(proto: router_pb2.Chat) -> tuple[list[dict[str, str]], bool]:
    """(messages as the template sees them, whether the assistant's turn is opened)."""
    messages = [{"role": message.role, "content": message.content} for message in proto.messages]
    return messages, proto.add_generation_prompt if proto.HasField("add_generation_prompt") else True


# ---------------------------------------------------------------- answers


def event_to_proto(event: AnswerEvent, *, request_id: str) -> router_pb2.GenerateResponse:
    """`request_id` is set with Started and Summary only, as the contract has it."""
    match event:
        case Delta():
            return _delta_response(event)
        case Finished():
            return router_pb2.GenerateResponse(finished=finished_to_proto(event))
        case Started():
            return router_pb2.GenerateResponse(request_id=request_id, started=started_to_proto(event))
        case Summary():
            return router_pb2.GenerateResponse(request_id=request_id, summary=summary_to_proto(event))


def started_to_proto(event: Started) -> router_pb2.Started:
    return router_pb2.Started(
        num_prompt_tokens=event.num_prompt_tokens, seed=event.seed, model=event.model, router=event.router
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
        delta.logprobs.extend(token_logprobs_to_proto(value) for value in event.logprobs)
    return response


def finished_to_proto(event: Finished) -> router_pb2.Finished:
    return router_pb2.Finished(
        sample=event.sample,
        reason=_REASON_TO_PROTO[event.reason],
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
    )


def summary_to_proto(event: Summary) -> router_pb2.Summary:
    return router_pb2.Summary(usage=usage_to_proto(event.usage), metrics=metrics_to_proto(event.metrics))


def usage_to_proto(usage: Usage) -> router_pb2.Usage:
    return router_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_generated_tokens=usage.num_generated_tokens,
    )


def metrics_to_proto(metrics: RequestMetrics) -> router_pb2.RequestMetrics:
    transfer, speculation = metrics.kv_transfer, metrics.speculation
    return router_pb2.RequestMetrics(
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
    )


def complete_to_proto(
    events: Sequence[AnswerEvent], *, request_id: str, num_samples: int
) -> router_pb2.CompleteResponse:
    """All events of an answer, folded into one message."""
    response = router_pb2.CompleteResponse(request_id=request_id)
    texts: list[list[str]] = [[] for _ in range(num_samples)]
    completions = [response.completions.add() for _ in range(num_samples)]
    for event in events:
        match event:
            case Delta():
                completion = completions[event.sample]
                completion.token_ids.extend(event.token_ids)
                completion.logprobs.extend(token_logprobs_to_proto(value) for value in event.logprobs)
                texts[event.sample].append(event.text)
            case Finished():
                completions[event.sample].finished.CopyFrom(finished_to_proto(event))
            case Started():
                response.started.CopyFrom(started_to_proto(event))
            case Summary():
                response.summary.CopyFrom(summary_to_proto(event))
    for completion, parts in zip(completions, texts, strict=True):
        completion.text = "".join(parts)
    return response


# ---------------------------------------------------------------- model and cluster


def model_to_proto(
    model: ModelInfo, *, proposer: str, num_speculative_tokens: int, version: str
) -> router_pb2.GetModelResponse:
    return router_pb2.GetModelResponse(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        proposer=proposer,
        num_speculative_tokens=num_speculative_tokens,
        verification_method=router_pb2.VERIFICATION_METHOD_COUPLED,
        fingerprint=model.fingerprint,
        version=version,
    )


def node_status_to_proto(
    *, name: str, role: NodeRole, state: NodeState, target: str, report: NodeReport | None
) -> router_pb2.NodeStatus:
    """`report` is None for a node that does not serve: all counts are zero."""
    proto = router_pb2.NodeStatus(name=name, role=_ROLE_TO_PROTO[role], state=_STATE_TO_PROTO[state], target=target)
    if report is not None:
        proto.step = report.step
        proto.num_running = report.load.num_running
        proto.num_waiting = report.load.num_waiting
        proto.kv_blocks_total = report.load.kv_blocks_total
        proto.kv_blocks_free = report.load.kv_blocks_free
        proto.tokens_per_second = report.load.tokens_per_second
        proto.mean_acceptance_length = report.load.mean_acceptance_length
    return proto
