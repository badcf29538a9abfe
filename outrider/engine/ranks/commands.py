"""Messages from rank 0 to other ranks: commands, which are numbered from 1; KV requests and tasks, which are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.base import Bytes
from outrider.engine.ranks.channel import Channel


class CommandMark(NamedTuple):
    """Progress through the commands: the numbers of finished commands and of finished layers of the next command."""

    num_commands: int
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, of parts that run one after another."""

    parts: tuple[InputBatch, ...]  # at least one; without rows if other ranks have all sequences
    reports_layers: bool = True  # whether KvRequest.after may name layers of this step


@dataclass(frozen=True, slots=True)
class MoveSlots:
    pairs: tuple[tuple[int, int], ...]  # (source, destination)


@dataclass(frozen=True, slots=True)
class RenewCopies:
    """Chooses the copies of experts anew in one of the layers with experts, see DividedExperts."""

    layer: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The last command."""


Command = Step | MoveSlots | RenewCopies | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """A read, which is answered with bytes [num_layers, num_tokens, num_heads, head_dim], or a write of such bytes."""

    plane: str
    layers: range
    slots: npt.NDArray[np.int64]  # [num_tokens]
    heads: range  # indices among the rank's own heads
    after: CommandMark  # the rank waits for this mark, because an earlier command may still use the slots
    payload: bytes | None = None  # bytes to write; the answer is None once they are in the cache. None: a read


@dataclass(frozen=True, slots=True)
class KvRefused:
    """The answer to a request that does not fit the cache, that failed, or whose mark was not reached in time."""

    message: str


class RankTask(Protocol):
    """Work for a thread of another rank. It is sent pickled, so the rank imports the module that defines it."""

    def run(self, read: Callable[[KvRequest], Bytes], channel: Channel) -> None:
        """Runs the task. `channel` leads to the caller of `RankGroup.start`; it is closed when `run` returns.

        `read` returns the KV that a KvRequest without a payload names. It raises InternalError if it cannot.
        """
