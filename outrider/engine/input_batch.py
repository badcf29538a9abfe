"""One forward's input, and how it is laid out from the rows of each sequence. Torch-free but for its tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.base import Slots, slots_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SequenceRows(NamedTuple):
    """What one sequence contributes to a forward: consecutive tokens, known ones first, drafts after them.

    Drafts may be a tree. Then a row's place in the cache is not its position: keys and values go to the slots of
    consecutive positions in the order of the rows, while a draft's position follows from its depth.
    """

    token_ids: Sequence[int]  # at least one; if an array, of int64
    start_position: int  # absolute position of token_ids[0]; KV of everything before is in the cache
    block_ids: Sequence[int]  # covers [0, start_position + len(token_ids)); if an array, of int32
    num_logits: int  # the last num_logits rows need logits; 0 to len(token_ids)
    parents: Sequence[int] = ()  # of each draft, if they are a tree: index of its parent among them, rising; or -1


Values = TypeVar("Values")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFields(Generic[Values]):
    """What kernels read of a batch: arrays on the host, or tensors on the device of a model."""

    token_ids: Values  # [num_rows] int64
    positions: Values  # [num_rows] int64, absolute
    slot_mapping: Values  # [num_rows] int64, block_id * block_size + offset
    logits_rows: Values  # [num_logits] int64, rising
    query_start_loc: Values  # [num_seqs + 1] int32
    seq_lens: Values  # [num_seqs] int32, with this step's rows
    block_tables: (
        Values  # [num_seqs, max_blocks] int32, as an array flat; unused entries repeat a block of the sequence
    )
    # Of rows in trees the slots of the last keys that they see, their own last. Both empty in a batch without trees.
    path_starts: Values  # [num_rows + 1] int64, into path_slots
    path_slots: Values  # [sum of depths] int64


FIELD_NAMES = tuple(each.name for each in fields(BatchFields))
ALIGNMENT = 16
"""Bytes, of each field on a device: a kernel is compiled for each alignment of its arguments that it meets."""


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """One forward's input: the rows of every planned sequence, laid end to end.

    Sequence i owns rows query_start_loc[i] : query_start_loc[i + 1]. Rows, sequences and
    logits keep the order in which the sequences were given.

    Native kernels read the arrays where they lie. Tensors are made when `on` asks for them: right after a forward,
    whose weights have evicted everything else from the processor's caches, a call into torch or numpy costs several
    times what it costs in a loop of its own.
    """

    arrays: BatchFields[array[int]]  # none may grow or shrink from here on: tensors and kernels hold addresses
    max_blocks: int  # of a sequence
    block_size: int
    _tensors: dict[str, BatchFields[Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes tensors of its own."""
        return InputBatch, (self.arrays, self.max_blocks, self.block_size)

    @property
    def num_rows(self) -> int:
        return len(self.arrays.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.arrays.seq_lens)

    @property
    def num_logits(self) -> int:
        return len(self.arrays.logits_rows)

    @property
    def has_trees(self) -> bool:
        """Whether rows of a sequence may see keys that are not at the slots of their positions."""
        return bool(self.arrays.path_starts)

    @property
    def selects_logits(self) -> bool:
        """Whether a forward has to pick the rows with logits: not where each row has its own."""
        return self.num_logits < self.num_rows

    def context_slots(self, sequence: int, num_tokens: int) -> Slots:
        """Where a sequence's first tokens are by its block table: [num_tokens] int64."""
        table = np.frombuffer(self.arrays.block_tables, dtype=np.int32).reshape(self.num_seqs, -1)[sequence]
        return slots_of(table, num_tokens, self.block_size)

    def on(self, device: torch.device | str) -> BatchFields[Tensor]:
        """As tensors on `device`: on a CPU views of the arrays, elsewhere a copy that is made once."""
        device = str(device)
        if device not in self._tensors:
            if device == "cpu":
                self._tensors[device] = self._shaped({name: _view(getattr(self.arrays, name)) for name in FIELD_NAMES})
            else:
                self.copy_to(device)
        return self._tensors[device]

    def copy_to(self, device: torch.device | str) -> Tensor:
        """One transfer of all fields; `on` gives views of it from here on. Returns it: [bytes] uint8, as `packed`."""
        import torch

        from outrider.engine.transfer import upload

        buffer = upload(self.packed(), torch.device(device))
        tensors, start = {}, 0
        for name in FIELD_NAMES:
            values = getattr(self.arrays, name)
            size = len(values) * values.itemsize
            tensors[name] = buffer.narrow(0, start, size).view(_dtype(values))
            start += size + -size % ALIGNMENT
        self._tensors[str(device)] = self._shaped(tensors)
        return buffer

    def packed(self) -> npt.NDArray[np.uint8]:
        """All fields, each from a multiple of ALIGNMENT on: [bytes] uint8."""
        packed = bytearray()
        for name in FIELD_NAMES:
            packed += getattr(self.arrays, name)
            packed += bytes(-len(packed) % ALIGNMENT)
        return np.frombuffer(packed, dtype=np.uint8)

    def _shaped(self, tensors: dict[str, Tensor]) -> BatchFields[Tensor]:
        tensors["block_tables"] = tensors["block_tables"].view(self.num_seqs, self.max_blocks)
        return BatchFields(**tensors)


def build_input_batch(rows: Sequence[SequenceRows], block_size: int) -> InputBatch:
    """Lays `rows` end to end.

    Raises ValueError when there are none, when a sequence has no rows or too few blocks for
    them, wants logits of more rows than it has, or has parents that do not fit: bugs of the caller.
    """
    if not rows:
        raise ValueError("a forward needs at least one sequence")
    token_ids, positions, slots, logits_rows = array("q"), array("q"), array("q"), array("q")
    query_start_loc, seq_lens, block_tables = array("i", (0,)), array("i"), array("i")
    num_blocks: list[int] = []
    paths: dict[int, list[int]] = {}  # slots, by row
    add_tokens, add_positions, add_slots = token_ids.extend, positions.extend, slots.extend
    end_row = 0
    for index, (tokens, start, block_ids, num_logits, parents) in enumerate(rows):
        num = len(tokens)
        end = start + num
        used = -(-end // block_size)
        if num == 0 or len(block_ids) < used:
            raise ValueError(
                f"sequence {index}: {num} rows from position {start} do not fit {len(block_ids)} blocks of {block_size}"
            )
        if not 0 <= num_logits <= num:
            raise ValueError(f"sequence {index}: {num_logits} logits of {num} rows")
        add_tokens(tokens)
        add_positions(range(start, end))
        position = start
        while position < end:  # by block
            block, offset = divmod(position, block_size)
            slot = block_ids[block] * block_size + offset
            num_here = min(block_size - offset, end - position)
            add_slots(range(slot, slot + num_here))
            position += num_here
        if parents:
            _place_tree(index, rows[index], positions, slots, paths)
        end_row += num
        if num_logits:
            logits_rows.extend(range(end_row - num_logits, end_row))
        query_start_loc.append(end_row)
        seq_lens.append(end)
        num_blocks.append(used)
    max_blocks = max(num_blocks)
    for seq, used in zip(rows, num_blocks, strict=True):
        block_ids = seq.block_ids
        block_tables.extend(block_ids[:used] if used < len(block_ids) else block_ids)
        if used < max_blocks:
            block_tables.extend([block_ids[0]] * (max_blocks - used))
    path_starts, path_slots = _path_arrays(paths, len(token_ids))
    arrays = BatchFields(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        logits_rows=logits_rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        path_starts=path_starts,
        path_slots=path_slots,
    )
    return InputBatch(arrays, max_blocks, block_size)


def _place_tree(
    index: int, seq: SequenceRows, positions: array[int], slots: array[int], paths: dict[int, list[int]]
) -> None:
    """Gives the drafts of the last sequence in `positions` their depths' positions, and each its path."""
    num_drafts = len(seq.parents)
    if num_drafts >= len(seq.token_ids):
        raise ValueError(f"sequence {index}: {num_drafts} drafts in {len(seq.token_ids)} rows")
    first = len(positions) - num_drafts
    start = seq.start_position + len(seq.token_ids) - num_drafts
    for draft, parent in enumerate(seq.parents):
        if not -1 <= parent < draft:
            raise ValueError(f"sequence {index}: draft {draft} follows {parent}")
        before = paths[first + parent] if parent >= 0 else []
        paths[first + draft] = [*before, slots[first + draft]]
        positions[first + draft] = start + len(before)


def _path_arrays(paths: dict[int, list[int]], num_rows: int) -> tuple[array[int], array[int]]:
    """`path_starts` and `path_slots`."""
    starts, path_slots = array("q"), array("q")
    if paths:
        starts.append(0)
        for row in range(num_rows):
            path_slots.extend(paths.get(row, ()))
            starts.append(len(path_slots))
    return starts, path_slots


def _dtype(values: array[int]) -> torch.dtype:
    import torch

    return torch.int64 if values.itemsize == 8 else torch.int32


def _view(values: array[int]) -> Tensor:
    """A tensor over the array's memory, which it keeps alive."""
    import torch

    return torch.frombuffer(values, dtype=_dtype(values)) if values else torch.empty(0, dtype=_dtype(values))
