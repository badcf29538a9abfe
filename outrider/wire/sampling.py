"""SamplingParams and logprobs on internal streams: complete values, already validated by the router.

The public request, with its defaults and ranges, is read in `outrider.wire.router`.
"""

from __future__ import annotations

from outrider.request import LogprobsMode, SamplingParams, TokenLogprobs
from outrider.v1 import router_pb2

_MODE_TO_PROTO = {
    LogprobsMode.MODEL: router_pb2.LOGPROBS_MODE_MODEL,
    LogprobsMode.SAMPLED: router_pb2.LOGPROBS_MODE_SAMPLED,
}
_MODE_FROM_PROTO = {proto: mode for mode, proto in _MODE_TO_PROTO.items()}


def sampling_to_proto(params: SamplingParams) -> router_pb2.SamplingParams:
    """Every field set, defaults included."""
    return router_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
    )


def sampling_from_proto(proto: router_pb2.SamplingParams) -> SamplingParams:
    """The inverse of `sampling_to_proto`; floats come back as the float32 they travelled as."""
    return SamplingParams(
        seed=proto.seed,
        max_tokens=proto.max_tokens,
        temperature=proto.temperature,
        top_p=proto.top_p,
        top_k=proto.top_k,
        min_p=proto.min_p,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        n=proto.n,
        min_tokens=proto.min_tokens,
    )


def logprobs_mode_to_proto(mode: LogprobsMode) -> router_pb2.LogprobsMode:
    return _MODE_TO_PROTO[mode]


def logprobs_mode_from_proto(proto: int) -> LogprobsMode:
    """Unspecified is MODEL, the contract's default."""
    return _MODE_FROM_PROTO.get(proto, LogprobsMode.MODEL)  # type: ignore[call-overload, no-any-return]


def token_logprobs_to_proto(value: TokenLogprobs) -> router_pb2.TokenLogprobs:
    return router_pb2.TokenLogprobs(
        token_id=value.token_id,
        logprob=value.logprob,
        rank=value.rank,
        top=[router_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top],
    )


def token_logprobs_from_proto(proto: router_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=proto.token_id,
        logprob=proto.logprob,
        rank=proto.rank,
        top=tuple((entry.token_id, entry.logprob) for entry in proto.top),
    )
