"""Prompts to answer: from a file, or written by the target itself.

Source of the latter: Xu et al. 2024, "Magpie" (arXiv 2406.08464): a chat model that is given the opening of a user's
turn, and nothing else, writes that turn. System lines and opening words keep it from always writing the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.client import AsyncClient, ChatMessage
from outrider.errors import ConfigError, InvalidRequestError

PASTED_SHARE, MIN_PASTED_CHARACTERS = 0.6, 200
MIN_TURN_CHARACTERS = 20
DEFAULT_SYSTEM_SHARE, NO_OPENING_SHARE = 0.25, 0.3

_HELP = "You are a helpful assistant. The user asks for help with {}."
_TURNS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("turns.json").read_text(encoding="utf-8"))
"""By kind of text: its share of turns, their length and temperature (a small model's longer texts fall apart at 1), the
topics that a system line may have, and the words that a turn may begin with."""


TrainingPrompt = tuple[str, list[int]]
"""Kind of text, and token ids with the chat template's: something to answer."""


async def write_prompt(client: AsyncClient, rng: random.Random, pasted: Sequence[str]) -> TrainingPrompt:
    """A turn that the target writes as its user, in some kind of text. Raises: OutriderError.

    Many a text that a user pastes is one of `pasted`: answers that the target has given before.
    """
    while True:
        (kind,) = rng.choices(tuple(_TURNS), [turn["weight"] for turn in _TURNS.values()])
        turn = _TURNS[kind]
        system: tuple[ChatMessage, ...] = ()  # the template's own, where it has one
        if rng.random() >= DEFAULT_SYSTEM_SHARE:
            system = (ChatMessage("system", _HELP.format(rng.choice(turn["topics"]))),)
        least = MIN_TURN_CHARACTERS
        text = "" if rng.random() < NO_OPENING_SHARE and kind == "chat" else rng.choice(turn["openings"])
        if kind == "text" and pasted and rng.random() < PASTED_SHARE:
            text += rng.choice(pasted)
            least = MIN_PASTED_CHARACTERS
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
        if len(text.strip()) >= least:
            return kind, await tokenize(client, (ChatMessage("user", text.strip()),))


async def _open_turn(
    client: AsyncClient, system: Sequence[ChatMessage], opening: str
) -> tuple[list[int], Sequence[int]]:
    """A prompt that ends inside a user's turn, and the tokens that would close the turn.

    Two chats that differ in the user's last digit alone differ in no token of what closes the turn, in any template.
    """
    words = opening.rstrip(" ")
    try:
        one, other = [
            await client.tokenize([*system, ChatMessage("user", words + end)], add_generation_prompt=False)
            for end in ("4", "7")
        ]
    except InvalidRequestError:
        if not system:  # a base model, which has no template: it writes a text from its first words on
            return await client.tokenize(opening or "The"), ()
        return await _open_turn(client, (), opening)  # a template without a system's turn
    if one == other:
        raise InvalidRequestError("the model's chat template leaves out what the user says", field="chat")
    return one[: _num_same(one, other)], one[len(one) - _num_same(one[::-1], other[::-1]) :]


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens in which two texts agree."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


async def tokenize(client: AsyncClient, messages: Sequence[ChatMessage]) -> list[int]:
    """As the chat that the target answers. What its template refuses is left out: system turns, then earlier turns.

    Of a model without a template it is the last text as it is.
    """
    without_system = [message for message in messages if message.role != "system"]
    for chat in (messages, without_system, messages[-1:]):
        with contextlib.suppress(InvalidRequestError):
            return await client.tokenize(chat, add_generation_prompt=True)
    return await client.tokenize(messages[-1].content)


def read_prompts(path: Path) -> list[tuple[str, Sequence[ChatMessage]]]:
    """(kind, chat) of each line. Raises: ConfigError."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may have other ends of lines within
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
                f'{{"messages": [{{"role": "user", "content": "…"}}]}}, with "kind" if you like'
            ) from error
    if not found:
        raise ConfigError(f"--prompts {path} has no prompts")
    return found


def _read_prompt(line: str) -> tuple[str, Sequence[ChatMessage]]:
    """Raises: ValueError and others."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise TypeError("no JSON object")
    text = fields.get("text", fields.get("prompt"))
    if text is None and "messages" not in fields:
        raise ValueError('none of "text", "prompt" and "messages"')
    messages = fields["messages"] if text is None else [{"role": "user", "content": text}]
    chat = tuple(ChatMessage(message["role"], message["content"]) for message in messages)
    if not chat or any(not isinstance(each.content, str) or not each.content.strip() for each in chat):
        raise ValueError("a prompt without text")
    if chat[-1].role != "user":
        raise ValueError(f"the last message is of the {chat[-1].role}, not of the user")
    return str(fields.get("kind", "prompts")), chat
