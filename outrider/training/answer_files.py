"""Answers kept in files: what training takes from a cluster, and what a decode node keeps of its traffic. Torch-free.

A line is one answer as JSON, with token ids in place of text. Each writer begins files of its own, and another one
after an error, so that a kill or a full disk leaves at most a last line without its end, which readers pass over. All
writers of a folder share its bound: whoever begins a file removes the oldest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.errors import ConfigError

SUFFIX = ".answers.jsonl"
FILES_IN_BOUND = 16


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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._num_bytes = 0  # of the open file

    def append(self, answer: KeptAnswer) -> None:
        """The line is the system's when this returns: it outlives the process. Raises: OSError."""
        line = answer.to_line().encode("ascii")
        if self._num_bytes + len(line) > self._max_bytes // FILES_IN_BOUND:
            self.close()
        if self._descriptor is None:
            self._descriptor = self._begin_file(len(line))
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            self.close()
            raise
        self._num_bytes += len(line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_file(self, num_bytes: int) -> int:
        held = self._max_bytes - max(num_bytes, self._max_bytes // FILES_IN_BOUND)
        for path in reversed(_files(self._folder)):  # newest first
            with contextlib.suppress(FileNotFoundError):  # another writer has removed it
                held -= path.stat().st_size
                if held < 0:
                    path.unlink()
        path = self._folder / f"{time.time_ns():020}-{os.getpid()}{SUFFIX}"
        self._num_bytes = 0
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def read_answers(folder: Path) -> Iterator[KeptAnswer]:
    """Every whole answer, the oldest first. Raises: ConfigError for a line that is none, or a file that is not ours."""
    for path in _files(folder):
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


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))
