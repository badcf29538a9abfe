"""Converts the requests of router.proto, and the request options that nodes get, to and from `outrider.request`.

A public request is converted after the router has validated it: unset fields get the
contract's defaults here, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.request import (
    Adapter,
    Blend,
    Constraint,
    ConstraintKind,
    LogprobsMode,
    LogprobsRequest,
    OutputOptions,
    Request,
    RequestOptions,
    SamplingParams,
    StopStrings,
    VerificationMethod,
)
from outrider.v1 import node_pb2, router_pb2
from outrider.wire.adapter import ADAPTER
from outrider.wire.enums import LOGPROBS_MODES, VERIFICATION_METHODS
from outrider.wire.fields import Conversion, Fields


def request_from_proto(
    proto: router_pb2.GenerateRequest,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    prompt_text: str,
    seed: int,
    max_tokens: int,
    eos_token_ids: Sequence[int] = (),
    cache_salt: bytes = b"",
    adapter: Adapter | None = None,
    blend: Blend | None = None,
    default_method: VerificationMethod = VerificationMethod.COUPLED,
) -> Request:
    """Returns the complete request. `seed` and `max_tokens` are the effective values; `prompt_text` is for echo."""
    sampling = _sampling_from_proto(proto.sampling, seed=seed, max_tokens=max_tokens)
    method = VERIFICATION_METHODS.from_proto_or(default_method).from_proto(proto.speculation.method)
    eos_token_ids = () if proto.stop.ignore_eos else eos_token_ids
    options = RequestOptions(
        sampling=sampling,
        stop_token_ids=tuple(sorted({*eos_token_ids, *proto.stop.token_ids})),
        logprobs=logprobs_request_from_proto(proto.output),
        num_speculative_tokens=num_speculative_tokens_from_proto(proto.speculation),
        # With temperature 0 the target allows only one token, so all methods give the same result.
        verification_method=VerificationMethod.COUPLED if sampling.is_greedy else method,
        priority=proto.priority,
        cache_salt=cache_salt,
        adapter=adapter,
        blend=blend,
        prompt_logprobs=proto.output.prompt_logprobs if proto.output.HasField("prompt_logprobs") else None,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        prompt_text=prompt_text,
        options=options,
        generated_token_ids=tuple(proto.generated_token_ids),
        stop=StopStrings(strings=tuple(proto.stop.strings), include_match=proto.stop.include_match),
        output=OutputOptions(
            skip_special_tokens=skips_special_tokens(proto.output),
            echo=proto.output.echo,
            token_ids_only=proto.output.token_ids_only,
            token_bytes=proto.output.token_bytes,
        ),
    )


_SAMPLING = Fields(
    SamplingParams,
    router_pb2.SamplingParams,
    elsewhere=("constraint", *ConstraintKind),
    logit_bias=Conversion(dict, lambda biases: tuple(sorted(biases.items()))),
)
"""Converts sampling parameters. In messages all fields are set, even to defaults; floats are rounded to float32."""


def constraint_from_proto(proto: router_pb2.SamplingParams) -> Constraint | None:
    """Returns the constraint; None if the output is unconstrained."""
    name = proto.WhichOneof("constraint")
    if name is None:
        return None
    kind = ConstraintKind(name)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, options=tuple(proto.choice.options))
    return Constraint(kind, getattr(proto, name))


def _sampling_to_proto(sampling: SamplingParams) -> router_pb2.SamplingParams:
    constraint = sampling.constraint
    others: dict[str, str | router_pb2.Choice] = {}
    if constraint is not None:
        is_choice = constraint.kind is ConstraintKind.CHOICE
        others[constraint.kind] = router_pb2.Choice(options=constraint.options) if is_choice else constraint.text
    return _SAMPLING.to_proto(sampling, **others)


def _sampling_from_proto(proto: router_pb2.SamplingParams, **others: int) -> SamplingParams:
    return _SAMPLING.from_proto(proto, constraint=constraint_from_proto(proto), **others)


def options_to_proto(options: RequestOptions) -> node_pb2.RequestOptions:
    logprobs: dict[str, int] = {}
    if options.logprobs is not None:
        logprobs = {
            "top_logprobs": options.logprobs.num_top,
            "logprobs_mode": LOGPROBS_MODES.to_proto(options.logprobs.mode),
        }
    return _OPTIONS.to_proto(options, **logprobs)


def options_from_proto(proto: node_pb2.RequestOptions) -> RequestOptions:
    return _OPTIONS.from_proto(proto, logprobs=logprobs_request_from_proto(proto))


_BLEND = Fields(Blend, router_pb2.Blend, elsewhere=("separator",))
_OPTIONS = Fields(
    RequestOptions,
    node_pb2.RequestOptions,
    elsewhere=("logprobs", "top_logprobs", "logprobs_mode"),
    sampling=Conversion(_sampling_to_proto, _sampling_from_proto),
    verification_method=VERIFICATION_METHODS.from_proto_or(VerificationMethod.COUPLED),
    adapter=ADAPTER,
    blend=_BLEND,
)
OPTIONS = Conversion(options_to_proto, options_from_proto)


def num_samples(proto: router_pb2.SamplingParams) -> int:
    return proto.n if proto.HasField("n") else 1


def logprobs_request_from_proto(proto: router_pb2.OutputOptions | node_pb2.RequestOptions) -> LogprobsRequest | None:
    """Returns None if no logprobs are wanted. An unspecified mode is MODEL, the contract's default."""
    if not proto.HasField("top_logprobs"):
        return None
    mode = LOGPROBS_MODES.from_proto_or(LogprobsMode.MODEL).from_proto(proto.logprobs_mode)
    return LogprobsRequest(num_top=proto.top_logprobs, mode=mode)


def skips_special_tokens(proto: router_pb2.OutputOptions | router_pb2.DetokenizeRequest) -> bool:
    """Returns whether special tokens are skipped; true by default."""
    return proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True


def num_speculative_tokens_from_proto(proto: router_pb2.SpeculationOptions) -> int | None:
    """Returns the number of speculative tokens; None for the server's default, 0 for plain decoding."""
    if proto.HasField("enabled") and not proto.enabled:
        return 0
    return proto.num_speculative_tokens if proto.HasField("num_speculative_tokens") else None


def chat_from_proto(proto: router_pb2.Chat) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (messages, variables of the template). Raises: InvalidRequestError if a value is not JSON."""
    messages = []
    for index, message in enumerate(proto.messages):
        members = _from_json(message.members, f"chat.messages[{index}].members")
        # The order of the members matters, because a template may print a whole message.
        messages.append({"role": message.role, "content": message.content} | members | {"role": message.role})
    is_open = (
        proto.add_generation_prompt if proto.HasField("add_generation_prompt") else not proto.continue_final_message
    )
    variables = _from_json(proto.template_kwargs, "chat.template_kwargs")
    return messages, variables | {
        "add_generation_prompt": is_open,
        "continue_final_message": proto.continue_final_message,
    }


def _from_json(values: Mapping[str, str], field: str) -> dict[str, Any]:
    """Parses the values. Raises: InvalidRequestError if one is not JSON."""
    found: dict[str, Any] = {}
    for name, text in sorted(values.items()):
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{field}[{name!r}] is not JSON: {error}", field=field) from error
    return found


def complete_proto(proto: router_pb2.GenerateRequest, request: Request) -> router_pb2.GenerateRequest:
    """Returns the public request in a form that means the same on every router.

    Its prompt is token ids, and its request id, seed, max_tokens and verification method are set. If `model` names an
    adapter, the adapter's fingerprint is set.
    """
    complete = router_pb2.GenerateRequest()
    complete.CopyFrom(proto)
    complete.request_id = request.request_id
    complete.token_ids.ids[:] = request.prompt_token_ids
    complete.sampling.seed = request.options.sampling.seed
    complete.sampling.max_tokens = request.options.sampling.max_tokens
    complete.speculation.method = VERIFICATION_METHODS.to_proto(request.options.verification_method)
    complete.ClearField("blend")
    if request.options.blend is not None:
        complete.blend.CopyFrom(_BLEND.to_proto(request.options.blend))
    if request.options.adapter is not None:
        complete.adapter_fingerprint = request.options.adapter.fingerprint
    return complete
