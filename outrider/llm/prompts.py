"""Prompts and conversations as vLLM takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from outrider.client import ChatMessage, Prompt


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as it was given, and its text if that is known."""

    content: Prompt
    text: str | None = None


def read_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Source]:
    """One prompt or several. Raises: ValueError that names the one that is no prompt of a text model."""
    is_single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
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
        return Source(prompt, prompt)
    if not isinstance(prompt, Mapping):
        return Source(prompt)
    content = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    other = [key for key, value in prompt.items() if key not in TokensPrompt.__annotations__ and value is not None]
    if other or content is None:
        given = ", ".join(map(repr, other)) or "an empty dict"
        raise ValueError(f"a prompt has the key 'prompt' or 'prompt_token_ids', not {given}")
    return Source(content, prompt.get("prompt"))


def _read_messages(messages: Sequence[Mapping[str, Any]]) -> Source:
    return Source([_read_message(**message) for message in messages])


def _read_message(role: str = "", content: Any = None, **other: Any) -> ChatMessage:
    extra = [name for name, value in other.items() if value is not None]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    extra += [str(part.get("type")) for part in parts if part.get("type") != "text"]
    if extra or not parts:
        raise ValueError(f"a message has a role and a text, not {', '.join(extra) or 'nothing'}")
    return ChatMessage(role=role, content="\n".join(part["text"] for part in parts))
