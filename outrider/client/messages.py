"""Reads prompts in the forms that callers use: OpenAI's chat messages, and token ids from numpy and torch."""

# ruff: noqa: TRY004 a wrong type is a ValueError here: callers add the name of the field

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.request import ChatMessage

TOOL_MEMBERS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Members of a message, other than its role and content, that are passed to the chat template unchanged."""

_RENDER = "render the chat yourself (apply_chat_template) and pass its token ids"


def is_chat(prompt: Any) -> bool:
    """Returns whether the prompt is a list of messages, valid or not."""
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return is_list and (isinstance(prompt[0], (ChatMessage, Mapping)) or hasattr(prompt[0], "model_dump"))


def read_message(message: Any) -> ChatMessage:
    """Converts an OpenAI message (a dict or an object of OpenAI's client) with a role and text to a ChatMessage.

    Returns a ChatMessage unchanged. Raises: ValueError for anything else.
    """
    if isinstance(message, ChatMessage):
        return message
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping):
        raise ValueError(f"a message must be a dict with role and content, not {reprlib.repr(message)}")
    role, content = message.get("role"), message.get("content")
    members = {str(name): value for name, value in message.items() if name not in ("role", "content") and value}
    if extra := [name for name in members if name not in TOOL_MEMBERS]:
        raise ValueError(f"a message must not have {', '.join(extra)}: {_RENDER}")
    if not isinstance(role, str):
        raise ValueError(f"a message must have a role and a content: {reprlib.repr(dict(message))}")
    parts = content if isinstance(content, (list, tuple)) else () if content is None else [content]
    text = content if isinstance(content, str) else "\n".join(map(_text_of, parts))
    return ChatMessage(role, text, members)


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"content must be a text or a list of text parts, not {reprlib.repr(part)}")
    kind, text = part.get("type", "text"), part.get("text")
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f"content must be text, not {'a part without text' if kind == 'text' else kind}")
    return text


def read_token_ids(prompt: Any, *, other: str = "a list of messages") -> list[int]:
    """Returns token ids as a list. `other`: what errors name as the third form of a prompt. Raises: ValueError."""
    if isinstance(prompt, (bytes, bytearray)):
        raise ValueError("a prompt must be text, not bytes: decode them")
    if isinstance(prompt, Mapping):
        raise ValueError(f"a prompt must be text, token ids or {other}, not a dict: put a message into a list")
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError as error:
        several = "" if isinstance(prompt, str) or not isinstance(prompt, Sequence) else "; send several one by one"
        raise ValueError(f"a prompt must be text, token ids or {other}, not {reprlib.repr(prompt)}{several}") from error
