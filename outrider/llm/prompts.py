"""Reads prompts and conversations in vLLM's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from outrider.client import GenerateOptions, Prompt
from outrider.client.messages import read_message, read_token_ids
from outrider.llm.sampling_params import SamplingParams


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType = str | Sequence[int] | Mapping[str, Any]


Source = tuple[Prompt, str | None]
"""A prompt as the caller gave it, and its text if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt of a batch, with its parameters."""

    name: str  # the prompt's name in errors, for example "prompts[3]"
    content: Prompt  # token ids after encoding
    text: str | None  # None: unknown
    params: SamplingParams
    options: GenerateOptions


def read_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Source]:
    """Reads one or more prompts. Raises: ValueError that names an invalid one."""
    is_single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return convert_each("prompts", _read_prompt, [prompts] if is_single else prompts)


def read_conversations(messages: Sequence[Any]) -> list[Source]:
    """Reads one or more conversations in OpenAI's form. Raises: ValueError that names an invalid one."""
    is_single = len(messages) > 0 and isinstance(messages[0], Mapping)
    return convert_each("messages", _read_messages, [messages] if is_single else messages)


def convert_each(name: str, read: Callable[[Any], Any], items: Any) -> list[Any]:
    """Returns the results of `read` for all items. Raises: ValueError that names the item, for example "prompts[3]"."""
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
        return read_token_ids(prompt, other="a dict"), None
    other = [key for key, value in prompt.items() if key not in TokensPrompt.__annotations__ and value is not None]
    text: Any = prompt.get("prompt")
    token_ids = prompt.get("prompt_token_ids")
    if other or (text is None and token_ids is None):
        given = ", ".join(map(repr, other)) or "an empty dict"
        raise ValueError(f"a prompt must have the key 'prompt' or 'prompt_token_ids', not {given}")
    return _read_prompt(text) if token_ids is None else (read_token_ids(token_ids), text)


def _read_messages(messages: Sequence[Any]) -> Source:
    return [read_message(message) for message in messages], None
