"""Options of a request, and the GenerateRequest that they make."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from google.protobuf import duration_pb2

from outrider.client.targets import Targets
from outrider.errors import InvalidRequestError
from outrider.request import ChatMessage
from outrider.v1 import router_pb2
from outrider.wire.enums import LOGPROBS_MODES, VERIFICATION_METHODS, EnumTable

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a chat."""
DEFAULT_RESUME_WINDOW_SECONDS = 30.0
"""For clients of several routers."""


class ChatOptions(TypedDict, total=False):
    """Keyword arguments about a chat."""

    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]  # what JSON can say: {"enable_thinking": False, "tools": […]}


class GenerateOptions(ChatOptions, total=False):
    """Keyword arguments of `generate` and `complete`. Defaults are those of router.proto."""

    request_id: str
    model: str
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    json_schema: str
    regex: str
    grammar: str
    choice: Sequence[str]
    # stop
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_match: bool
    # output
    top_logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    echo: bool
    token_ids_only: bool
    token_bytes: bool  # with each logprob of the answer
    logprobs_mode: str  # "model", "sampled"
    # speculation
    speculation: bool
    num_speculative_tokens: int
    verification_method: str  # "coupled", "rejection", "typical"
    # the request
    priority: int
    resume_window_seconds: float | None  # None: not resumable
    generated_token_ids: Sequence[int]
    # the call
    timeout_seconds: float


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "n", "max_tokens", "min_tokens", "json_schema", "regex", "grammar"),
)
_OUTPUT = ("top_logprobs", "prompt_logprobs", "skip_special_tokens", "echo", "token_ids_only", "token_bytes")
_FIELDS = {
    **{name: name for name in ("request_id", "model", "priority", "generated_token_ids")},
    **{name: f"sampling.{name}" for name in _SAMPLING},
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "include_match": "stop.include_match",
    **{name: f"output.{name}" for name in _OUTPUT},
    "speculation": "speculation.enabled",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
}
"""By option, the field of GenerateRequest that takes its value as it is."""


def make_request(prompt: Prompt, options: GenerateOptions) -> router_pb2.GenerateRequest:
    """Raises: InvalidRequestError for what the wire cannot carry; TypeError for an option that does not exist."""
    unknown = set(options) - GenerateOptions.__optional_keys__
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = router_pb2.GenerateRequest()
    values: Mapping[str, Any] = options
    set_prompt(request, prompt, **{name: values[name] for name in ChatOptions.__optional_keys__ & values.keys()})
    for name, field in _FIELDS.items():
        _assign(request, field, values.get(name))
    if "choice" in options:
        _assign(request.sampling.choice, "options", options["choice"], name="sampling.choice")
    if "logprobs_mode" in options:
        request.output.logprobs_mode = _choose(LOGPROBS_MODES, options["logprobs_mode"], "output.logprobs_mode")
    if "verification_method" in options:
        request.speculation.method = _choose(VERIFICATION_METHODS, options["verification_method"], "speculation.method")
    resume_window_seconds = options.get("resume_window_seconds")
    if resume_window_seconds is not None:
        request.resume_window.CopyFrom(to_duration(resume_window_seconds, field="resume_window"))
    return request


def with_request_id(request: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """The request with a new request id, unless it has one: all attempts share it."""
    if request.request_id:
        return request
    named = router_pb2.GenerateRequest(request_id=str(uuid4()))
    named.MergeFrom(request)
    return named


def with_resume_window(options: GenerateOptions, targets: Targets) -> GenerateOptions:
    """With several routers answers are resumable by default."""
    if len(targets) == 1 or "resume_window_seconds" in options:
        return options
    return {**options, "resume_window_seconds": DEFAULT_RESUME_WINDOW_SECONDS}


def make_detokenize_request(
    token_ids: Sequence[int], *, skip_special_tokens: bool | None
) -> router_pb2.DetokenizeRequest:
    """Raises: InvalidRequestError for what the wire cannot carry."""
    request = router_pb2.DetokenizeRequest()
    _assign(request, "token_ids", token_ids)
    _assign(request, "skip_special_tokens", skip_special_tokens)
    return request


def set_prompt(request: Any, prompt: Any, **options: Unpack[ChatOptions]) -> None:
    """Fills the prompt of a GenerateRequest, or the input of a TokenizeRequest (text and chat only).

    Raises: InvalidRequestError for what the wire cannot carry.
    """
    if isinstance(prompt, str):
        _assign(request, "text", prompt)
    elif len(prompt) > 0 and isinstance(prompt[0], ChatMessage):
        for index, message in enumerate(prompt):
            members = _to_json(message.members, f"chat.messages[{index}].members")
            request.chat.messages.add(role=message.role, content=message.content, members=members)
        _assign(request, "chat.add_generation_prompt", options.get("add_generation_prompt"))
        _assign(request, "chat.continue_final_message", options.get("continue_final_message"))
        variables = _to_json(options.get("chat_template_kwargs") or {}, "chat.template_kwargs")
        _assign(request, "chat.template_kwargs", variables)
    elif isinstance(request, router_pb2.TokenizeRequest):
        raise InvalidRequestError("only text and chats are tokenized", field="input")
    else:
        request.token_ids.SetInParent()
        _assign(request, "token_ids.ids", prompt)


def _to_json(values: Mapping[str, Any], field: str) -> dict[str, str]:
    """Raises: InvalidRequestError."""
    try:
        return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from error


def to_duration(seconds: float, *, field: str) -> duration_pb2.Duration:
    """Raises: InvalidRequestError when it is no finite number."""
    if not math.isfinite(seconds):
        raise InvalidRequestError(f"{field} must be finite, not {seconds}", field=field)
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _assign(message: Any, path: str, value: Any, *, name: str = "") -> None:
    """Sets the field at a path such as "stop.strings"; None leaves it unset, and submessages untouched.

    Raises: InvalidRequestError of the field `name`, else `path`.
    """
    if value is None:
        return
    *owners, field = path.split(".")
    for owner in owners:
        message = getattr(message, owner)
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
            message.SetInParent()
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            getattr(message, field).extend(value)
            message.SetInParent()
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name or path}: {error}", field=name or path) from error


def _choose(table: EnumTable[Any], value: str, field: str) -> Any:
    known = {member.value: member for member in table.members}
    if value not in known:
        raise InvalidRequestError(f"{field} must be one of {', '.join(known)}, not {value!r}", field=field)
    return table.to_proto(known[value])
