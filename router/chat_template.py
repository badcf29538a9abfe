"""A model's chat template, rendered as transformers renders it, without transformers."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from outrider.errors import InvalidRequestError, ModelError
from outrider.model_hub.checkpoint_text import DEFAULT_TEMPLATE


class ChatTemplate:
    """Renders messages. Templates come with the model, so they run in jinja2's sandbox."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources`: by name, as in `CheckpointText`. Raises: ModelError when one does not parse."""
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

    def render(self, messages: Iterable[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises: InvalidRequestError when the template refuses the messages."""
        template = self._templates.get(DEFAULT_TEMPLATE)
        if template is None:
            names = ", ".join(sorted(self._templates)) or "none"
            raise InvalidRequestError(
                f"the model has no default chat template (it has: {names}); send text",
                field="chat",
                reason="CHAT_TEMPLATE",
            )
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}",
                field="chat.messages",
                reason="CHAT_TEMPLATE",
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inner"), [], [], body).set_lineno(line)

    def _inner(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja2's own, without attributes that reach into Python."""

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
    # jinja2's own escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 the name that templates may use
    return dt.datetime.now().strftime(format)  # noqa: DTZ005 local time, as transformers
