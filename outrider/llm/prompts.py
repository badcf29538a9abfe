"""Prompts and conversations as vLLM takes them."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from outrider.client import ChatMessage, GenerateOptions, Prompt
from outrider.llm.sampling_params import SamplingParams


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | Mapping[str, Any]


TOOL_MEMBERS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Of a message, beside its role and content."""

Source = tuple[Prompt, str | None]
"""A prompt as it was given, and its text if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt of a batch, with its parameters."""

    name: str  # "prompts[3]", for errors
    content: Prompt  # token ids, once it is encoded
    text: str | None  # None: unknown
    params: SamplingParams
    options: GenerateOptions


def read_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Source]:
    """One prompt or several. Raises: ValueError that names the one that is no prompt of a text model."""
    is_single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return for_each("prompts", _read_prompt, [prompts] if is_single else prompts)


def read_conversations(messages: Sequence[Any]) -> list[Source]:
    """One conversation or several, of OpenAI's messages. Raises: ValueError that names the one that is not all text."""
    is_single = len(messages) > 0 and isinstance(messages[0], Mapping)
    return for_each("messages", _read_messages, [messages] if is_single else messages)


def for_each(name: str, read: Callable[[Any], Any], items: Any) -> list[Any]:
    """Raises: ValueError that names the item, such as "prompts[3]"."""
    results = []
    for index, item in enumerate(items):
        try:
            results.append(read(item))
        except ValueError as error:
            raise ValueError(f"{name}[{index}]: {error}") from error
    return results


def _read_prompt(prompt: PromptType) -> Source:
    if isinstance(prompt, str):
        return prompt, prompt
    if not isinstance(prompt, Mapping):
        return _read_token_ids(prompt), None
    other = [key for key, value in prompt.items() if key not in TokensPrompt.__annotations__ and value is not None]
    text: Any = prompt.get("prompt")
    token_ids = prompt.get("prompt_token_ids")
    if other or (text is None and token_ids is None):
        given = ", ".join(map(repr, other)) or "an empty dict"
        raise ValueError(f"a prompt has the key 'prompt' or 'prompt_token_ids', not {given}")
    return _read_prompt(text) if token_ids is None else (_read_token_ids(token_ids), text)


def _read_token_ids(token_ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise ValueError(f"a prompt is a text, token ids or a dict, not {reprlib.repr(token_ids)}") from error


def _read_messages(messages: Sequence[Any]) -> Source:
    for message in messages:
        if not isinstance(message, Mapping):
            shown = reprlib.repr(message)
            raise ValueError(f"a message is a dict with role and content, not {shown}")  # noqa: TRY004 for_each names it
    return [_read_message(**message) for message in messages], None


def _read_message(role: str = "", content: Any = None, **members: Any) -> ChatMessage:
    """What belongs to tool calls goes to the template as it is; such a message needs no text."""
    members = {name: value for name, value in members.items() if value is not None}
    extra = [name for name in members if name not in TOOL_MEMBERS]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    for part in parts:
        if not isinstance(part, Mapping):
            extra.append(reprlib.repr(part))
        elif part.get("type") != "text" or "text" not in part:
            extra.append("a part without text" if part.get("type") == "text" else str(part.get("type")))
    if extra or not (parts or "tool_calls" in members):
        raise ValueError(f"a message has a role and a text, not {', '.join(extra) or 'nothing'}")
    return ChatMessage(role=role, content="\n".join(part["text"] for part in parts), members=members)
