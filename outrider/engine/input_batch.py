"""The input of one forward pass, and how it is built from each sequence's rows. Torch-free except for its tensors."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.kv_cache.state_table import StateSteps
from outrider.engine.low_rank import PackedAdapter

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SequenceRows(NamedTuple):
    """One sequence's part of a forward pass: consecutive tokens, known ones first, then drafts.

    Drafts may form a tree. Keys and values still go to the slots of consecutive positions in row order. But a draft's
    position follows from its depth in the tree, so its slot may be that of another position.
    """

    token_ids: Sequence[int]  # at least one; if an array, int64
    start_position: int  # absolute position of token_ids[0]; the KV of all earlier tokens is in the cache
    block_ids: Sequence[int]  # covers [0, start_position + len(token_ids)); if an array, int32
    num_logits: int  # the last num_logits rows need logits; 0 to len(token_ids)
    parents: Sequence[int] = ()  # in a draft tree, the index of each draft's parent among the drafts; -1: none
    adapter: PackedAdapter | None = None  # what the model's linear layers add for these rows; None: nothing
    window_tables: Sequence[array[int]] = ()  # like block_ids, of each sliding window, int32; empty: as block_ids
    states: StateSteps | None = None  # of linear attention; None: it computes all tokens from the first one on


Values = TypeVar("Values")


@dataclass(slots=True, kw_only=True, eq=False)
class BatchFields(Generic[Values]):
    """The fields of a batch that kernels read: arrays on the host, or tensors on the model's device. Never changed.

    A model whose layers form groups (see `LayerGroup`) has slots, paths and block tables for each group: first those of
    all rows or sequences for the first group, then for the next one.
    """

    token_ids: Values  # [num_rows] int64
    positions: Values  # [num_rows] int64, absolute
    slot_mapping: Values  # [num_groups * num_rows] int64, block_id * block_size + offset
    logits_rows: Values  # [num_logits] int64, ascending; in a padded batch [num_rows], with the last row repeated
    query_start_loc: Values  # [num_seqs + 1] int32
    seq_lens: Values  # [num_seqs] int32, this step's rows included
    table_starts: Values  # [num_seqs + 1] int32, into the block tables of one group
    # The path of each row in a draft tree: the slots of the drafts that the row sees, its own slot last. Both fields
    # are empty in a batch without trees.
    path_starts: Values  # [num_rows + 1] int64, into the path_slots of one group
    path_slots: Values  # [num_groups * sum of depths] int64
    # The attention backend's plan for the batch (see AttentionBackend.plan). Empty if there is none.
    attention_plan: Values  # int32
    # This is the last field, because in a padded batch the lengths of all others follow from the number of rows.
    block_tables: Values  # [num_groups * blocks of all sequences] int32, end to end


FIELD_NAMES = tuple(each.name for each in fields(BatchFields))
ALIGNMENT = 16
"""Alignment in bytes of each field on a device: a kernel is compiled anew for each alignment of its arguments."""


@dataclass(slots=True, eq=False)
class InputBatch:
    """The input of one forward pass: the rows of every planned sequence, laid end to end.

    Sequence i owns rows query_start_loc[i] : query_start_loc[i + 1]. Rows, sequences and logits keep the order in which
    the sequences were given.

    Native kernels read the arrays in place. Tensors are created only when `on` is called, because a call into torch or
    numpy right after a forward pass, whose weights have evicted everything else from the CPU caches, takes several
    times as long as in a tight loop.
    """

    arrays: BatchFields[array[int]]  # lengths must not change, because tensors and kernels hold addresses
    block_size: int
    is_padded: bool = False  # see `graph_shapes.pad`; a forward then uses all of logits_rows
    adapters: tuple[PackedAdapter | None, ...] = ()  # of each sequence; empty: no sequence has one
    states: tuple[StateSteps | None, ...] = ()  # of each sequence, as in SequenceRows; empty: None for all
    _tensors: dict[str, BatchFields[Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the batch without its tensors, because another process makes its own."""
        return InputBatch, (self.arrays, self.block_size, self.is_padded, self.adapters, self.states)

    @property
    def num_rows(self) -> int:
        return len(self.arrays.token_ids)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers with slots and block tables of their own; 1: all layers have the same."""
        return len(self.arrays.slot_mapping) // len(self.arrays.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.arrays.seq_lens)

    @property
    def num_table_blocks(self) -> int:
        """The number of entries in all block tables of one group."""
        return self.arrays.table_starts[-1]

    @property
    def num_logits(self) -> int:
        return len(self.arrays.logits_rows)

    @property
    def has_trees(self) -> bool:
        """Whether some sequences have draft trees."""
        return bool(self.arrays.path_starts)

    @property
    def selects_logits(self) -> bool:
        """Whether a forward must select the rows that have logits, because not all have any or some are repeated."""
        return self.is_padded or self.num_logits < self.num_rows

    def with_plan(self, plan: array[int]) -> InputBatch:
        """Returns the same batch with an `attention_plan`. It shares all other arrays, but no tensors."""
        return replace(self, arrays=replace(self.arrays, attention_plan=plan))

    def sequences(self) -> Iterator[SequenceRows]:
        """Yields what `build_input_batch` makes this batch from. The batch must not be padded."""
        arrays, size, end_logit = self.arrays, self.num_table_blocks, 0
        tables = [arrays.block_tables[group * size : (group + 1) * size] for group in range(self.num_groups)]
        for index, (start, end) in enumerate(pairwise(arrays.query_start_loc)):
            blocks = slice(*arrays.table_starts[index : index + 2])
            logit, end_logit = end_logit, bisect_left(arrays.logits_rows, end)
            yield SequenceRows(
                arrays.token_ids[start:end],
                arrays.seq_lens[index] - (end - start),
                tables[0][blocks],
                end_logit - logit,
                self._parents(start, end) if self.has_trees else (),
                self.adapters[index] if self.adapters else None,
                [table[blocks] for table in tables[1:]],
                self.states[index] if self.states else None,
            )

    def _parents(self, start: int, end: int) -> list[int]:
        """Returns SequenceRows.parents of the sequence with rows [start, end)."""
        arrays, starts = self.arrays, self.arrays.path_starts
        drafts = [row for row in range(start, end) if starts[row] < starts[row + 1]]
        places = {arrays.slot_mapping[row]: place for place, row in enumerate(drafts)}
        paths = [arrays.path_slots[starts[row] : starts[row + 1]] for row in drafts]
        return [places[path[-2]] if len(path) > 1 else -1 for path in paths]

    def context_slots(self, sequence: int, num_tokens: int, group: int = 0) -> Slots:
        """Returns the slots of a sequence's first tokens, from its block table: [num_tokens] int64."""
        tables, starts = np.frombuffer(self.arrays.block_tables, dtype=np.int32), self.arrays.table_starts
        first = group * self.num_table_blocks
        return slots_of(tables[first + starts[sequence] : first + starts[sequence + 1]], num_tokens, self.block_size)

    def slots_on(self, device: torch.device | str, group: int = 0) -> Tensor:
        """Returns a group's slots on `device`: [num_rows] int64."""
        slots, num_rows = self.on(device).slot_mapping, self.num_rows
        return slots if len(slots) == num_rows else slots.narrow(0, group * num_rows, num_rows)

    def paths_on(self, device: torch.device | str, group: int = 0) -> Tensor:
        """Returns a group's path slots on `device`: [sum of depths] int64."""
        paths = self.on(device).path_slots
        size = len(paths) // self.num_groups
        return paths.narrow(0, group * size, size)

    def on(self, device: torch.device | str) -> BatchFields[Tensor]:
        """Returns the fields as tensors on `device`: views of the arrays on a CPU, otherwise copies, made only once."""
        name = str(device)
        if name not in self._tensors:
            if name == "cpu":
                views = {each: _view(getattr(self.arrays, each)) for each in FIELD_NAMES}
                self._tensors[name] = BatchFields(**views)
            else:
                import torch

                from outrider.engine.transfer import upload

                self.use_buffer(upload(self.packed(), torch.device(device)), device)
        return self._tensors[name]

    def use_buffer(self, buffer: Tensor, device: torch.device | str) -> None:
        """Makes `on(device)` return views of `buffer`: [bytes] uint8 on `device`, laid out as by `packed`.

        If the buffer is longer, block tables extend to its end.
        """
        tensors, start = {}, 0
        for name in FIELD_NAMES:
            values = getattr(self.arrays, name)
            size = len(values) * values.itemsize if name != "block_tables" else len(buffer) - start
            tensors[name] = buffer.narrow(0, start, size).view(_dtype(values))
            start += size + -size % ALIGNMENT
        self._tensors[str(device)] = BatchFields(**tensors)

    def packed(self) -> npt.NDArray[np.uint8]:
        """Returns all fields, each starting at a multiple of ALIGNMENT: [bytes] uint8, a multiple of ALIGNMENT."""
        packed = bytearray()
        for name in FIELD_NAMES:
            packed += getattr(self.arrays, name)
            packed += bytes(-len(packed) % ALIGNMENT)
        return np.frombuffer(packed, dtype=np.uint8)


def build_input_batch(rows: Sequence[SequenceRows], block_size: int) -> InputBatch:
    """Lays `rows` end to end.

    Raises: ValueError, a bug of the caller, if there are no sequences, or if a sequence has no rows, too few blocks for
    its rows, more logits than rows, or invalid parents.
    """
    if not rows:
        raise ValueError("a forward pass needs at least one sequence")
    token_ids, positions, slots, logits_rows = array("q"), array("q"), array("q"), array("q")
    query_start_loc, seq_lens = array("i", (0,)), array("i")
    table_starts, block_tables = array("i", (0,)), array("i")
    paths: dict[int, list[int]] = {}  # places in `slots`, by row
    num_rows = 0
    for index, (tokens, start, block_ids, num_logits, parents, _, _, _) in enumerate(rows):
        num = len(tokens)
        end = start + num
        used = -(-end // block_size)
        if num == 0 or len(block_ids) < used:
            raise ValueError(
                f"sequence {index}: {num} rows from position {start} do not fit {len(block_ids)} blocks of {block_size}"
            )
        if not 0 <= num_logits <= num:
            raise ValueError(f"sequence {index}: {num_logits} logits for {num} rows")
        block_tables.extend(block_ids[:used] if used < len(block_ids) else block_ids)
        if num == 1:  # the common case
            token_ids.append(tokens[0])
            positions.append(start)
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
        else:
            token_ids.extend(tokens)
            positions.extend(range(start, end))
            _add_slots(slots, start, end, block_ids, block_size)
        if parents:
            _place_tree(index, rows[index], positions, paths)
        num_rows += num
        if num_logits == 1:
            logits_rows.append(num_rows - 1)
        elif num_logits:
            logits_rows.extend(range(num_rows - num_logits, num_rows))
        query_start_loc.append(num_rows)
        seq_lens.append(end)
        table_starts.append(len(block_tables))
    if rows[0].window_tables:
        _add_windows(rows, slots, block_tables, block_size)
    path_starts, path_slots = _path_arrays(paths, slots, num_rows)
    arrays = BatchFields(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        logits_rows=logits_rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        table_starts=table_starts,
        path_starts=path_starts,
        path_slots=path_slots,
        attention_plan=array("i"),
        block_tables=block_tables,
    )
    adapters = tuple(each.adapter for each in rows)
    return InputBatch(
        arrays,
        block_size,
        adapters=adapters if any(each is not None for each in adapters) else (),
        states=tuple(each.states for each in rows) if rows[0].states is not None else (),
    )


def _add_slots(slots: array[int], position: int, end: int, block_ids: Sequence[int], block_size: int) -> None:
    """Adds the slots of positions [position, end), block by block."""
    while position < end:
        block, offset = divmod(position, block_size)
        slot = block_ids[block] * block_size + offset
        num_here = min(block_size - offset, end - position)
        slots.extend(range(slot, slot + num_here))
        position += num_here


def _add_windows(rows: Sequence[SequenceRows], slots: array[int], block_tables: array[int], block_size: int) -> None:
    """Adds the slots and block tables of each sliding window."""
    for window in range(len(rows[0].window_tables)):
        for seq in rows:
            start, block_ids = seq.start_position, seq.window_tables[window]
            end = start + len(seq.token_ids)
            _add_slots(slots, start, end, block_ids, block_size)
            block_tables.extend(block_ids[: -(-end // block_size)])


def _place_tree(index: int, seq: SequenceRows, positions: array[int], paths: dict[int, list[int]]) -> None:
    """Sets the drafts' positions, the last entries of `positions`, according to their depths, and adds their paths."""
    num_drafts = len(seq.parents)
    if num_drafts >= len(seq.token_ids):
        raise ValueError(f"sequence {index}: {num_drafts} drafts need more than {len(seq.token_ids)} rows")
    first = len(positions) - num_drafts
    start = seq.start_position + len(seq.token_ids) - num_drafts
    for draft, parent in enumerate(seq.parents):
        if not -1 <= parent < draft:
            raise ValueError(f"sequence {index}: draft {draft} cannot follow draft {parent}")
        before = paths[first + parent] if parent >= 0 else []
        paths[first + draft] = [*before, first + draft]
        positions[first + draft] = start + len(before)


def _path_arrays(paths: dict[int, list[int]], slots: array[int], num_rows: int) -> tuple[array[int], array[int]]:
    """Returns `path_starts` and `path_slots`. `paths`: the rows on each row's path."""
    starts, places = array("q"), array("q")
    if not paths:
        return starts, places
    starts.append(0)
    for row in range(num_rows):
        places.extend(paths.get(row, ()))
        starts.append(len(places))
    return starts, array("q", [slots[group + row] for group in range(0, len(slots), num_rows) for row in places])


def _dtype(values: array[int]) -> torch.dtype:
    import torch

    return torch.int64 if values.itemsize == 8 else torch.int32


def _view(values: array[int]) -> Tensor:
    """Returns a tensor that shares the array's memory and keeps it alive."""
    import torch

    return torch.frombuffer(values, dtype=_dtype(values)) if values else torch.empty(0, dtype=_dtype(values))
