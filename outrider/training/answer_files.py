"""Files of kept answers, which training reads: of a cluster that it ran, or of a decode node's traffic. Torch-free.

Each line holds one answer as JSON, with token ids in place of text.
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
    response: Sequence[int]  # token ids, including the one that ended it, if one did
    temperature: float = 0.0
    kind: str = "other"  # of text, such as "chat" or "code"; the report groups its figures by it

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the response."""
        return [*self.prompt, *self.response]

    @classmethod
    def from_line(cls, line: str) -> KeptAnswer:
        """Reads what `to_line` wrote. Raises: ValueError for anything else."""
        try:
            fields = json.loads(line)
            prompt, response = ([int(token_id) for token_id in fields[name]] for name in ("prompt", "response"))
            return cls(prompt, response, float(fields.get("temperature", 0.0)), str(fields.get("kind", "other")))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no answer: {error!r}") from error

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class AnswerWriter:
    """Appends answers to the files of one folder, which take at most `max_bytes` together. One thread owns it."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Raises: OSError if the folder cannot be made."""
        self._segments = SegmentWriter(
            folder,
            pattern=f"*{SUFFIX}",
            next_name=lambda: f"{time.time_ns():020}-{os.getpid()}{SUFFIX}",
            max_bytes=max_bytes,
        )

    def append(self, answer: KeptAnswer) -> None:
        """Writes one line, which outlives the process from here on: the operating system has it. Raises: OSError."""
        self._segments.append(answer.to_line().encode("ascii"))

    def close(self) -> None:
        self._segments.close()


def read_answers(folder: Path) -> Iterator[KeptAnswer]:
    """Yields every complete answer, the oldest first. Raises: ConfigError for a bad line or an unreadable file."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = path.open(encoding="ascii", errors="replace")
        except FileNotFoundError:
            continue  # a running node has removed its oldest file
        except OSError as error:
            raise ConfigError(f"kept answers cannot be read: {error}") from error
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    continue  # its writer was killed, or is still writing it
                try:
                    yield KeptAnswer.from_line(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: {error}; remove the line or the file") from error
