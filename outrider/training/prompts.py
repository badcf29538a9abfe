"""Prompts for training answers. They are read from a file, or the target writes them itself.

A chat model that is given only the opening of a user's turn writes that turn (Xu et al. 2024, "Magpie",
arXiv 2406.08464). System messages and opening words are varied, so that the turns vary.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.client import AsyncClient, ChatMessage
from outrider.errors import ConfigError, InvalidRequestError
from outrider.speculation.draft_tree import num_common

PASTED_SHARE, MIN_PASTED_CHARACTERS = 0.6, 200
MIN_TURN_CHARACTERS = 20
DEFAULT_SYSTEM_SHARE, NO_OPENING_SHARE = 0.25, 0.3

_HELP = "You are a helpful assistant. The user asks for help with {}."
_TURNS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("turns.json").read_text(encoding="utf-8"))
"""For each kind of text: the weight of its turns, their length and temperature (at temperature 1, long texts of a small
model become incoherent), the topics of system messages, and the words that turns begin with."""


TrainingPrompt = tuple[str, list[int]]
"""(kind of text, token ids of the prompt, including those of the chat template)."""


async def write_prompt(client: AsyncClient, rng: random.Random, pasted: Sequence[str]) -> TrainingPrompt:
    """Makes a prompt of a random kind, whose user turn the target writes. Raises: OutriderError.

    There is one exception: in the fraction `PASTED_SHARE` of the turns of kind "text", the opening words are followed
    by one of `pasted`, i.e. by an earlier answer of the target.
    """
    while True:
        (kind,) = rng.choices(tuple(_TURNS), [turn["weight"] for turn in _TURNS.values()])
        turn = _TURNS[kind]
        system: tuple[ChatMessage, ...] = ()  # empty: the template's default, if it has one
        if rng.random() >= DEFAULT_SYSTEM_SHARE:
            system = (ChatMessage("system", _HELP.format(rng.choice(turn["topics"]))),)
        min_length = MIN_TURN_CHARACTERS
        text = "" if rng.random() < NO_OPENING_SHARE and kind == "chat" else rng.choice(turn["openings"])
        if kind == "text" and pasted and rng.random() < PASTED_SHARE:
            text += rng.choice(pasted)
            min_length = MIN_PASTED_CHARACTERS
        else:
            prompt, closing = await _open_turn(client, system, text)
            result = await client.complete(
                prompt,
                temperature=turn["temperature"],
                top_p=0.95,
                max_tokens=turn["max_tokens"],
                seed=rng.randrange(1 << 31),
                stop_token_ids=closing[:1],
                skip_special_tokens=True,
            )
            text += result.text
        if len(text.strip()) >= min_length:
            return kind, await tokenize(client, (ChatMessage("user", text.strip()),))


async def _open_turn(
    client: AsyncClient, system: Sequence[ChatMessage], opening: str
) -> tuple[list[int], Sequence[int]]:
    """Returns a prompt that ends inside a user's turn, and the tokens that would close the turn.

    Both are found by comparing two chats whose user turns differ only in their last digit, because with any template
    all other tokens are the same.
    """
    words = opening.rstrip(" ")
    try:
        one, other = [
            await client.tokenize([*system, ChatMessage("user", words + end)], add_generation_prompt=False)
            for end in ("4", "7")
        ]
    except InvalidRequestError:
        if not system:  # a base model has no template and continues a text from its first words
            return await client.tokenize(opening or "The"), ()
        return await _open_turn(client, (), opening)  # the template has no system turn
    if one == other:
        raise InvalidRequestError("the model's chat template ignores the user's message", field="chat")
    return one[: num_common(one, other)], one[len(one) - num_common(one[::-1], other[::-1]) :]


async def tokenize(client: AsyncClient, messages: Sequence[ChatMessage]) -> list[int]:
    """Tokenizes a chat for the target to answer.

    If the target's template refuses the chat, it is tried without system turns, then with the last turn only. Without a
    template, the last turn is tokenized as plain text.
    """
    without_system = [message for message in messages if message.role != "system"]
    for chat in (messages, without_system, messages[-1:]):
        with contextlib.suppress(InvalidRequestError):
            return await client.tokenize(chat, add_generation_prompt=True)
    return await client.tokenize(messages[-1].content)


def read_prompts(path: Path) -> list[tuple[str, Sequence[ChatMessage]]]:
    """Returns (kind, chat) of each line. Raises: ConfigError."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` would also split at U+2028 within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_read_prompt(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f'--prompts {path}, line {number}: {error}; a line is {{"text": "…"}}, {{"prompt": "…"}} or '
                f'{{"messages": [{{"role": "user", "content": "…"}}]}}, optionally with "kind"'
            ) from error
    if not found:
        raise ConfigError(f"--prompts {path} has no prompts")
    return found


def _read_prompt(line: str) -> tuple[str, Sequence[ChatMessage]]:
    """Parses one line. Raises: ValueError, TypeError, KeyError, AttributeError."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    text = fields.get("text", fields.get("prompt"))
    if text is None and "messages" not in fields:
        raise ValueError('it has none of the fields "text", "prompt" and "messages"')
    messages = fields["messages"] if text is None else [{"role": "user", "content": text}]
    chat = tuple(ChatMessage(message["role"], message["content"]) for message in messages)
    if not chat or any(not isinstance(each.content, str) or not each.content.strip() for each in chat):
        raise ValueError("a message has no text")
    if chat[-1].role != "user":
        raise ValueError(f"the role of the last message is {chat[-1].role!r}, not 'user'")
    return str(fields.get("kind", "prompts")), chat
