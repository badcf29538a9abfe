"""router.proto → `outrider.client.values`."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TypeVar

from outrider.answer import Delta, Finished, KvTransferMetrics, RequestMetrics, SpeculationMetrics, Usage
from outrider.client.options import METHODS
from outrider.client.values import (
    ClusterStatus,
    CompleteResult,
    Completion,
    Model,
    NodeStatus,
    Started,
    Summary,
)
from outrider.node import NodeLoad, NodeRole, NodeState
from outrider.request import FinishReason, TokenLogprobs
from outrider.v1 import router_pb2

_METHOD_NAMES = {value: name for name, value in METHODS.items()}
_REASONS = {
    router_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    router_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    router_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}
Member = TypeVar("Member", bound=enum.Enum)


def read_started(proto: router_pb2.Started, request_id: str) -> Started:
    return Started(
        request_id=request_id,
        num_prompt_tokens=proto.num_prompt_tokens,
        seed=proto.seed,
        model=proto.model,
        router=proto.router,
        prompt_logprobs=read_logprobs(proto.prompt_logprobs),
    )


def read_delta(proto: router_pb2.Delta) -> Delta:
    return Delta(
        sample=proto.sample,
        start_position=proto.start_position,
        token_ids=tuple(proto.token_ids),
        text=proto.text,
        logprobs=read_logprobs(proto.logprobs),
    )


def read_logprobs(protos: Iterable[router_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
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


def read_finished(proto: router_pb2.Finished) -> Finished:
    return Finished(
        sample=proto.sample,
        reason=_REASONS.get(proto.reason, FinishReason.ABORTED),
        stop_string=proto.stop_string if proto.HasField("stop_string") else None,
        stop_token_id=proto.stop_token_id if proto.HasField("stop_token_id") else None,
    )


def read_summary(proto: router_pb2.Summary, request_id: str) -> Summary:
    metrics, moved, spec = proto.metrics, proto.metrics.kv_transfer, proto.metrics.speculative_decoding
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
                connector=moved.connector,
                bytes=moved.bytes,
                seconds=moved.seconds,
                exposed_seconds=moved.exposed_seconds,
            ),
            speculation=SpeculationMetrics(
                num_spec_steps=spec.num_spec_steps,
                num_draft_tokens=spec.num_draft_tokens,
                num_accepted_draft_tokens=spec.num_accepted_draft_tokens,
                draft_acceptance_rate=spec.draft_acceptance_rate,
                mean_acceptance_length=spec.mean_acceptance_length,
                acceptance_histogram=tuple(spec.acceptance_histogram),
                look_ahead_hit_rate=spec.look_ahead_hit_rate,
            ),
            attempts=metrics.attempts,
            nodes=tuple(metrics.nodes),
        ),
    )


def read_complete(proto: router_pb2.CompleteResponse) -> CompleteResult:
    return CompleteResult(
        request_id=proto.request_id,
        started=read_started(proto.started, proto.request_id),
        completions=tuple(
            Completion(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finished=read_finished(completion.finished),
                logprobs=read_logprobs(completion.logprobs),
            )
            for completion in proto.completions
        ),
        summary=read_summary(proto.summary, proto.request_id),
    )


def read_model(proto: router_pb2.GetModelResponse) -> Model:
    return Model(
        name=proto.name,
        revision=proto.revision,
        vocab_size=proto.vocab_size,
        max_model_len=proto.max_model_len,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        proposer=proto.proposer,
        num_speculative_tokens=proto.num_speculative_tokens,
        verification_method=_METHOD_NAMES.get(proto.verification_method, "unknown"),
        fingerprint=proto.fingerprint,
        version=proto.version,
    )


def read_cluster(proto: router_pb2.WatchClusterResponse) -> ClusterStatus:
    return ClusterStatus(
        nodes=tuple(
            NodeStatus(
                name=node.name,
                role=_member(NodeRole, node.role),
                state=_member(NodeState, node.state),
                target=node.target,
                step=node.step,
                load=NodeLoad(
                    num_running=node.num_running,
                    num_waiting=node.num_waiting,
                    kv_blocks_total=node.kv_blocks_total,
                    kv_blocks_free=node.kv_blocks_free,
                    tokens_per_second=node.tokens_per_second,
                    mean_acceptance_length=node.mean_acceptance_length,
                ),
            )
            for node in proto.nodes
        ),
        num_requests_running=proto.num_requests_running,
        num_requests_waiting=proto.num_requests_waiting,
    )


def _member(kind: type[Member], value: int) -> Member | None:
    return next((member for member in kind if member.value == value), None)
