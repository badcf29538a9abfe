"""What rank 0 tells the other ranks. Commands are numbered from 1 by their order; requests for KV go beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.input_batch import InputBatch


class Mark(NamedTuple):
    """Progress in the order of commands: finished commands, then finished layers of the next one."""

    num_commands: int
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    batch: InputBatch


@dataclass(frozen=True, slots=True)
class MoveSlots:
    pairs: tuple[tuple[int, int], ...]  # (source, destination)


@dataclass(frozen=True, slots=True)
class Stop:
    """The last command."""


Command = Step | MoveSlots | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """A read, answered by bytes [num_layers, num_tokens, num_heads, head_dim]; or a write of such bytes."""

    plane: str
    layers: range
    slots: npt.NDArray[np.int64]  # [num_tokens]
    heads: range  # of the rank's own
    after: Mark  # not before the rank is there: an earlier command may still use the slots
    payload: bytes | None = None  # of a write, which is answered by None when they are in the cache


@dataclass(frozen=True, slots=True)
class KvRefused:
    """The answer to a request that does not fit the cache, that failed, or whose mark was not reached in time."""

    message: str
