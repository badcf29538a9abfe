"""Renders a model's chat template as transformers does, without importing transformers."""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from outrider.errors import InvalidRequestError, ModelError
from outrider.model_hub.checkpoint_text import DEFAULT_TEMPLATE, TOOL_TEMPLATE

_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message in a rendering, as in transformers."""
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that a template may raise for messages that it does not expect."""


class ChatTemplate:
    """Renders messages. Templates come with the model and are not trusted, so they run in jinja2's sandbox."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources`: templates by name, as in `CheckpointText`. Raises: ModelError if a template does not parse."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _Namespace
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not parse: {error}") from error

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Renders messages in OpenAI's form, which may lack optional fields.

        `variables`: other variables that the template reads, for example enable_thinking.

        Raises: InvalidRequestError if there is no template, or if the template refuses the messages.
        """
        name = TOOL_TEMPLATE if variables.get("tools") and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        template = self._templates.get(name)
        if template is None:
            names = ", ".join(sorted(self._templates)) or "none"
            raise _refused(f"the model has no chat template {name!r} (it has: {names}); send text", field="chat")
        chat = [_normalized(message) for message in messages]
        if continue_final_message and chat:
            chat[-1]["content"] += _OPEN_END
        values = {"tools": None, "documents": None} | self._special_tokens | variables
        values |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        try:
            try:
                text = template.render(values)
            except (TypeError, jinja2.UndefinedError):
                if not _write_arguments(chat):
                    raise
                text = template.render(values)
        except _TEMPLATE_ERRORS as error:
            raise _refused(f"the model's chat template rejects these messages: {error}") from error
        if not continue_final_message:
            return text
        beginning, found, end = text.rpartition(_OPEN_END.strip())
        if not found:
            raise _refused("the last message cannot be continued: the model's chat template does not end with it")
        return beginning if end.startswith(" ") else beginning.rstrip()


def _refused(message: str, *, field: str = "chat.messages") -> InvalidRequestError:
    return InvalidRequestError(message, field=field, reason="CHAT_TEMPLATE")


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy in the form that templates expect: its content is a string, arguments are parsed, nothing is null.

    Raises: InvalidRequestError if the content is not text.
    """
    found = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
    content = found.get("content", "")
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _refused("the content of a message must be a text, or a list of parts with a text")
        content = "\n".join(parts)
    found["content"] = content
    for function in _functions(found):
        arguments = function.get("arguments") or "{}"
        with suppress(ValueError, RecursionError):  # arguments that are not JSON stay text
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return found


def _functions(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the functions of the message's tool calls."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function", call)
            if isinstance(function, dict):
                yield function


def _write_arguments(chat: Iterable[Mapping[str, Any]]) -> bool:
    """Converts tool calls' arguments that are objects to JSON text. Returns whether there were such arguments.

    As in transformers, templates get arguments as objects first, and most of them write an object as JSON. Some
    templates concatenate arguments with text, which fails for objects.
    """
    functions = (function for message in chat for function in _functions(message))
    written = [function for function in functions if not isinstance(function["arguments"], str)]
    for function in written:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return bool(written)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training. Here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inner"), [], [], body).set_lineno(line)

    def _inner(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja2's own namespace, except that it rejects names of Python internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} in a namespace")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 the filter's signature in transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Returns the value as JSON. Replaces jinja2's own filter, which escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 the name that templates may use
    return dt.datetime.now().strftime(format)  # noqa: DTZ005 local time, like transformers
