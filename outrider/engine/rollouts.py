"""Rollouts: several draft tokens of each sequence by one CUDA graph, without the host between them.

A rollout is a ragged forward of what a drafter has not read yet, then forwards of one row a sequence: of the token that
the race has just decided, at the next position. They are the kernels of a call for each token, in the same order, so
the tokens are the same. What a row is fed with, and where its keys go, is written on the device (`advance`).

Batches are padded as in `step_graphs`. A sequence that wants fewer tokens than another, or that only pads, comes to its
end earlier: from there on its rows go to the scratch block, and what is decided after them is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.engine.gpu_kernels.rollout import advance
from outrider.engine.graph_shapes import Bucket, pad
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.sampler import Sampler
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.sampler.triton_decider import TritonDecider
from outrider.engine.step_graphs import GraphCapture, Replay
from outrider.engine.transfer import page_locked, upload

RolloutForward = Callable[[InputBatch, Tensor, Tensor], "tuple[Tensor, Tensor]"]
"""forward(batch, features, depths): own hidden states [num_logits, width], and logits [num_logits, vocab_size] float32,
which may be changed. All that differs between batches of one shape it reads on the device. features: [num_rows, width],
depths: [num_rows] int64, of a head (see HeadRows). A draft model has width 0."""
Confidences = Callable[[Tensor, Tensor], Tensor]
"""confidences(logits [n, vocab_size], temperatures [n, 1] float32): [n] float64."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What the graphs of one number of sequences share: they read and write it at the same addresses."""

    first: InputBatch
    following: InputBatch  # of one row a sequence
    buffers: tuple[
        Tensor, Tensor, Tensor
    ]  # [bytes] uint8: of these batches, and words [11 + first_rows, num_seqs] int64
    features: Tensor  # [rows of `first`, width]
    states: Tensor  # [max_tokens, num_seqs, width]
    decided: Tensor  # [max_tokens, num_races + 1, num_seqs] int64
    replays: dict[int, Replay] = field(default_factory=dict)  # by number of tokens


class Rollouts:
    """The graphs of one drafter. One owner thread."""

    token_counts = (2, 3, 4, 5, 6, 8)  # of which there are graphs; others are rounded up
    max_tokens = token_counts[-1]  # of a sequence in a rollout
    max_sequences = 32  # of a rollout: with more, launches and the host take a smaller part of the time
    num_forwards = sum(token_counts) * max_sequences.bit_length()  # in all graphs
    first_rows = 8  # of a sequence in the first forward, at most

    def __init__(
        self,
        sampler: Sampler,
        kv_cache: PagedKVCache,
        *,
        max_model_len: int,
        num_races: int,
        plan: Callable[[InputBatch], InputBatch],
        width: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Args:
        sampler: that decides by our Triton kernels.
        kv_cache: with a scratch block.
        plan: as of StepGraphs.
        num_races: decisions at each position: the winner and runners-up.
        width: of a head's hidden state, of `dtype`; 0: of a model.
        """
        assert isinstance(sampler.decider, TritonDecider)
        self._decider = sampler.decider
        self._block_size = kv_cache.block_size
        self._scratch_block = kv_cache.scratch_blocks[0]
        self._device = torch.device(kv_cache.device)
        self._max_blocks = -(-max_model_len // kv_cache.block_size)
        self._num_races = num_races
        self._plan = plan
        self._width, self._dtype = width, dtype
        self._shapes: dict[int, _Shape] = {}  # by number of sequences, rising

    @torch.inference_mode()
    def capture_all(
        self, forward: RolloutForward, capture: GraphCapture, confidences: Confidences | None = None
    ) -> None:
        """Captures all graphs, over the scratch block. `forward` is not kept (see `StepGraphs.capture_all`)."""
        found: dict[int, _Shape] = {}
        for power in reversed(range(self.max_sequences.bit_length())):
            found[1 << power] = shape = self._new_shape(1 << power)
            for num_tokens in reversed(self.token_counts):
                shape.replays[num_tokens] = capture(partial(self._roll, forward, confidences, shape, num_tokens))
        self._shapes = dict(sorted(found.items()))

    @torch.inference_mode()
    def queue(
        self,
        fed: Sequence[SequenceRows],
        decisions: Sequence[Decision],
        num_tokens: Sequence[int],
        *,
        depths: Sequence[int] = (),
        features: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """One rollout; the host does not wait. Read what it decided before the next.

        Args:
            fed: of each sequence, up to `max_sequences`, the rows of the first forward, up to `first_rows`. The last of
                them has logits. There are blocks for all tokens but the last.
            decisions: after them. Nothing edits the logits of these tokens.
            num_tokens: to decide, up to `max_tokens`, and of one sequence at least 2.
            depths: of a head, of all rows of `fed`.
            features: of a head, parts [n, width] that make up what these rows are fed with.

        Returns:
            Of at least as many tokens, [n, num_races + 1, at least num_seqs] int64: the winner of each race, then the
            bits of the confidence as a float64. And of each sequence a head's own hidden states, [n, width].
        """
        num_seqs = next(size for size in self._shapes if size >= len(fed))
        shape, most = self._shapes[num_seqs], next(each for each in self.token_counts if each >= max(num_tokens))
        first = self._padded(fed, self.first_rows * num_seqs, num_seqs)
        # Of each sequence the words of a DecisionTable, then the next position, the end of positions that it may be
        # fed at (0: it pads), and the depth of its last row. Then the depths of the first forward.
        words = np.zeros((11 + self.first_rows, num_seqs), dtype=np.int64)
        words[:8, : len(fed)] = self._decider.table_words(decisions)
        words[11:].ravel()[: len(depths)] = depths
        following: list[SequenceRows] = []
        for place, (row, number) in enumerate(zip(fed, num_tokens, strict=True)):
            start = row.start_position + len(row.token_ids)
            end = start + number - 1
            last_row = first.arrays.logits_rows[place]
            words[8:11, place] = start, end, depths[last_row] if depths else 0
            following.append(SequenceRows([0], end - 1, row.block_ids, 1))
        packed = [each.packed() for each in (first, self._padded(following, num_seqs, num_seqs))]
        for buffer, values in zip(shape.buffers, (*packed, words.ravel().view(np.uint8)), strict=True):
            buffer.narrow(0, 0, len(values)).copy_(page_locked(values, self._device), non_blocking=True)
        if features:
            torch.cat(list(features), out=shape.features[: len(depths)])
        shape.replays[most]()
        # Each path's by itself: a view would hold the states of all sequences for as long as one path needs its own.
        states = [shape.states[:most, place].clone() for place in range(len(fed) if self._width else 0)]
        return shape.decided[:most], states

    def _padded(self, rows: Sequence[SequenceRows], num_rows: int, num_seqs: int) -> InputBatch:
        """With `num_seqs` logits: first those of `rows`, which have one each."""
        batch = pad(build_input_batch(rows, self._block_size), Bucket(num_rows), self._scratch_block)
        arrays = replace(batch.arrays, logits_rows=batch.arrays.logits_rows[:num_seqs])
        return self._plan(InputBatch(arrays, self._block_size, is_padded=True))

    def _new_shape(self, num_seqs: int) -> _Shape:
        first, first_buffer = self._placed(self.first_rows * num_seqs, num_seqs)
        following, following_buffer = self._placed(num_seqs, num_seqs)
        words = torch.zeros(8 * (11 + self.first_rows) * num_seqs, dtype=torch.uint8, device=self._device)
        states = torch.zeros((self.max_tokens, num_seqs, self._width), dtype=self._dtype, device=self._device)
        return _Shape(
            first,
            following,
            (first_buffer, following_buffer, words),
            features=states.new_zeros((first.num_rows, self._width)),
            states=states,
            decided=torch.zeros(
                (self.max_tokens, self._num_races + 1, num_seqs), dtype=torch.int64, device=self._device
            ),
        )

    def _placed(self, num_rows: int, num_seqs: int) -> tuple[InputBatch, Tensor]:
        """A batch of the scratch block alone, and the buffer from which graphs read such a batch."""
        batch = self._padded([SequenceRows([0], 0, (self._scratch_block,), 1)], num_rows, num_seqs)
        tables = np.zeros(num_seqs * self._max_blocks, dtype=np.int32).view(np.uint8)
        buffer = upload(np.concatenate([batch.packed(), tables]), self._device)
        batch.place_in(buffer, self._device)
        return batch, buffer

    def _roll(self, forward: RolloutForward, confidences: Confidences | None, shape: _Shape, num_tokens: int) -> None:
        """What is captured."""
        num_seqs = shape.following.num_seqs
        words = shape.buffers[2].view(torch.int64).view(-1, num_seqs)
        fields = shape.following.on(self._device)
        temperatures = words[4].to(torch.int32).view(torch.float32)[:, None]
        temperatures = torch.where(temperatures > 0.0, temperatures, 1.0)  # of a greedy row
        batch, states, depths = shape.first, shape.features, words[11:].flatten()
        for token, decided in enumerate(shape.decided[:num_tokens].unbind(0)):
            if token:
                advance[(1,)](
                    shape.decided[token - 1, 0], words,
                    fields.token_ids, fields.positions, fields.slot_mapping, fields.seq_lens,
                    fields.table_starts, fields.block_tables, num_seqs, self._scratch_block * self._block_size,
                    BLOCK_SIZE=self._block_size, ROWS=num_seqs, num_warps=1,
                )  # fmt: skip
                batch, depths = shape.following, words[10]
            states, logits = forward(batch, states, depths)
            shape.states[token].copy_(states)
            if confidences is not None:
                decided[-1].view(torch.float64).copy_(confidences(logits, temperatures))
            self._decider.race(logits, words[:8], decided[:-1])
