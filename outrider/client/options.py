"""The options of a request, and how a GenerateRequest is made from them."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from google.protobuf import duration_pb2

from outrider.client.messages import is_chat, read_message, read_token_ids
from outrider.errors import InvalidRequestError
from outrider.request import ChatMessage
from outrider.v1 import router_pb2
from outrider.wire.enums import LOGPROBS_MODES, VERIFICATION_METHODS, EnumTable

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a chat, whose messages may be dicts in OpenAI's form."""
DEFAULT_RESUME_WINDOW_SECONDS = 30.0
"""Seconds of the resume window that clients of several routers ask for by default."""


class ChatOptions(TypedDict, total=False):
    """Keyword arguments about a chat."""

    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]  # JSON values: {"enable_thinking": False, "tools": […]}


class GenerateOptions(ChatOptions, total=False):
    """Keyword arguments of `generate` and `complete`. The defaults are those of router.proto."""

    request_id: str
    model: str  # the name of an adapter; default: the model itself
    adapter_fingerprint: str  # what the adapter must have, as in `Model.adapters`; default: any
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
    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str
    choice: Sequence[str]
    # stop
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_match: bool
    # output
    top_logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    echo: bool
    token_ids_only: bool
    token_bytes: bool  # whether each logprob of the answer has its token's bytes
    logprobs_mode: str  # "model", "sampled"
    # speculation
    speculation: bool
    num_speculative_tokens: int
    verification_method: str  # "coupled", "rejection", "typical"
    # reuse of KV of text pieces, which changes the answer
    blend_separator: str  # ends each piece of a text or chat
    blend_piece_lengths: Sequence[int]  # of token ids, in tokens
    blend_recompute_share: float  # 0 to 1
    # the request
    priority: int
    resume_window_seconds: float | None  # None: not resumable
    generated_token_ids: Sequence[int]
    # the call
    timeout_seconds: float


CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
_ALL = f"options are {', '.join(GenerateOptions.__annotations__)}"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "n", "max_tokens", "min_tokens", "regex", "grammar"),
)
_OUTPUT = ("top_logprobs", "prompt_logprobs", "skip_special_tokens", "echo", "token_ids_only", "token_bytes")
_FIELDS = {
    **{name: name for name in ("request_id", "model", "adapter_fingerprint", "priority", "generated_token_ids")},
    **{name: f"sampling.{name}" for name in _SAMPLING},
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "include_match": "stop.include_match",
    **{name: f"output.{name}" for name in _OUTPUT},
    "speculation": "speculation.enabled",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    **{f"blend_{name}": f"blend.{name}" for name in ("separator", "piece_lengths", "recompute_share")},
}
"""Options that are copied unchanged, with the fields of GenerateRequest that they are copied to."""


def make_request(prompt: Prompt, options: GenerateOptions) -> router_pb2.GenerateRequest:
    """Makes a request.

    Raises: InvalidRequestError for values that do not fit their field, and if two constraints are given; TypeError for
    an option that does not exist.
    """
    known = GenerateOptions.__annotations__
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise TypeError(f"unknown option {name}; the {f'nearest is {nearest[0]}' if nearest else _ALL}")
    request = router_pb2.GenerateRequest()
    values: Mapping[str, Any] = options
    set_prompt(request, prompt, **{name: values[name] for name in ChatOptions.__optional_keys__ & values.keys()})
    for name, field in _FIELDS.items():
        _assign(request, field, values.get(name))
    constraints = [name for name in CONSTRAINTS if values.get(name) is not None]
    if len(constraints) > 1:
        raise InvalidRequestError(f"{' and '.join(constraints)}: only one constraint is allowed", field="sampling")
    schema = options.get("json_schema")
    if schema is not None:
        _assign(request, "sampling.json_schema", schema if isinstance(schema, str) else _schema_text(schema))
    if "choice" in options:
        _assign(request.sampling.choice, "options", options["choice"], name="sampling.choice")
    if options.get("logprobs_mode") is not None:
        request.output.logprobs_mode = _choose(LOGPROBS_MODES, options["logprobs_mode"], "output.logprobs_mode")
    if options.get("verification_method") is not None:
        request.speculation.method = _choose(VERIFICATION_METHODS, options["verification_method"], "speculation.method")
    resume_window_seconds = options.get("resume_window_seconds")
    if resume_window_seconds is not None:
        request.resume_window.CopyFrom(to_duration(resume_window_seconds, field="resume_window"))
    return request


def _schema_text(schema: Any) -> str:
    """Returns the JSON of a schema that is a dict or a pydantic model. Raises: InvalidRequestError."""
    of_model = getattr(schema, "model_json_schema", None)
    try:
        return json.dumps(schema if of_model is None else of_model())
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"sampling.json_schema: {error}", field="sampling.json_schema") from error


def with_request_id(request: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """Returns the request with a new request id, which all attempts share, unless it already has one."""
    if request.request_id:
        return request
    named = router_pb2.GenerateRequest(request_id=str(uuid4()))
    named.MergeFrom(request)
    return named


def make_detokenize_request(
    token_ids: Sequence[int], *, skip_special_tokens: bool | None
) -> router_pb2.DetokenizeRequest:
    """Makes a request. Raises: InvalidRequestError for values that do not fit their field."""
    request = router_pb2.DetokenizeRequest()
    _assign(request, "token_ids", token_ids)
    _assign(request, "skip_special_tokens", skip_special_tokens)
    return request


def set_prompt(request: Any, prompt: Any, **options: Unpack[ChatOptions]) -> None:
    """Sets the prompt of a GenerateRequest, or the input of a TokenizeRequest (text and chat only).

    Raises: InvalidRequestError for values that do not fit their field.
    """
    if isinstance(prompt, str):
        _assign(request, "text", prompt)
    elif is_chat(prompt):
        for index, message in enumerate(prompt):
            name = f"chat.messages[{index}]"
            try:
                read = read_message(message)
            except ValueError as error:
                raise InvalidRequestError(f"{name}: {error}", field=name) from error
            added = request.chat.messages.add(members=_to_json(read.members, f"{name}.members"))
            _assign(added, "role", read.role, name=f"{name}.role")
            _assign(added, "content", read.content, name=f"{name}.content")
        _assign(request, "chat.add_generation_prompt", options.get("add_generation_prompt"))
        _assign(request, "chat.continue_final_message", options.get("continue_final_message"))
        variables = options.get("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise InvalidRequestError("chat.template_kwargs must be a dict", field="chat.template_kwargs")
        variables = _to_json(variables, "chat.template_kwargs")
        _assign(request, "chat.template_kwargs", variables)
    elif isinstance(request, router_pb2.TokenizeRequest):
        raise InvalidRequestError("only text and chats can be tokenized", field="input")
    else:
        try:
            token_ids = read_token_ids(prompt)
        except ValueError as error:
            raise InvalidRequestError(str(error), field="prompt") from error
        request.token_ids.SetInParent()
        _assign(request, "token_ids.ids", token_ids)


def _to_json(values: Mapping[str, Any], field: str) -> dict[str, str]:
    """Encodes each value as JSON. Raises: InvalidRequestError."""
    try:
        return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from error


def to_duration(seconds: float, *, field: str) -> duration_pb2.Duration:
    """Converts seconds. Raises: InvalidRequestError if the number is not finite, or exceeds 10,000 years."""
    duration = duration_pb2.Duration()
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"{field} must be a finite number of seconds, not {seconds!r}", field=field
        ) from error
    return duration


def _assign(message: Any, path: str, value: Any, *, name: str = "") -> None:
    """Sets the field at a path such as "stop.strings". None leaves it unset, and does not create submessages.

    A single text or number becomes a list of one if the field is a list. Raises: InvalidRequestError, which
    names the field `name`, by default `path`.
    """
    if value is None:
        return
    *owners, field = path.split(".")
    for owner in owners:
        message = getattr(message, owner)
    found = getattr(message, field)
    try:
        if isinstance(found, MutableMapping):
            found.update(value)
            message.SetInParent()
        elif isinstance(found, MutableSequence):
            found.extend([value] if isinstance(value, (str, bytes, int)) else value)
            message.SetInParent()
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        is_no_text = str(error).startswith("bad argument")  # protobuf's error for values other than text or bytes
        problem = f"must be text, not {reprlib.repr(value)}" if is_no_text else error
        raise InvalidRequestError(f"{name or path}: {problem}", field=name or path) from error


def _choose(table: EnumTable[Any], value: str, field: str) -> Any:
    known = {member.value: member for member in table.members}
    if value not in known:
        raise InvalidRequestError(f"{field} must be one of {', '.join(known)}, not {value!r}", field=field)
    return table.to_proto(known[value])
