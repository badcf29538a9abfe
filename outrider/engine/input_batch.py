"""One forward's input, and how it is laid out from the rows of each sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device_batch import DeviceBatch, pack, unpack
from outrider.engine.transfer import upload


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchArrays:
    """An InputBatch as plain memory, for kernels that read it where it lies.

    None of them may grow or shrink from here on: tensors and kernels hold addresses.
    """

    token_ids: array[int]  # [num_rows] int64
    positions: array[int]  # [num_rows] int64, absolute
    slot_mapping: array[int]  # [num_rows] int64, block_id * block_size + offset
    logits_rows: array[int]  # [num_logits] int64, rising
    query_start_loc: array[int]  # [num_seqs + 1] int32
    seq_lens: array[int]  # [num_seqs] int32, with this step's rows
    block_tables: array[int]  # [num_seqs, max_blocks] int32; unused entries repeat a block of the sequence
    # Of rows in trees the slots of the last keys that they see, their own last. Both empty in a batch without trees.
    path_starts: array[int] = field(default_factory=lambda: array("q"))  # [num_rows + 1] int64, into path_slots
    path_slots: array[int] = field(default_factory=lambda: array("q"))  # [sum of depths] int64


@dataclass(frozen=True, eq=False)
class InputBatch:
    """One forward's input: the rows of every planned sequence, laid end to end.

    Sequence i owns rows query_start_loc[i] : query_start_loc[i + 1]. Rows, sequences and
    logits keep the order in which the sequences were given.

    Tensors are views of `arrays`, on the CPU (`on` moves them), and made when they
    are asked for: right after a forward, whose weights have pushed everything else out of the
    caches, a call into torch or numpy costs several times what it costs in a loop of its own.
    """

    arrays: BatchArrays
    max_blocks: int  # of a sequence
    block_size: int
    _copies: dict[torch.device, DeviceBatch] = field(default_factory=dict, init=False, repr=False)

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

    @cached_property
    def token_ids(self) -> Tensor:
        """[num_rows] int64."""
        return _tensor(self.arrays.token_ids)

    @cached_property
    def positions(self) -> Tensor:
        """[num_rows] int64, absolute."""
        return _tensor(self.arrays.positions)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """[num_rows] int64, block_id * block_size + offset."""
        return _tensor(self.arrays.slot_mapping)

    @cached_property
    def logits_rows(self) -> Tensor:
        """[num_logits] int64, rising."""
        return _tensor(self.arrays.logits_rows)

    @cached_property
    def query_start_loc(self) -> Tensor:
        """[num_seqs + 1] int32."""
        return _tensor(self.arrays.query_start_loc)

    @cached_property
    def seq_lens(self) -> Tensor:
        """[num_seqs] int32, with this step's rows."""
        return _tensor(self.arrays.seq_lens)

    @cached_property
    def block_tables(self) -> Tensor:
        """[num_seqs, max_blocks] int32; unused entries repeat a block of the sequence."""
        return _tensor(self.arrays.block_tables).view(self.num_seqs, self.max_blocks)

    @cached_property
    def path_starts(self) -> Tensor:
        """[num_rows + 1] int64 into `path_slots`, or empty."""
        return _tensor(self.arrays.path_starts)

    @cached_property
    def path_slots(self) -> Tensor:
        """[sum of depths] int64."""
        return _tensor(self.arrays.path_slots)

    def on(self, device: torch.device) -> InputBatch | DeviceBatch:
        """The same tensors on `device`: a copy, which is made once; of the CPU, unless there is one, this batch."""
        if device in self._copies:
            return self._copies[device]
        return self if device.type == "cpu" else self.copy_to(device)

    def copy_to(self, device: torch.device) -> DeviceBatch:
        """A copy in one transfer, which `on` gives from here on."""
        arrays = self._packed_arrays()
        buffer = upload(pack(list(arrays.values())), device)
        tensors = dict(zip(arrays, unpack(buffer, list(arrays.values())), strict=True))
        tensors["block_tables"] = tensors["block_tables"].view(self.num_seqs, self.max_blocks)
        self._copies[device] = DeviceBatch(**tensors, buffer=buffer)
        return self._copies[device]

    def packed(self) -> np.ndarray:
        """What `copy_to` transfers: [bytes] uint8."""
        return pack(list(self._packed_arrays().values()))

    def _packed_arrays(self) -> dict[str, array[int]]:
        return {each.name: getattr(self.arrays, each.name) for each in fields(BatchArrays)}


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
    arrays = BatchArrays(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        logits_rows=logits_rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        **_path_arrays(paths, len(token_ids)),
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


def _path_arrays(paths: dict[int, list[int]], num_rows: int) -> dict[str, array[int]]:
    if not paths:
        return {}
    starts, path_slots = array("q", (0,)), array("q")
    for row in range(num_rows):
        path_slots.extend(paths.get(row, ()))
        starts.append(len(path_slots))
    return {"path_starts": starts, "path_slots": path_slots}


def _tensor(values: array[int]) -> Tensor:
    """A view, which keeps the array alive but not where it is. # [len(values)], of the array's type"""
    dtype = torch.int64 if values.itemsize == 8 else torch.int32
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
