"""The requests of a benchmark: options, and prompts from a JSONL file with {text} or {messages} in each line.

A line may have an id, by default its number, and a kind, by which figures can be grouped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from outrider.client import ChatMessage, GenerateOptions, Prompt
from outrider.client.messages import read_message
from outrider.client.options import make_request
from outrider.errors import InvalidRequestError
from outrider.v1 import router_pb2

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options common to all requests."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # request i uses seed + i
    ignore_eos: bool = False
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One prompt: a text, or the messages of a chat."""

    id: str
    kind: str
    content: Prompt

    def salted(self, salt: str) -> BenchPrompt:
        """Returns the prompt with a short prefix of its own, so that no prefix cache contains it."""
        if isinstance(self.content, str):
            return replace(self, content=f"{salt}\n{self.content}")
        first, *others = self.content
        assert isinstance(first, ChatMessage)
        return replace(self, content=(ChatMessage(first.role, f"{salt}\n{first.content}"), *others))

    def to_message(self, options: AnswerOptions, *, index: int, speculation: bool) -> router_pb2.GenerateRequest:
        """Returns the message for request `index` of a pass."""
        values = {**asdict(options), "seed": options.seed + index, "speculation": speculation}
        return make_request(self.content, cast("GenerateOptions", values))


def load_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Loads prompts in file order. Raises: InvalidRequestError naming the line; OSError."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line, number, path))
    if not prompts:
        raise InvalidRequestError(f"{path} has no prompts", field="prompts")
    return tuple(prompts)


def _parse(line: str, number: int, path: Path) -> BenchPrompt:
    try:
        value: Any = json.loads(line)
        if not isinstance(value, dict) or bool(value.get("text")) == bool(value.get("messages")):
            raise ValueError('it needs either a "text" or "messages"')
        content = str(value.get("text") or "") or tuple(map(read_message, value["messages"]))
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"{path}:{number}: not a prompt: {error}", field="prompts") from error
    return BenchPrompt(id=str(value.get("id", number)), kind=str(value.get("kind", "")), content=content)
