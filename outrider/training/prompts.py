"""Prompts to answer: from a file, or written by the target itself.

Source of the latter: Xu et al. 2024, "Magpie" (arXiv 2406.08464): a chat model that is given the opening of a user's
turn, and nothing else, writes that turn. System lines and opening words keep it from always writing the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.client import AsyncClient, ChatMessage
from outrider.errors import ConfigError, InvalidRequestError

PASTED_SHARE, MIN_PASTED_CHARACTERS, MAX_PASTED_TEXTS = 0.6, 200, 256
MIN_TURN_CHARACTERS = 20
DEFAULT_SYSTEM_SHARE, NO_OPENING_SHARE = 0.25, 0.3

_HELP = "You are a helpful assistant. The user asks for help with {}."
_TURNS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("turns.json").read_text(encoding="utf-8"))
"""By kind of text: its share of turns, their length and temperature (a small model's longer texts fall apart at 1), the
topics that a system line may have, and the words that a turn may begin with."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """Something to answer."""

    token_ids: Sequence[int]
    kind: str


class PromptSource(Protocol):
    """Where prompts come from."""

    def hear(self, answer: str) -> None:
        """What the target has answered."""

    async def next(self, client: AsyncClient) -> TrainingPrompt | None:
        """None: there are no more. Raises: OutriderError."""


class FilePrompts:
    """Each prompt of a JSONL file once, in its order."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError for a file that cannot be read, with the line's number."""
        self._prompts: Iterator[tuple[str, Sequence[ChatMessage]]] = iter(read_prompts(path))

    def hear(self, answer: str) -> None:
        pass

    async def next(self, client: AsyncClient) -> TrainingPrompt | None:
        for kind, messages in self._prompts:
            return TrainingPrompt(await _tokenize(client, messages), kind)
        return None


class OwnPrompts:
    """Turns that the target writes as its user, in all kinds of text. Never ends.

    Many a text that a user pastes is an answer that the target has given before.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._texts: deque[str] = deque(maxlen=MAX_PASTED_TEXTS)

    def hear(self, answer: str) -> None:
        if len(answer) >= MIN_PASTED_CHARACTERS:
            self._texts.append(answer.strip())

    async def next(self, client: AsyncClient) -> TrainingPrompt | None:
        rng = self._rng
        while True:
            (kind,) = rng.choices(tuple(_TURNS), [turn["weight"] for turn in _TURNS.values()])
            turn = _TURNS[kind]
            system: tuple[ChatMessage, ...] = ()  # the template's own, where it has one
            if rng.random() >= DEFAULT_SYSTEM_SHARE:
                system = (ChatMessage("system", _HELP.format(rng.choice(turn["topics"]))),)
            opening = "" if rng.random() < NO_OPENING_SHARE and kind == "chat" else rng.choice(turn["openings"])
            if kind == "text" and self._texts and rng.random() < PASTED_SHARE:
                pasted = opening + rng.choice(self._texts)
                return TrainingPrompt(await _tokenize(client, (ChatMessage("user", pasted),)), kind)
            prompt, closing = await _open_turn(client, system, opening)
            result = await client.complete(
                prompt,
                temperature=turn["temperature"],
                top_p=0.95,
                max_tokens=turn["max_tokens"],
                seed=rng.randrange(1 << 31),
                stop_token_ids=closing[:1],
                skip_special_tokens=True,
            )
            text = opening + result.text.rstrip()
            if len(text) >= MIN_TURN_CHARACTERS:
                return TrainingPrompt(await _tokenize(client, (ChatMessage("user", text.strip()),)), kind)


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


async def _tokenize(client: AsyncClient, messages: Sequence[ChatMessage]) -> list[int]:
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
        lines = path.read_text(encoding="utf-8").splitlines()
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
