"""Paged attention from torch's own operations: runs everywhere, in every dtype.

Keys and values are gathered block by block into a workspace that stays in the
processor's cache from layer to layer, then torch's fused attention reads them. The
query heads of one KV head are laid into the row dimension, so that a KV head is read
once for all its query heads and all rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention.base import DEFAULT_BLOCK_SIZE, AttentionOptions
from outrider.engine.attention.row_runs import RowRuns
from outrider.engine.input_batch import InputBatch
from outrider.engine.transfer import upload, upload_ids

MOST_GROUPED_ROWS = 16
"""Sequences with more rows are prefill chunks: each is enough work to be attended by itself."""

MOST_PADDED_BLOCKS = 12
"""In a group. One more group costs a handful of dispatches in each layer, about what a dozen blocks cost."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of equal row count, attended together over keys that are padded to equal length."""

    rows: Tensor | None  # [num_seqs * num_rows] int64 of the batch; None: all of them, in order
    block_ids: Tensor  # [num_seqs * num_blocks] int64
    unused: Tensor | None  # [num_unused] int64 of the gathered tokens: past their sequence's end; None: none is
    mask: Tensor | None  # [num_seqs, 1, heads_per_kv * num_rows, num_keys] 0 or -inf; None: every row sees every key
    num_seqs: int
    num_rows: int  # of each sequence
    num_keys: int  # of the gathered ones, how many are attended
    is_causal: bool  # one chunk that is the whole sequence so far: the mask needs no tensor
    paths: tuple[Tensor, Tensor] | None = None  # gathered tokens and their slots, where a block table does not say


class _Plan:
    """What the layers of one forward share: groups, made once for each window that a layer asks for."""

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._device = device
        self._block_size = batch.block_size
        # In a batch with trees a "sequence" is here what rows that see each other have in common.
        runs = RowRuns.of(batch)
        self._query_start_loc = runs.query_start_loc
        self._seq_lens = runs.seq_lens
        self._block_tables = runs.block_tables
        self._paths = runs.paths
        self._num_rows = np.diff(self._query_start_loc)
        self._groups: dict[tuple[int | None, int, torch.dtype], list[_Group]] = {}

    def groups(self, window: int | None, heads_per_kv: int, dtype: torch.dtype) -> list[_Group]:
        key = (window, heads_per_kv, dtype)
        if key not in self._groups:
            self._groups[key] = [
                self._make_group(members, window, heads_per_kv, dtype) for members in self._split(window)
            ]
        return self._groups[key]

    def _first_blocks(self, window: int | None) -> np.ndarray:
        """[num_seqs] int64: each sequence's first block that any of its rows sees."""
        if window is None:
            return np.zeros(len(self._seq_lens), dtype=np.int64)
        first_keys = self._seq_lens - self._num_rows - window + 1
        first_blocks: np.ndarray = np.maximum(first_keys, 0) // self._block_size
        return first_blocks

    def _split(self, window: int | None) -> Iterator[Sequence[int]]:
        """Indices of the sequences of each group: equal row counts, and not much padding."""
        spans = -(-self._seq_lens // self._block_size) - self._first_blocks(window)  # [num_seqs] blocks
        by_row_count: dict[int, list[int]] = {}
        for index, num_rows in enumerate(self._num_rows.tolist()):
            if num_rows > MOST_GROUPED_ROWS:
                yield (index,)
            else:
                by_row_count.setdefault(num_rows, []).append(index)
        for members in by_row_count.values():
            longest = int(spans[members].max())
            if len(members) * longest - int(spans[members].sum()) <= MOST_PADDED_BLOCKS:
                yield members
            else:
                yield from _cut(sorted(members, key=lambda index: -int(spans[index])), spans.tolist())

    def _make_group(self, members: Sequence[int], window: int | None, heads_per_kv: int, dtype: torch.dtype) -> _Group:
        index = np.asarray(members)
        seq_lens = self._seq_lens[index].astype(np.int64)  # [num_seqs]
        num_rows = int(self._num_rows[members[0]])
        first_blocks = self._first_blocks(window)[index]
        spans = -(-seq_lens // self._block_size) - first_blocks
        num_blocks = int(spans.max())
        # Padding repeats the sequence's first block: it is masked, and cheap to read once more.
        offsets = np.arange(num_blocks)[None]  # [1, num_blocks]
        columns = np.where(offsets < spans[:, None], first_blocks[:, None] + offsets, first_blocks[:, None])
        block_ids = np.take_along_axis(self._block_tables[index], columns, axis=1).astype(np.int64)

        own_keys = seq_lens - first_blocks * self._block_size  # [num_seqs]
        num_keys = int(own_keys.max())
        is_unused = np.arange(num_blocks * self._block_size)[None] >= own_keys[:, None]
        is_unused[:, num_keys:] = False  # cut off for all
        is_causal = num_rows > MOST_GROUPED_ROWS and num_rows == int(seq_lens[0]) and window is None
        mask = None
        if not is_causal:
            mask = self._mask(seq_lens, first_blocks, num_rows, num_keys, window)  # [num_seqs, num_rows, num_keys]
        all_rows = len(members) == len(self._seq_lens) and bool((np.diff(index) > 0).all())
        rows = None if all_rows else self._query_start_loc[index][:, None] + np.arange(num_rows)[None]
        return _Group(
            rows=None if rows is None else upload(rows.astype(np.int64).reshape(-1), self._device),
            block_ids=upload(block_ids.reshape(-1), self._device),
            unused=upload(np.flatnonzero(is_unused), self._device) if is_unused.any() else None,
            mask=None if mask is None else self._additive(mask, heads_per_kv, dtype),
            num_seqs=len(members),
            num_rows=num_rows,
            num_keys=num_keys,
            is_causal=is_causal,
            paths=self._path_places(members, first_blocks, num_blocks),
        )

    def _path_places(
        self, members: Sequence[int], first_blocks: np.ndarray, num_blocks: int
    ) -> tuple[Tensor, Tensor] | None:
        """Gathered tokens and their slots, [num] int64 each; None: all are where the block tables say."""
        places: list[int] = []
        slots: list[int] = []
        for member, (index, first_block) in enumerate(zip(members, first_blocks.tolist(), strict=True)):
            path = self._paths[index] if self._paths else ()
            begin = int(self._seq_lens[index]) - len(path) - first_block * self._block_size
            for place, slot in enumerate(path, start=begin):
                if place >= 0:  # else before the window of all rows
                    places.append(member * num_blocks * self._block_size + place)
                    slots.append(slot)
        if not places:
            return None
        return upload_ids(places, self._device), upload_ids(slots, self._device)

    def _mask(
        self, seq_lens: np.ndarray, first_blocks: np.ndarray, num_rows: int, num_keys: int, window: int | None
    ) -> np.ndarray | None:
        """[num_seqs, num_rows, num_keys] bool, True where a row sees a key; None when it always does."""
        row_positions = seq_lens[:, None] - num_rows + np.arange(num_rows)[None]  # [num_seqs, num_rows]
        key_positions = first_blocks[:, None] * self._block_size + np.arange(num_keys)[None]  # [num_seqs, num_keys]
        distance = row_positions[:, :, None] - key_positions[:, None]
        seen: np.ndarray = distance >= 0
        if window is not None:
            seen &= distance < window
        return None if seen.all() else seen

    def _additive(self, seen: np.ndarray, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
        """[num_seqs, 1, heads_per_kv * num_rows, num_keys], head by head; a chunk keeps its heads apart."""
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(upload(~seen, self._device), float("-inf"))
        if seen.shape[1] <= MOST_GROUPED_ROWS:
            mask = mask.repeat(1, heads_per_kv, 1)
        return mask.unsqueeze(1)


def _cut(members: Sequence[int], spans: Sequence[int]) -> Iterator[list[int]]:
    """Cuts `members`, longest first, wherever a group's padding would pass MOST_PADDED_BLOCKS."""
    group: list[int] = []
    padding = 0
    for index in members:
        if group and padding + spans[group[0]] - spans[index] > MOST_PADDED_BLOCKS:
            yield group
            group, padding = [], 0
        group.append(index)
        padding += spans[group[0]] - spans[index]
    if group:
        yield group


class TorchSdpaAttention:
    """Attention over gathered blocks with torch's scaled_dot_product_attention, or its formula for a soft cap."""

    name = "torch_sdpa"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._key_workspace = torch.empty(0)
        self._value_workspace = torch.empty(0)

    def block_size(self, wanted: int | None) -> int:
        return wanted or DEFAULT_BLOCK_SIZE

    def prepare(self, batch: InputBatch) -> _Plan:
        """Groups are made when the first layer asks, since only it knows its window and dtype."""
        return _Plan(batch, self._device)

    def attend(
        self,
        plan: _Plan,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        heads_per_kv = query.shape[1] // key_cache.shape[2]
        groups = plan.groups(options.sliding_window, heads_per_kv, query.dtype)
        if len(groups) == 1 and groups[0].rows is None:
            return self._attend_group(groups[0], query, key_cache, value_cache, options)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            assert group.rows is not None, "a group of all rows is the only one"
            rows = query.index_select(0, group.rows)
            output.index_copy_(0, group.rows, self._attend_group(group, rows, key_cache, value_cache, options))
        return output

    def _attend_group(
        self, group: _Group, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`query` holds the group's rows only: [num_seqs * num_rows, num_heads, head_dim]; returns the same shape."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        heads_per_kv = query.shape[1] // num_kv_heads
        self._key_workspace, keys = _gather(self._key_workspace, key_cache, group)
        self._value_workspace, values = _gather(self._value_workspace, value_cache, group)
        query = query.view(group.num_seqs, group.num_rows, num_kv_heads, heads_per_kv, head_dim)
        if group.num_rows > MOST_GROUPED_ROWS:
            # One chunk: KV heads stand in for the batch, so that keys are expanded over query heads without a copy.
            query = query[0].permute(1, 2, 0, 3)  # [num_kv_heads, heads_per_kv, num_rows, head_dim]
            shape = (num_kv_heads, heads_per_kv, group.num_keys, head_dim)
            keys = keys[0].unsqueeze(1).expand(shape)
            values = values[0].unsqueeze(1).expand(shape)
            output = _attention(query, keys, values, group, options)
            return output.permute(2, 0, 1, 3).reshape(group.num_rows, -1, head_dim)
        # [num_seqs, num_kv_heads, heads_per_kv * num_rows, head_dim]
        query = query.permute(0, 2, 3, 1, 4).reshape(group.num_seqs, num_kv_heads, -1, head_dim)
        output = _attention(query, keys, values, group, options)
        output = output.view(group.num_seqs, num_kv_heads, heads_per_kv, group.num_rows, head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(group.num_seqs * group.num_rows, -1, head_dim)


def _gather(workspace: Tensor, cache: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """The group's keys or values, [num_seqs, num_kv_heads, num_keys, head_dim], and the workspace they lie in.

    The workspace is kept, and grows when it is too small: fresh memory for each layer
    would be cleared by the system page by page, which costs more than the copy. Tokens
    past a sequence's end are zeroed: a mask alone would let a NaN through that a block's
    earlier owner left there.
    """
    size = group.block_ids.numel() * cache[0].numel()
    if workspace.numel() < size or workspace.dtype != cache.dtype or workspace.device != cache.device:
        workspace = torch.empty(size, dtype=cache.dtype, device=cache.device)
    blocks = workspace[:size].view(group.block_ids.numel(), -1)
    torch.index_select(cache.flatten(1), 0, group.block_ids, out=blocks)
    if group.paths is not None:
        places, slots = group.paths
        tokens = cache.flatten(0, 1).flatten(1).index_select(0, slots)  # [num, heads * dim]
        blocks.view(-1, cache.shape[2] * cache.shape[3]).index_copy_(0, places, tokens)
    if group.unused is not None:
        blocks.view(-1, cache.shape[2] * cache.shape[3]).index_fill_(0, group.unused, 0.0)
    gathered = blocks.view(group.num_seqs, -1, *cache.shape[2:])  # [num_seqs, blocks * block_size, heads, dim]
    return workspace, gathered[:, : group.num_keys].transpose(1, 2)


def _attention(query: Tensor, keys: Tensor, values: Tensor, group: _Group, options: AttentionOptions) -> Tensor:
    """[batch, heads, rows, dim] against [batch, heads, num_keys, dim], as the group's mask says."""
    if options.softcap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=group.mask, is_causal=group.is_causal, scale=options.scaling
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * options.scaling
    scores = torch.tanh(scores / options.softcap) * options.softcap
    if group.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(future, float("-inf"))
    elif group.mask is not None:
        scores = scores + group.mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), values)
