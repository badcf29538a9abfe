"""Validates public requests, encodes their prompts, and fills in defaults.

`check_request` validates the message alone, which is cheap. `read_request` encodes the prompt, validates what depends
on its tokens (`check_prompt`), and compiles the constraint. Both raise an InvalidRequestError that names the field by
its path, for example "sampling.top_p".
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from outrider.errors import InvalidRequestError, MismatchError, NotFoundError
from outrider.node import ModelInfo
from outrider.request import GREEDY_TEMPERATURE, MAX_TOP_LOGPROBS, Adapter, Request, VerificationMethod
from outrider.rpc.channels import DEFAULT_MAX_MESSAGE_BYTES
from outrider.v1 import router_pb2
from outrider.wire.answer import max_logprobs_bytes
from outrider.wire.request import (
    chat_from_proto,
    constraint_from_proto,
    num_samples,
    request_from_proto,
    skips_special_tokens,
)
from router.api.blend_parsing import check_blend, read_blend
from router.api.clients import Caller
from router.nodes.directory import ServedModel
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import EncodedPrompt

NO_ADAPTERS: Mapping[str, Adapter] = MappingProxyType({})
MAX_REQUEST_ID_LENGTH = 128
MAX_SAMPLES = 64
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_CONSTRAINT_BYTES = 65_536
MAX_CHOICES = 1024
MAX_DETOKENIZED = 1 << 20
"""Maximum token ids in one Detokenize. This exceeds any context window, and can be checked within milliseconds."""
_PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_MAX_DURATION_SECONDS = 315_576_000_000  # the largest value of google.protobuf.Duration
MAX_RESUME_WINDOW_SECONDS = 3600.0
"""Maximum resume window in seconds. Longer ones are shortened, as unread answers take memory here and in the store."""
SEED_LIMIT = 1 << 53
"""Upper bound of the seeds that the router draws. Below it, integers are exact as double-precision numbers, which are
the only numbers of some languages.
"""


async def read_request(
    proto: router_pb2.GenerateRequest,
    served: ServedModel,
    caller: Caller,
    *,
    request_id: str,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
    default_method: VerificationMethod = VerificationMethod.COUPLED,
) -> Request:
    """Returns the request for the nodes. `proto` must have passed `check_request`.

    `adapters`: by name. `default_method`: the verification method of a request that names none.

    Raises: InvalidRequestError if the prompt does not fit or the constraint does not compile; CapacityError if the
    queue of texts or of constraints is full; NotFoundError or MismatchError if the adapter has changed meanwhile.
    """
    adapter = find_adapter(proto, served.info, adapters)
    token_ids, piece_lengths = await encode_prompt(proto, served, client=caller.share)
    max_tokens = check_prompt(proto, token_ids, served.info)
    constraint = constraint_from_proto(proto.sampling)
    if constraint is not None:
        await served.constraints.check(constraint, client=caller.share)
    prompt_text = ""
    if proto.output.echo and not proto.output.token_ids_only and not proto.generated_token_ids:
        skip = skips_special_tokens(proto.output)
        prompt_text = await served.tokenizer.decode(token_ids, skip_special_tokens=skip, client=caller.share)
    seed = proto.sampling.seed if proto.sampling.HasField("seed") else secrets.randbelow(SEED_LIMIT)
    return request_from_proto(
        proto,
        request_id=request_id,
        prompt_token_ids=token_ids,
        prompt_text=prompt_text,
        seed=seed,
        max_tokens=max_tokens,
        eos_token_ids=served.info.eos_token_ids,
        cache_salt=caller.cache_salt,
        adapter=adapter,
        blend=read_blend(proto, piece_lengths),
        default_method=default_method,
    )


def resume_window_seconds(proto: router_pb2.GenerateRequest) -> float | None:
    """Returns the resume window, at most `MAX_RESUME_WINDOW_SECONDS`; None if the request is not resumable."""
    if not proto.HasField("resume_window"):
        return None
    return min(proto.resume_window.seconds + proto.resume_window.nanos / 1e9, MAX_RESUME_WINDOW_SECONDS)


async def encode_prompt(
    proto: router_pb2.GenerateRequest | router_pb2.TokenizeRequest, served: ServedModel, *, client: str = ""
) -> EncodedPrompt:
    """Returns the prompt's token ids, and the lengths of the pieces that its separator ends.

    Raises: InvalidRequestError if the chat template refuses the messages or the text is certain to exceed the window;
    CapacityError if the queue of texts is full.
    """
    tokenizer, max_tokens = served.tokenizer, served.info.max_model_len
    separator = ""
    if isinstance(proto, router_pb2.GenerateRequest):
        separator = proto.blend.separator
        if proto.HasField("token_ids"):
            return EncodedPrompt(list(proto.token_ids.ids))
    if proto.HasField("chat"):

        def render(template: ChatTemplate) -> str:
            messages, variables = chat_from_proto(proto.chat)
            return template.render(messages, **variables)

        return await tokenizer.encode_chat(
            render,
            separator=separator,
            num_bytes=proto.chat.ByteSize(),
            client=client,
            max_tokens=max_tokens,
        )
    return await tokenizer.encode_text(proto.text, separator=separator, client=client, max_tokens=max_tokens)


def find_adapter(
    proto: router_pb2.GenerateRequest, model: ModelInfo, adapters: Mapping[str, Adapter]
) -> Adapter | None:
    """Returns the adapter that the request's `model` names; None: the model itself. `adapters`: by name.

    Raises: NotFoundError for another name; MismatchError if the adapter does not have the request's fingerprint;
    InvalidRequestError if the request continues tokens of an adapter without naming its fingerprint.
    """
    adapter = adapters.get(proto.model)
    if adapter is None and proto.model not in ("", model.name):
        others = f", with the adapters {', '.join(map(repr, sorted(adapters)))}" if adapters else ""
        message = f"model {proto.model!r} is not served; the served model is {model.name!r}{others}"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND")
    fingerprint = "" if adapter is None else adapter.fingerprint
    if proto.adapter_fingerprint not in ("", fingerprint):
        named = f"the adapter {adapter}" if adapter is not None else f"the model {model.name!r} itself"
        wanted = f"{proto.adapter_fingerprint[:12]}…"
        message = f"the request needs an adapter with the fingerprint {wanted}, but names {named}"
        raise MismatchError(message, reason="ADAPTER_MISMATCH")
    if adapter is not None and proto.generated_token_ids and not proto.adapter_fingerprint:
        message = "generated_token_ids of an adapter require its fingerprint, which Started has"
        raise InvalidRequestError(message, field="adapter_fingerprint")
    return adapter


def check_request(
    proto: router_pb2.GenerateRequest, model: ModelInfo, adapters: Mapping[str, Adapter] = NO_ADAPTERS
) -> None:
    """Checks the message alone. `adapters`: by name.

    Raises: InvalidRequestError; NotFoundError for another model; MismatchError for another adapter of its name.
    """
    check_request_id(proto.request_id)
    find_adapter(proto, model, adapters)
    _check_prompt(proto, model)
    _check_sampling(proto.sampling, model)
    _check_stop(proto.stop, model)
    _check_output(proto.output)
    _check_speculation(proto.speculation)
    _check_resume_window(proto)
    _check_generated(proto, model)
    check_blend(proto)


def check_prompt(proto: router_pb2.GenerateRequest, token_ids: Sequence[int], model: ModelInfo) -> int:
    """Checks the encoded prompt, and returns the effective max_tokens.

    Raises: InvalidRequestError if the request exceeds the context window or the size of a message, or if the model has
    no embedding for a token. (A tokenizer may have more ids than its model.)
    """
    field = _PROMPT_FIELDS[proto.WhichOneof("prompt") or "text"]
    window, sampling, num_prompt_tokens = model.max_model_len, proto.sampling, len(token_ids)
    left = window - num_prompt_tokens
    _require(num_prompt_tokens > 0, "the prompt must have at least one token", field=field)
    _require(
        left >= 1,
        f"the prompt has {num_prompt_tokens} tokens; with one generated token it exceeds the window of {window}",
        field=field,
        reason="PROMPT_TOO_LONG",
    )
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else left
    _require(
        max_tokens <= left,
        f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the window of {window};"
        f" at most {left} are left",
        field="sampling.max_tokens",
    )
    _require(
        sampling.min_tokens <= max_tokens,
        f"min_tokens {sampling.min_tokens} exceeds max_tokens {max_tokens}",
        field="sampling.min_tokens",
    )
    if proto.output.HasField("prompt_logprobs"):
        num_bytes = max_logprobs_bytes(num_prompt_tokens, proto.output.prompt_logprobs)
        _require(
            num_bytes <= DEFAULT_MAX_MESSAGE_BYTES,
            f"logprobs of {num_prompt_tokens} prompt tokens with {proto.output.prompt_logprobs} alternatives may take "
            f"{num_bytes} bytes, which exceeds the message limit of {DEFAULT_MAX_MESSAGE_BYTES}; ask for fewer",
            field="output.prompt_logprobs",
            reason="ANSWER_TOO_LARGE",
        )
    check_token_ids(token_ids, model, field=field)
    return max_tokens


def check_chat(chat: router_pb2.Chat, model: ModelInfo) -> None:
    """Checks the number of messages, then each message, so that a huge chat is rejected at once.

    Raises: InvalidRequestError.
    """
    num_messages = len(chat.messages)
    _require(num_messages > 0, "the chat must have at least one message", field="chat.messages")
    _require(
        num_messages <= model.max_model_len,
        f"the chat's {num_messages} messages exceed the window of {model.max_model_len} tokens",
        field="chat.messages",
        reason="PROMPT_TOO_LONG",
    )
    for name in ("messages", "add_generation_prompt", "continue_final_message"):
        is_allowed = name not in chat.template_kwargs
        _require(is_allowed, f"template_kwargs must not have {name}, which is a field", field="chat.template_kwargs")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError("the role of a message must not be empty", field=f"chat.messages[{index}].role")


def check_detokenize(proto: router_pb2.DetokenizeRequest, model: ModelInfo) -> None:
    """Checks the number of token ids, then each id. Raises: InvalidRequestError."""
    num_ids = len(proto.token_ids)
    message = f"{num_ids} token ids exceed the limit of {MAX_DETOKENIZED} per call"
    _require(num_ids <= MAX_DETOKENIZED, message, field="token_ids")
    check_token_ids(proto.token_ids, model, field="token_ids")


def check_token_ids(token_ids: Iterable[int], model: ModelInfo, *, field: str) -> None:
    if max(token_ids, default=0) < model.vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} (at index {index}) exceeds the vocabulary of {model.vocab_size} tokens",
                field=field,
                reason="TOKEN_OUT_OF_VOCABULARY",
            )


def check_request_id(request_id: str) -> None:
    is_allowed = len(request_id) <= MAX_REQUEST_ID_LENGTH and all(" " <= character <= "~" for character in request_id)
    message = f"request_id must have at most {MAX_REQUEST_ID_LENGTH} characters, all printable ASCII"
    _require(is_allowed, message, field="request_id")


def _check_prompt(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    match proto.WhichOneof("prompt"):
        case None:
            raise InvalidRequestError("a prompt is required: text, token_ids or chat", field="prompt")
        case "token_ids":
            num_ids = len(proto.token_ids.ids)
            if not 0 < num_ids < model.max_model_len:  # rejected here, before each id is checked
                check_prompt(proto, proto.token_ids.ids, model)
        case "chat":
            check_chat(proto.chat, model)


_Rule = tuple[str, Callable[[router_pb2.SamplingParams], bool], str]
_SAMPLING_RULES: tuple[_Rule, ...] = (  # (field, predicate of allowed values, the predicate in words)
    ("temperature", lambda s: math.isfinite(s.temperature) and s.temperature >= 0, "finite and at least 0"),
    ("top_p", lambda s: not s.HasField("top_p") or 0 < s.top_p <= 1, "above 0 and at most 1"),
    ("min_p", lambda s: 0 <= s.min_p <= 1, "0 to 1"),
    ("presence_penalty", lambda s: -2 <= s.presence_penalty <= 2, "-2 to 2"),
    ("frequency_penalty", lambda s: -2 <= s.frequency_penalty <= 2, "-2 to 2"),
    (
        "repetition_penalty",
        lambda s: not s.HasField("repetition_penalty") or 0 < s.repetition_penalty < math.inf,
        "finite and above 0",
    ),
    ("n", lambda s: 1 <= num_samples(s) <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
    ("max_tokens", lambda s: not s.HasField("max_tokens") or s.max_tokens >= 1, "at least 1"),
    ("min_tokens", lambda s: not s.HasField("max_tokens") or s.min_tokens <= s.max_tokens, "at most max_tokens"),
)


def _check_sampling(sampling: router_pb2.SamplingParams, model: ModelInfo) -> None:
    for name, is_allowed, allowed in _SAMPLING_RULES:
        if not is_allowed(sampling):
            message = f"{name} must be {allowed}, not {getattr(sampling, name)}"
            raise InvalidRequestError(message, field=f"sampling.{name}")
    _check_count(len(sampling.logit_bias), MAX_LOGIT_BIAS, "logit_bias entries", field="sampling.logit_bias")
    check_token_ids(sampling.logit_bias, model, field="sampling.logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            message = f"logit_bias of token {token_id} must be finite, not {bias}"
            raise InvalidRequestError(message, field="sampling.logit_bias")
    _check_constraint(sampling)


def _check_constraint(sampling: router_pb2.SamplingParams) -> None:
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return
    if kind == "choice":
        options = sampling.choice.options
        message = (
            f"choice must have 1 to {MAX_CHOICES} options, none of them empty, with at most {MAX_CONSTRAINT_BYTES} "
            "bytes in total"
        )
        has_size = sum(len(option.encode()) for option in options) <= MAX_CONSTRAINT_BYTES
        is_allowed = 0 < len(options) <= MAX_CHOICES and all(options) and has_size
        _require(is_allowed, message, field="sampling.choice.options")
        return
    text, field = getattr(sampling, kind), f"sampling.{kind}"
    has_size = 0 < len(text.encode()) <= MAX_CONSTRAINT_BYTES
    _require(has_size, f"{kind} must have 1 to {MAX_CONSTRAINT_BYTES} bytes", field=field)
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"json_schema is not valid JSON: {error}", field=field) from error
        _require(isinstance(schema, (dict, bool)), "json_schema must be an object or a boolean", field=field)


def _check_stop(stop: router_pb2.StopConditions, model: ModelInfo) -> None:
    _check_count(len(stop.strings), MAX_STOP_STRINGS, "stop strings", field="stop.strings")
    for index, string in enumerate(stop.strings):
        num_bytes = len(string.encode())
        message = f"stop string {index} has {num_bytes} bytes; 1 to {MAX_STOP_STRING_BYTES} are allowed"
        _require(1 <= num_bytes <= MAX_STOP_STRING_BYTES, message, field="stop.strings")
    _check_count(len(stop.token_ids), MAX_STOP_TOKENS, "stop tokens", field="stop.token_ids")
    check_token_ids(stop.token_ids, model, field="stop.token_ids")


def _check_output(output: router_pb2.OutputOptions) -> None:
    for name in ("top_logprobs", "prompt_logprobs"):
        number = getattr(output, name)
        message = f"{name} must be 0 to {MAX_TOP_LOGPROBS}, not {number}"
        _require(number <= MAX_TOP_LOGPROBS, message, field=f"output.{name}")
    is_known = int(output.logprobs_mode) in router_pb2.LogprobsMode.values()
    _require(is_known, f"logprobs_mode {output.logprobs_mode} is unknown", field="output.logprobs_mode")


def _check_speculation(speculation: router_pb2.SpeculationOptions) -> None:
    is_known = int(speculation.method) in router_pb2.VerificationMethod.values()
    _require(is_known, f"verification method {speculation.method} is unknown", field="speculation.method")


def _check_resume_window(proto: router_pb2.GenerateRequest) -> None:
    window = proto.resume_window
    is_duration = 0 <= window.seconds <= _MAX_DURATION_SECONDS and 0 <= window.nanos < 1_000_000_000
    _require(is_duration, "resume_window must be a valid duration of at least 0", field="resume_window")


def _check_generated(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    num_generated = len(proto.generated_token_ids)
    if not num_generated:
        return
    sampling = proto.sampling
    _require(num_samples(sampling) == 1, "generated_token_ids require n = 1", field="generated_token_ids")
    is_greedy = sampling.HasField("temperature") and sampling.temperature < GREEDY_TEMPERATURE
    _require(
        is_greedy or sampling.HasField("seed"),
        "generated_token_ids require the seed with which they were generated, unless temperature is 0",
        field="sampling.seed",
    )
    message = f"{num_generated} generated tokens exceed the window of {model.max_model_len}"
    _require(num_generated <= model.max_model_len, message, field="generated_token_ids")
    check_token_ids(proto.generated_token_ids, model, field="generated_token_ids")


def _check_count(number: int, limit: int, what: str, *, field: str) -> None:
    _require(number <= limit, f"{number} {what}; at most {limit} are allowed", field=field)


def _require(is_allowed: bool, message: str, *, field: str, reason: str | None = None) -> None:  # noqa: FBT001 like `assert`
    """Raises: InvalidRequestError unless `is_allowed`."""
    if not is_allowed:
        raise InvalidRequestError(message, field=field, reason=reason)
