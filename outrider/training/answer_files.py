"""Files of kept answers, from which heads are trained. A training run or a decode node writes them. Torch-free.

Each line is one answer as JSON, with token ids in place of text.
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

    prompt: Sequence[int]  # token ids, including those of the chat template
    response: Sequence[int]  # token ids, including the stop token, if there was one
    temperature: float = 0.0
    kind: str = "other"  # the kind of text, by which the report groups its figures, e.g. "chat" or "code"

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the response."""
        return [*self.prompt, *self.response]

    @classmethod
    def from_line(cls, line: str) -> KeptAnswer:
        """Parses a line written by `to_line`. Raises: ValueError for any other line."""
        try:
            fields = json.loads(line)
            prompt, response = ([int(token_id) for token_id in fields[name]] for name in ("prompt", "response"))
            return cls(prompt, response, float(fields.get("temperature", 0.0)), str(fields.get("kind", "other")))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a kept answer: {error!r}") from error

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class AnswerWriter:
    """Appends answers to files in one folder, which take at most `max_bytes` in all. One thread owns it."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Raises: OSError if the folder cannot be made."""
        self._segments = SegmentWriter(
            folder,
            pattern=f"*{SUFFIX}",
            next_name=lambda: f"{time.time_ns():020}-{os.getpid()}{SUFFIX}",
            max_bytes=max_bytes,
        )

    def append(self, answer: KeptAnswer) -> None:
        """Writes one line, which survives a crash of the process but not of the machine. Raises: OSError."""
        self._segments.append(answer.to_line().encode("ascii"))

    def close(self) -> None:
        self._segments.close()


def read_answers(folder: Path) -> Iterator[KeptAnswer]:
    """Yields every complete answer, the oldest first. Raises: ConfigError for a bad line or an unreadable file."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = path.open(encoding="ascii", errors="replace")
        except FileNotFoundError:
            continue  # a running node has just removed its oldest file
        except OSError as error:
            raise ConfigError(f"kept answers cannot be read: {error}") from error
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    continue  # the writer of this line was killed or has not finished it
                try:
                    yield KeptAnswer.from_line(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: {error}; remove the line or the file") from error
