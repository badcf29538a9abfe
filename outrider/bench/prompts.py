"""Prompts of a benchmark, from a JSONL file: one object a line, {id, kind, text} or {id, kind, messages}."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.client import ChatMessage, Prompt
from outrider.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One prompt: a text, or the messages of a chat."""

    id: str
    kind: str
    content: Prompt

    def salted(self, salt: str) -> BenchPrompt:
        """The same prompt behind a short mark, so that no prefix cache knows it."""
        if isinstance(self.content, str):
            return replace(self, content=f"{salt}\n{self.content}")
        first, *others = self.content
        assert isinstance(first, ChatMessage)
        return replace(self, content=(ChatMessage(first.role, f"{salt}\n{first.content}"), *others))


def load_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """In the file's order. Raises: InvalidRequestError naming the line; OSError."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line, where=f"{path}:{number}"))
    if not prompts:
        raise InvalidRequestError(f"{path} has no prompts", field="prompts")
    return tuple(prompts)


def _parse(line: str, *, where: str) -> BenchPrompt:
    try:
        value: Any = json.loads(line)
        text = str(value.get("text", ""))
        messages = tuple(ChatMessage(str(turn["role"]), str(turn["content"])) for turn in value.get("messages", ()))
        prompt = BenchPrompt(id=str(value["id"]), kind=str(value["kind"]), content=text or messages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(f"{where}: not a prompt ({error!r})", field="prompts") from error
    if bool(text) == bool(messages):
        raise InvalidRequestError(f"{where}: needs either text or messages", field="prompts")
    return prompt
