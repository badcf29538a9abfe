"""A model with pseudorandom logits and forwards of a fixed duration, to measure everything around a model.

The logits depend on a hash of the text. A drafter has the target's logits plus noise that depends on the text, too, so
that the drafter can only guess what the target decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.engine.input_batch import InputBatch

ORDER = 8
"""Number of most recent tokens on which the next token depends."""

SPREAD = 3.0
"""Standard deviation of the logits, at which the likeliest of 512 ids has on average two fifths of the probability."""

CALIBRATION_TEXTS = 2000

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Computes the logits of a text, which are the same in every process. `noise`: 0 for a target."""

    vocab_size: int = 512
    seed: int = 1
    noise: float = 0.0

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Returns the logits after a text, which depend on its last ORDER tokens: [vocab_size] float32."""
        text = [token_id + 1 for token_id in token_ids[-ORDER:]]
        drawn = np.random.default_rng([self.seed, *text]).standard_normal(self.vocab_size, dtype=np.float32)
        if self.noise:
            random = np.random.default_rng([self.seed, *text, 0])
            drawn = drawn + np.float32(self.noise) * random.standard_normal(self.vocab_size, dtype=np.float32)
        return np.float32(SPREAD) * drawn


def noise_for(acceptance: float, *, temperature: float, vocab_size: int = 512) -> float:
    """Returns the noise at which a drafter that draws with the target's random numbers reaches this acceptance.

    Args:
        acceptance: Acceptance rate of a draft token after accepted ones, above 0 and below 1.
        temperature: The sampling temperature; 0 selects the largest logit.
        vocab_size: The vocabulary size of both models.
    """
    random = np.random.default_rng(7)
    shape = (CALIBRATION_TEXTS, vocab_size)
    drawn, noise = (random.standard_normal(shape, dtype=np.float32) for _ in range(2))
    luck = random.gumbel(size=shape).astype(np.float32) * np.float32(temperature / SPREAD)
    decided = (drawn + luck).argmax(axis=1)
    low, high = 0.0, 4.0
    for _ in range(16):
        middle = (low + high) / 2.0
        agrees = ((drawn + np.float32(middle) * noise + luck).argmax(axis=1) == decided).mean()
        low, high = (middle, high) if agrees > acceptance else (low, middle)
    return (low + high) / 2.0


class SimulatedKVCache:
    """A KV cache that stores the token of each slot."""

    planes = ()

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.slots = np.zeros(num_blocks * block_size, dtype=np.int64)
        self._blocks = self.slots.reshape(num_blocks, block_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks by pairs of (source, destination) ids. Reads all sources before it writes."""
        self._blocks[[destination for _, destination in pairs]] = self._blocks[[source for source, _ in pairs]]

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slots by pairs of (source, destination). Reads all sources before it writes."""
        self.slots[[destination for _, destination in pairs]] = self.slots[[source for source, _ in pairs]]


@dataclass(slots=True)
class SetTime:
    """A device on which a forward takes `seconds`, plus `row_seconds` for each row after the first.

    `hides_overhead`: whether the caller's time between two forwards counts as part of the second one, as on a device
    that computes while its host prepares. Otherwise it is added.
    """

    seconds: float
    row_seconds: float = 0.0
    hides_overhead: bool = False
    _ended_at: float = field(default=float("-inf"), init=False)

    @contextlib.contextmanager
    def forward(self, num_rows: int) -> Iterator[None]:
        """Runs the block as one forward: on exit, sleeps for the part of the fixed time that the block did not take."""
        started_at = time.perf_counter()
        is_next = self.hides_overhead and started_at - self._ended_at < self.seconds
        ends_at = (self._ended_at if is_next else started_at) + self.seconds + self.row_seconds * (num_rows - 1)
        yield
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        self._ended_at = max(ends_at, started_at)


@dataclass(slots=True)
class SimulatedRunner:
    """A replacement for ModelRunner that reads texts from the cache."""

    model: SimulatedModel
    kv_cache: SimulatedKVCache
    time: SetTime
    is_asynchronous: bool = field(default=False, init=False)
    capturable: None = field(default=None, init=False)
    padded_rows: tuple[int, ...] = field(default=(), init=False)

    def forward(self, batch: InputBatch, *, on_layer_done: None = None) -> npt.NDArray[np.float32]:
        """Returns the logits of the rows that need them: [num_logits, vocab_size] float32."""
        with self.time.forward(len(batch.arrays.token_ids)):
            return self._logits(batch)

    def _logits(self, batch: InputBatch) -> npt.NDArray[np.float32]:
        arrays, size = batch.arrays, batch.block_size
        slots = self.kv_cache.slots
        slots[np.asarray(arrays.slot_mapping)] = np.asarray(arrays.token_ids)
        starts = np.asarray(arrays.query_start_loc)
        found = np.empty((batch.num_logits, self.model.vocab_size), dtype=np.float32)
        for index, row in enumerate(arrays.logits_rows):
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            positions = np.arange(max(0, arrays.positions[row] + 1 - ORDER), arrays.positions[row] + 1)
            table = np.asarray(arrays.block_tables[arrays.table_starts[sequence] :])
            places = table[positions // size] * size + positions % size
            if batch.has_trees:
                path = arrays.path_slots[arrays.path_starts[row] : arrays.path_starts[row + 1]][-ORDER:]
                places[len(places) - len(path) :] = path
            found[index] = self.model.logits(slots[places].tolist())
        return found
