"""Answers of this node, kept in files for `outrider train-head --from-traffic`.

The answers are users' texts. They are kept as tokens rather than features, since a trainer can recompute features, and
tokens take a thousandth of the space (docs/adr/0031-answers-are-kept-as-tokens.md).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.service.telemetry.logging import get_logger
from outrider.training.answer_files import AnswerWriter, KeptAnswer

MAX_WAITING = 256
CLOSE_SECONDS = 2.0
KIND = "traffic"

_log = get_logger("kept_answers")


class KeptAnswers:
    """A writer thread and its short queue. While a slow disk keeps the queue full, answers are dropped and counted."""

    def __init__(self, folder: Path | str, *, max_bytes: int) -> None:
        """Raises: ConfigError if the folder cannot be written to."""
        self.num_dropped = 0
        self._waiting: queue.Queue[KeptAnswer | None] = queue.Queue(MAX_WAITING)
        try:
            self._writer = AnswerWriter(Path(folder).expanduser(), max_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(f"decode_node.keep_answers {folder} cannot be written to: {error}") from error
        self._thread = threading.Thread(target=self._write, name="kept-answers", daemon=True)
        self._thread.start()

    def keep(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float) -> None:
        """Queues a prompt with its answer. Never blocks or raises, since the engine thread calls it."""
        answer = KeptAnswer(list(token_ids[:prompt_length]), list(token_ids[prompt_length:]), temperature, KIND)
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes the queued answers, for at most CLOSE_SECONDS."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # the disk hangs; the thread ends with the process
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        report_at, reason = 1, "the disk is too slow"
        while (answer := self._waiting.get()) is not None:
            try:
                self._writer.append(answer)
            except OSError as error:
                self.num_dropped += 1
                reason = str(error)
            if self.num_dropped >= report_at:  # warns at each doubling, since a full disk stays full
                report_at = 2 * self.num_dropped
                _log.warning("answers could not be kept", num_dropped=self.num_dropped, reason=reason)
        self._writer.close()
