"""router.proto's requests ⇄ `outrider.request`.

A public request is converted after the router has validated it: what is unset becomes the
contract's default here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.request import (
    LogprobsMode,
    LogprobsRequest,
    OutputOptions,
    Request,
    SamplingParams,
    StopConditions,
    VerificationMethod,
)
from outrider.v1 import router_pb2
from outrider.wire.enums import LOGPROBS_MODES, VERIFICATION_METHODS


def request_from_proto(
    proto: router_pb2.GenerateRequest,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    prompt_text: str,
    seed: int,
    max_tokens: int,
    cache_salt: bytes = b"",
    default_method: VerificationMethod = VerificationMethod.COUPLED,
) -> Request:
    """The complete request. `seed` and `max_tokens` are the ones in force; `prompt_text` is for echo."""
    sampling = sampling_from_proto(proto.sampling, seed=seed, max_tokens=max_tokens)
    method = verification_method_from_proto(proto.speculation.method, default=default_method)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        prompt_text=prompt_text,
        sampling=sampling,
        generated_token_ids=tuple(proto.generated_token_ids),
        stop=StopConditions(
            strings=tuple(proto.stop.strings),
            token_ids=tuple(proto.stop.token_ids),
            ignore_eos=proto.stop.ignore_eos,
            include_match=proto.stop.include_match,
        ),
        output=output_from_proto(proto.output),
        num_speculative_tokens=num_speculative_tokens_from_proto(proto.speculation),
        # With temperature 0 the target has one token only, and all methods are the same.
        verification_method=VerificationMethod.COUPLED if sampling.is_greedy else method,
        priority=proto.priority,
        cache_salt=cache_salt,
    )


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


def sampling_from_proto(
    proto: router_pb2.SamplingParams, *, seed: int | None = None, max_tokens: int | None = None
) -> SamplingParams:
    """Defaults filled in; floats are the float32 that travelled. `seed`, `max_tokens`: in place of the message's."""
    return SamplingParams(
        seed=proto.seed if seed is None else seed,
        max_tokens=proto.max_tokens if max_tokens is None else max_tokens,
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


def logprobs_mode_from_proto(proto: int) -> LogprobsMode:
    """Unspecified is MODEL, the contract's default."""
    return LOGPROBS_MODES.known_from_proto(proto) or LogprobsMode.MODEL


def output_from_proto(proto: router_pb2.OutputOptions) -> OutputOptions:
    logprobs = None
    if proto.HasField("top_logprobs"):
        logprobs = LogprobsRequest(num_top=proto.top_logprobs, mode=logprobs_mode_from_proto(proto.logprobs_mode))
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


def verification_method_from_proto(
    proto: int, *, default: VerificationMethod = VerificationMethod.COUPLED
) -> VerificationMethod:
    """Unspecified is the default; so is a number that this version does not know, which validation refuses."""
    return VERIFICATION_METHODS.known_from_proto(proto) or default


def chat_from_proto(proto: router_pb2.Chat) -> tuple[Iterator[dict[str, str]], bool]:
    """(messages as the template sees them, read as they are asked for; whether the assistant's turn is opened)."""
    messages = ({"role": message.role, "content": message.content} for message in proto.messages)
    return messages, proto.add_generation_prompt if proto.HasField("add_generation_prompt") else True
