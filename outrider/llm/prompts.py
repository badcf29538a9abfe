"""Prompts and conversations as vLLM takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, TypeGuard, TypeVar

from outrider.client.options import GenerateOptions
from outrider.llm.sampling_params import SamplingParams
from outrider.request import ChatMessage

Item = TypeVar("Item")
Result = TypeVar("Result")


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as it was given, and its text if that is known."""

    content: str | Sequence[int] | Sequence[ChatMessage]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt of a batch, with its parameters."""

    name: str  # "prompts[3]", for errors
    source: Source
    params: SamplingParams
    options: GenerateOptions


def read_each(name: str, items: Sequence[Item], read: Callable[[Item], Result]) -> list[Result]:
    """Raises: ValueError that names the item, such as "prompts[3]"."""
    results = []
    for index, item in enumerate(items):
        try:
            results.append(read(item))
        except ValueError as error:
            raise ValueError(f"{name}[{index}]: {error}") from error
    return results


def prompts_of(prompts: PromptType | Sequence[PromptType]) -> Sequence[Any]:
    """A single prompt is a batch of one."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return prompts


def conversations_of(messages: Sequence[Any]) -> Sequence[Any]:
    """A single conversation is a batch of one."""
    return [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages


def read_prompt(prompt: Any) -> Source:
    """Raises: ValueError for what is no prompt of a text model."""
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


def read_messages(messages: Sequence[Mapping[str, Any]]) -> Source:
    """OpenAI's messages, of text. Raises: ValueError."""
    return Source([_read_message(**message) for message in messages])


def _read_message(role: str = "", content: Any = None, **other: Any) -> ChatMessage:
    extra = [name for name, value in other.items() if value is not None]
    if extra:
        raise ValueError(f"{', '.join(map(repr, extra))} of a message is not supported: it has a role and a content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    others = {str(part.get("type")) for part in parts} - {"text"}
    if others or not parts:
        raise ValueError(f"the content of a message is text, not {', '.join(sorted(others)) or 'empty'}")
    return ChatMessage(role=role, content="\n".join(part["text"] for part in parts))


def is_chat(content: Sequence[object]) -> TypeGuard[Sequence[ChatMessage]]:
    return len(content) > 0 and isinstance(content[0], ChatMessage)
