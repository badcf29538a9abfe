"""Whether copying blocks is cheaper than computing their tokens again, by measured times. Torch-free."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NUM_TIMES = 15


class _Times:
    """The median of the last NUM_TIMES times. It is infinite before the first one."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=NUM_TIMES)
        self.median = math.inf

    def add(self, seconds: float) -> None:
        self._last.append(max(seconds, 1e-9))  # more than zero, whatever a clock says
        self.median = median(self._last)


class CopyPrice:
    """The price of a block: loading it pays if that takes less time than computing its tokens again, and saving it pays
    if saving and loading it together take less.

    A block of tokens is one block in each group of layers, so their times are added. Attention to earlier tokens, which
    makes later blocks dearer to compute, is part of the time of a token only as far as the measured steps had it. All
    times are medians of the last NUM_TIMES; before all are measured, nothing pays.
    """

    def __init__(self, *, block_size: int, num_groups: int, max_rows: int) -> None:
        """`max_rows`: the rows of a full step of prompts. The time of a token is taken from steps with at least half as
        many rows of prompts. In smaller ones, reading the weights would count too much.
        """
        self._block_size, self._max_rows = block_size, max_rows
        self._save, self._load = ([_Times() for _ in range(num_groups)] for _ in range(2))
        self._token = _Times()

    def add_copy(self, group: int, seconds: float, *, is_load: bool) -> None:
        """Adds the time of one copy of a block of this group."""
        (self._load if is_load else self._save)[group].add(seconds)

    def add_step(self, seconds: float, *, num_rows: int, num_prompt_rows: int) -> None:
        """Adds the time of computing a forward pass, if it has enough rows of prompts."""
        if 2 * num_prompt_rows >= self._max_rows:
            self._token.add(seconds / num_rows)

    def copy_seconds(self, group: int, *, is_load: bool) -> float:
        """Returns the time of one copy of a block of this group."""
        return (self._load if is_load else self._save)[group].median

    @property
    def load_seconds(self) -> float:
        """The time of loading a block of tokens in all groups."""
        return self._sum(self._load)

    @property
    def step_seconds(self) -> float:
        """The time of computing a full step of prompts."""
        return max(self._max_rows, self._block_size) * self._token.median

    @property
    def load_pays(self) -> bool:
        return self.load_seconds < self._block_size * self._token.median < math.inf

    @property
    def save_pays(self) -> bool:
        return self._sum(self._save) + self.load_seconds < self._block_size * self._token.median < math.inf

    @staticmethod
    def _sum(times: list[_Times]) -> float:
        return sum(each.median for each in times)

    def __str__(self) -> str:
        """Returns the three times in milliseconds per block."""
        computed = self._block_size * self._token.median
        parts = {"save": self._sum(self._save), "load": self.load_seconds, "compute": computed}
        return ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in parts.items())
