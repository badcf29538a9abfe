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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.client import AsyncClient, ChatMessage
from outrider.errors import ConfigError, InvalidRequestError

MAX_TURN_TOKENS = {"chat": 112, "code": 160, "text": 256}
TURN_TEMPERATURE = {"chat": 1.0, "code": 1.0, "text": 0.8}  # a small model's longer texts fall apart at 1
PASTED_SHARE, MIN_PASTED_CHARACTERS, MAX_PASTED_TEXTS = 0.6, 200, 256
MIN_TURN_CHARACTERS = 20

_HELP = "You are a helpful assistant. The user asks for help with {}."
_TOPICS = {
    "chat": (
        *(
            "cooking and recipes",
            "travel planning",
            "history",
            "writing letters and e-mails",
            "short stories and poems",
        ),
        *("mathematics and word problems", "health, sleep and exercise", "gardening", "repairing things at home"),
        *("money, budgets and saving", "work, careers and job interviews", "school, studying and teaching"),
        *("family, friends and relationships", "science and nature", "books, films and music", "animals and pets"),
        *("planning events", "geography and cultures", "computers, phones and the internet", "sports and hobbies"),
        *("running a small business", "the environment and energy", "philosophy and ethics", "languages"),
    ),
    "code": (
        *("programming in Python", "shell scripts", "SQL queries", "web development in JavaScript and HTML"),
        *("algorithms and data structures", "finding a bug in a program", "C++ and Rust", "configuration files"),
    ),
    "text": (
        *("summarizing a text that the user pastes", "rewriting a paragraph that the user pastes"),
        *("extracting names, dates and numbers from a text that the user pastes", "correcting a text's grammar"),
        *("turning notes into a table or JSON", "answering questions about an article that the user pastes"),
    ),
}
_OPENINGS = {
    "chat": (
        *("I", "I have", "My", "Our", "We", "How", "What", "Why", "Can you", "Write", "Explain", "I am", "Give me"),
        *("Please", "Describe", "Last week", "I would like", "Tell me", "Create", "Here is", "Is it", "Which"),
    ),
    "code": (
        *("Write a function that", "Write a Python program", "Fix this code:\n```python\n", "How do I", "Implement"),
        *("Explain what this code does:\n```", "Write a SQL query", "Convert this to JSON:\n", "Add tests for"),
    ),
    "text": (
        *("Summarize this text:\n\n", "Extract all names and dates from the following text:\n\n", "Rewrite this:\n\n"),
        *("Here is an article:\n\n", "Correct the grammar:\n\n", "List the key points of this text:\n\n"),
        *("Turn these notes into a table:\n\n", "Read this e-mail and answer it:\n\n"),
    ),
}
KIND_WEIGHTS = {"chat": 5, "code": 2, "text": 3}
DEFAULT_SYSTEM_SHARE, NO_OPENING_SHARE = 0.25, 0.3


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
            (kind,) = rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))
            system: tuple[ChatMessage, ...] = ()  # the template's own, where it has one
            if rng.random() >= DEFAULT_SYSTEM_SHARE:
                system = (ChatMessage("system", _HELP.format(rng.choice(_TOPICS[kind]))),)
            opening = "" if rng.random() < NO_OPENING_SHARE and kind == "chat" else rng.choice(_OPENINGS[kind])
            if kind == "text" and self._texts and rng.random() < PASTED_SHARE:
                pasted = opening + rng.choice(self._texts)
                return TrainingPrompt(await _tokenize(client, (ChatMessage("user", pasted),)), kind)
            prompt, closing = await _open_turn(client, system, opening)
            result = await client.complete(
                prompt,
                temperature=TURN_TEMPERATURE[kind],
                top_p=0.95,
                max_tokens=MAX_TURN_TOKENS[kind],
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
