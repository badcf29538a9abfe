"""Answers kept in files: what training takes from a cluster, and what a decode node keeps of its traffic. Torch-free.

A line is one answer as JSON, with token ids in place of text.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.segment_files import SegmentWriter

SUFFIX = ".answers.jsonl"


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """One answer of the target."""

    prompt: Sequence[int]  # token ids, with the chat template's
    response: Sequence[int]  # with the token that ended it, if one did
    temperature: float = 0.0
    kind: str = "other"  # of text: "chat", "code"; for held-out figures

    @property
    def token_ids(self) -> list[int]:
        """The whole text."""
        return [*self.prompt, *self.response]

    @classmethod
    def from_line(cls, line: str) -> KeptAnswer:
        """Raises: ValueError for what is no answer."""
        try:
            fields = json.loads(line)
            prompt, response = ([int(token_id) for token_id in fields[name]] for name in ("prompt", "response"))
            return cls(prompt, response, float(fields.get("temperature", 0.0)), str(fields.get("kind", "other")))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no answer: {error!r}") from error

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class AnswerWriter:
    """Appends answers to files of one folder, of at most `max_bytes` in all. One owner thread."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Raises: OSError where the folder cannot be made."""
        self._segments = SegmentWriter(
            folder,
            pattern=f"*{SUFFIX}",
            next_name=lambda: f"{time.time_ns():020}-{os.getpid()}{SUFFIX}",
            max_bytes=max_bytes,
        )

    def append(self, answer: KeptAnswer) -> None:
        """The line is the system's when this returns: it outlives the process. Raises: OSError."""
        self._segments.append(answer.to_line().encode("ascii"))

    def close(self) -> None:
        self._segments.close()


def read_answers(folder: Path) -> Iterator[KeptAnswer]:
    """Every whole answer, the oldest first. Raises: ConfigError for a line that is none, or a file that is not ours."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = path.open(encoding="ascii", errors="replace")
        except FileNotFoundError:
            continue  # a node that is running has removed its oldest
        except OSError as error:
            raise ConfigError(f"kept answers cannot be read: {error}") from error
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    continue  # its writer was killed, or is writing
                try:
                    yield KeptAnswer.from_line(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: {error}; remove the line or the file") from error
