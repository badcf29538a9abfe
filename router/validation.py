"""Every way in which a request can be wrong, found before any compute is spent.

Two passes: `check_request` looks at the message alone (ranges first, then what this
version does not have), `check_lengths` at what needs the encoded prompt. Each raises
InvalidRequestError naming the field by its path, such as "sampling.top_p".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from outrider.errors import InvalidRequestError, NotFoundError, NotSupportedError
from outrider.node import ModelInfo
from outrider.request import GREEDY_TEMPERATURE
from outrider.v1 import router_pb2
from outrider.wire.request import num_samples

MAX_REQUEST_ID_LENGTH = 128
MAX_SAMPLES = 64
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_CONSTRAINT_BYTES = 65_536
MAX_CHOICES = 1024
MAX_DETOKENIZED = 1 << 20
"""Token ids of one Detokenize: more than any window, and milliseconds to look through."""
_MAX_DURATION_SECONDS = 315_576_000_000  # google.protobuf.Duration's own range


def check_request(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    """Raises: InvalidRequestError, NotFoundError (model), NotSupportedError (after all ranges)."""
    check_request_id(proto.request_id)
    check_model_name(proto.model, model)
    _check_prompt(proto, model)
    _check_sampling(proto.sampling, model)
    _check_stop(proto.stop, model)
    _check_output(proto.output)
    _check_speculation(proto.speculation)
    _check_resume_window(proto)
    _check_generated(proto, model)
    _check_supported(proto)


def check_lengths(proto: router_pb2.GenerateRequest, num_prompt_tokens: int, model: ModelInfo) -> int:
    """The max_tokens in force. Raises: InvalidRequestError when prompt and answer do not fit the window."""
    field = prompt_field(proto)
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no token; at least one is needed", field=field)
    left = model.max_model_len - num_prompt_tokens
    if left < 1:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens; with one more token it exceeds the window of"
            f" {model.max_model_len}",
            field=field,
            reason="PROMPT_TOO_LONG",
        )
    max_tokens = proto.sampling.max_tokens if proto.sampling.HasField("max_tokens") else left
    if max_tokens > left:
        raise InvalidRequestError(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the window of {model.max_model_len};"
            f" at most {left} are left",
            field="sampling.max_tokens",
        )
    if proto.sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens {proto.sampling.min_tokens} is more than max_tokens {max_tokens}", field="sampling.min_tokens"
        )
    return max_tokens


def check_chat(chat: router_pb2.Chat, model: ModelInfo, *, field: str = "chat") -> None:
    """The number of messages first: an over-long chat is refused before each of its messages is looked at."""
    if not chat.messages:
        raise InvalidRequestError("a chat has at least one message", field=f"{field}.messages")
    if len(chat.messages) > model.max_model_len:
        raise InvalidRequestError(
            f"the chat has {len(chat.messages)} messages, the window {model.max_model_len} tokens",
            field=f"{field}.messages",
            reason="PROMPT_TOO_LONG",
        )
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError("a message's role is empty", field=f"{field}.messages[{index}].role")


def check_detokenize(proto: router_pb2.DetokenizeRequest, model: ModelInfo) -> None:
    """Raises: InvalidRequestError."""
    if len(proto.token_ids) > MAX_DETOKENIZED:
        raise InvalidRequestError(
            f"{len(proto.token_ids)} token ids; at most {MAX_DETOKENIZED} are decoded at once", field="token_ids"
        )
    check_token_ids(proto.token_ids, model, field="token_ids")


def check_token_ids(token_ids: Iterable[int], model: ModelInfo, *, field: str) -> None:
    if max(token_ids, default=0) < model.vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} (at index {index}) is out of the vocabulary of {model.vocab_size}",
                field=field,
                reason="TOKEN_OUT_OF_VOCABULARY",
            )


def check_model_name(name: str, model: ModelInfo) -> None:
    if name and name != model.name:
        raise NotFoundError(f"model {name!r} is not served here, {model.name!r} is", reason="MODEL_NOT_FOUND")


def prompt_field(proto: router_pb2.GenerateRequest) -> str:
    """The path of the prompt that was sent."""
    return {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}.get(
        proto.WhichOneof("prompt") or "", "prompt"
    )


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not all(" " <= character <= "~" for character in request_id):
        raise InvalidRequestError("request_id is 1 to 128 printable ASCII characters", field="request_id")


def _check_prompt(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    match proto.WhichOneof("prompt"):
        case None:
            raise InvalidRequestError("one of text, token_ids and chat is needed", field="prompt")
        case "token_ids":
            check_lengths_of_ids(proto, model)
            check_token_ids(proto.token_ids.ids, model, field="token_ids.ids")
        case "chat":
            check_chat(proto.chat, model)


def check_lengths_of_ids(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    """An empty or over-long list of ids is refused before each of its ids is looked at."""
    num_ids = len(proto.token_ids.ids)
    if not 0 < num_ids < model.max_model_len:
        check_lengths(proto, num_ids, model)


def _check_sampling(sampling: router_pb2.SamplingParams, model: ModelInfo) -> None:
    def check(name: str, *, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise InvalidRequestError(f"{name} is {allowed}, not {getattr(sampling, name)}", field=f"sampling.{name}")

    temperature = sampling.temperature
    check("temperature", is_allowed=math.isfinite(temperature) and temperature >= 0, allowed="finite and at least 0")
    check(
        "top_p", is_allowed=not sampling.HasField("top_p") or 0 < sampling.top_p <= 1, allowed="above 0 and at most 1"
    )
    check("min_p", is_allowed=0 <= sampling.min_p <= 1, allowed="0 to 1")
    check("presence_penalty", is_allowed=-2 <= sampling.presence_penalty <= 2, allowed="-2 to 2")
    check("frequency_penalty", is_allowed=-2 <= sampling.frequency_penalty <= 2, allowed="-2 to 2")
    penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    check("repetition_penalty", is_allowed=math.isfinite(penalty) and penalty > 0, allowed="finite and above 0")
    check("n", is_allowed=1 <= num_samples(sampling) <= MAX_SAMPLES, allowed=f"1 to {MAX_SAMPLES}")
    has_max_tokens = sampling.HasField("max_tokens")
    check("max_tokens", is_allowed=not has_max_tokens or sampling.max_tokens >= 1, allowed="at least 1")
    if has_max_tokens:
        fits = sampling.min_tokens <= sampling.max_tokens
        check("min_tokens", is_allowed=fits, allowed=f"at most max_tokens, {sampling.max_tokens}")
    _check_logit_bias(sampling, model)
    _check_constraint(sampling)


def _check_logit_bias(sampling: router_pb2.SamplingParams, model: ModelInfo) -> None:
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(sampling.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
            field="sampling.logit_bias",
        )
    check_token_ids(sampling.logit_bias, model, field="sampling.logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is finite, not {bias}", field="sampling.logit_bias"
            )


def _check_constraint(sampling: router_pb2.SamplingParams) -> None:
    kind = sampling.WhichOneof("constraint")
    if kind == "choice":
        options = sampling.choice.options
        if not (0 < len(options) <= MAX_CHOICES and all(options)):
            raise InvalidRequestError(
                f"choice has 1 to {MAX_CHOICES} options, none empty", field="sampling.choice.options"
            )
    elif kind is not None:
        _check_constraint_text(kind, getattr(sampling, kind))


def _check_constraint_text(kind: str, text: str) -> None:
    field = f"sampling.{kind}"
    if not 0 < len(text.encode()) <= MAX_CONSTRAINT_BYTES:
        raise InvalidRequestError(f"{kind} has 1 to {MAX_CONSTRAINT_BYTES} bytes", field=field)
    if kind != "json_schema":
        return
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}", field=field) from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("json_schema is an object or a boolean", field=field)


def _check_stop(stop: router_pb2.StopConditions, model: ModelInfo) -> None:
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"{len(stop.strings)} stop strings; at most {MAX_STOP_STRINGS} are allowed", field="stop.strings"
        )
    for index, string in enumerate(stop.strings):
        if not 1 <= len(string.encode()) <= MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(
                f"stop string {index} has {len(string.encode())} bytes; 1 to {MAX_STOP_STRING_BYTES} are allowed",
                field="stop.strings",
            )
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"{len(stop.token_ids)} stop tokens; at most {MAX_STOP_TOKENS} are allowed", field="stop.token_ids"
        )
    check_token_ids(stop.token_ids, model, field="stop.token_ids")


def _check_output(output: router_pb2.OutputOptions) -> None:
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(output, name) > MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"{name} is 0 to {MAX_TOP_LOGPROBS}, not {getattr(output, name)}", field=f"output.{name}"
            )
    if int(output.logprobs_mode) not in router_pb2.LogprobsMode.values():
        raise InvalidRequestError(f"logprobs_mode {output.logprobs_mode} is unknown", field="output.logprobs_mode")


def _check_speculation(speculation: router_pb2.SpeculationOptions) -> None:
    if int(speculation.method) not in router_pb2.VerificationMethod.values():
        raise InvalidRequestError(f"verification method {speculation.method} is unknown", field="speculation.method")


def _check_resume_window(proto: router_pb2.GenerateRequest) -> None:
    if not proto.HasField("resume_window"):
        return
    window = proto.resume_window
    is_duration = 0 <= window.seconds <= _MAX_DURATION_SECONDS and 0 <= window.nanos < 1_000_000_000
    if not is_duration:
        raise InvalidRequestError("resume_window is a duration of at least 0", field="resume_window")


def _check_generated(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    if not proto.generated_token_ids:
        return
    sampling = proto.sampling
    if num_samples(sampling) != 1:
        raise InvalidRequestError("generated_token_ids go with n = 1 only", field="generated_token_ids")
    is_greedy = sampling.HasField("temperature") and sampling.temperature < GREEDY_TEMPERATURE
    if not is_greedy and not sampling.HasField("seed"):
        raise InvalidRequestError(
            "generated_token_ids need the seed that they were made with, unless temperature is 0", field="sampling.seed"
        )
    if len(proto.generated_token_ids) > model.max_model_len:
        raise InvalidRequestError(
            f"{len(proto.generated_token_ids)} tokens exceed the window of {model.max_model_len}",
            field="generated_token_ids",
        )
    check_token_ids(proto.generated_token_ids, model, field="generated_token_ids")


def _check_supported(proto: router_pb2.GenerateRequest) -> None:
    kind = proto.sampling.WhichOneof("constraint")
    if kind is not None:
        raise NotSupportedError("constrained output is not supported by this version", field=f"sampling.{kind}")
    if proto.output.HasField("prompt_logprobs"):
        raise NotSupportedError("prompt_logprobs are not supported by this version", field="output.prompt_logprobs")
