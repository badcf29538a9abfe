"""Rollouts: one CUDA graph drafts several more tokens for each sequence, without the host in between.

A rollout follows an ordinary forward, whose last race (see `sampler`) has decided a token of each sequence. Each
forward of the rollout has one row per sequence: the token decided last, at the next position. The rollout runs the same
kernels in the same order as one call per token would, so the tokens are the same. Everything that the host knows
beforehand (positions, slots, race parameters) is uploaded for all tokens at once.

Sequences may want different numbers of tokens. After a sequence's last wanted token, its rows go to the scratch block
and its further tokens are dropped. Rows that pad the batch use the scratch block from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.graph_shapes import MAX_ROLLED_SEQUENCES, ROLLOUT_TOKENS
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.sampler import Sampler
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.sampler.triton_decider import TABLE_WORDS, TritonDecider
from outrider.engine.step_graphs import GraphCapture, Replay
from outrider.engine.transfer import page_locked, upload

_POSITION, _SLOT, _DEPTH = range(TABLE_WORDS, TABLE_WORDS + 3)


class RolloutForward(NamedTuple):
    """The forward pass that a rollout runs once per token. It must read everything that varies from device memory."""

    forward: Callable[[InputBatch, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """forward(batch, states [n, width], depths [n] int64, temperatures [n, 1] float32) returns the drafter's own hidden
    states [n, width], logits [n, vocab_size] float32, which may be modified, and confidences [n] float64. States and
    depths are those of a head (see HeadRows); a draft model has width 0."""
    plan: Callable[[InputBatch], InputBatch]  # AttentionBackend.plan
    width: int = 0
    dtype: torch.dtype = torch.float32  # the states' dtype


class RolloutSequence(NamedTuple):
    """One sequence's request to a rollout."""

    decision: Decision  # the last decision before the rollout
    num_tokens: int  # at least 1, at most `Rollouts.max_tokens`
    position: int  # position at which the decided token is fed
    block_ids: Sequence[int]  # covers [0, position + num_tokens)
    depth: int = 0  # for a head: depth of the decided token's row


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """The tensors that all graphs for one number of sequences share, at fixed addresses."""

    batch: InputBatch
    buffer: Tensor  # [bytes] uint8, the batch's fields
    words: Tensor  # [max_tokens, TABLE_WORDS + 3, num_seqs] int64: see `Rollouts.queue`
    states: Tensor  # [1 + max_tokens, num_seqs, width]; entry 0: the states before the rollout
    decided: Tensor  # [1 + max_tokens, num_races, num_seqs] int64; entry 0: the tokens before the rollout
    confidences: Tensor  # [max_tokens, num_seqs] float64
    replays: dict[int, Replay] = field(default_factory=dict)  # by number of tokens


class Rollouts:
    """The rollout graphs of one drafter. Only one thread may use them."""

    token_counts = ROLLOUT_TOKENS
    max_tokens = token_counts[-1]  # per sequence in a rollout
    max_sequences = MAX_ROLLED_SEQUENCES

    @torch.inference_mode()
    def __init__(
        self,
        rolling: RolloutForward,
        capture: GraphCapture,
        *,
        sampler: Sampler,
        kv_cache: PagedKVCache,
        max_model_len: int,
        num_races: int,
    ) -> None:
        """Captures all graphs over the cache's scratch block. Keeps no reference to the forward: see
        `StepGraphs.capture_all`.

        `sampler`: must decide with our Triton kernels. `num_races`: number of races per position, one for the winner
        and one for each runner-up.
        """
        assert isinstance(sampler.decider, TritonDecider)
        self._decider = sampler.decider
        self._block_size = kv_cache.block_size
        self._scratch_block = kv_cache.scratch_blocks[0]
        self._device = torch.device(kv_cache.device)
        self._plan = rolling.plan
        self._shapes: dict[int, _Shape] = {}  # by number of sequences
        for power in reversed(range(self.max_sequences.bit_length())):  # largest first, so that others reuse its memory
            self._shapes[1 << power] = shape = self._new_shape(1 << power, rolling, max_model_len, num_races)
            for num_tokens in reversed(self.token_counts):
                shape.replays[num_tokens] = capture(partial(self._roll, rolling, shape, num_tokens))

    def _new_shape(self, num_seqs: int, rolling: RolloutForward, max_model_len: int, num_races: int) -> _Shape:
        zeros = partial(torch.zeros, device=self._device)
        batch = self._padded((), num_seqs)
        tables = np.zeros(num_seqs * -(-max_model_len // self._block_size), dtype=np.int32)
        buffer = upload(np.concatenate([batch.packed(), tables.view(np.uint8)]), self._device)
        batch.use_buffer(buffer, self._device)
        return _Shape(
            batch,
            buffer,
            words=zeros((self.max_tokens, TABLE_WORDS + 3, num_seqs), dtype=torch.int64),
            states=zeros((1 + self.max_tokens, num_seqs, rolling.width), dtype=rolling.dtype),
            decided=zeros((1 + self.max_tokens, num_races, num_seqs), dtype=torch.int64),
            confidences=zeros((self.max_tokens, num_seqs), dtype=torch.float64),
        )

    @torch.inference_mode()
    def queue(
        self, sequences: Sequence[RolloutSequence], winners: Tensor, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queues one rollout; the host does not wait. Read its results before queueing the next.

        Args:
            sequences: at least one, at most `max_sequences`. They must not edit logits, for example by penalties.
            winners: the tokens decided last, [len(sequences)] int64.
            states: a head's own hidden states from which these tokens were decided, [len(sequences), width].

        Returns:
            The winner of each race [n, num_races, num_seqs] int64, confidences [n, num_seqs] float64, and a
            head's own hidden states from which these tokens were decided [n, num_seqs, width]. The number n of tokens
            may exceed what any sequence wants, and num_seqs may exceed len(sequences).
        """
        number = len(sequences)
        shape = self._shapes[1 << (number - 1).bit_length()]
        num_steps = next(each for each in self.token_counts if each >= max(each.num_tokens for each in sequences))
        # For each token: the parameters of its race, then position, slot and depth of the row that decides it.
        words = np.zeros((num_steps, TABLE_WORDS + 3, shape.batch.num_seqs), dtype=np.int64)
        words[:, _SLOT] = self._scratch_block * self._block_size
        words[:, :TABLE_WORDS, :number] = self._decider.table([each.decision for each in sequences])
        words[:, 0, :number] += np.arange(1, 1 + num_steps)[:, None]
        for place, (_, num_tokens, position, block_ids, depth) in enumerate(sequences):
            for token in range(num_steps):
                block, offset = divmod(position + min(token, num_tokens - 1), self._block_size)
                words[token, _POSITION, place] = block * self._block_size + offset
                if token < num_tokens:
                    words[token, _SLOT, place] = block_ids[block] * self._block_size + offset
                words[token, _DEPTH, place] = depth + token
        # Attention is planned for the keys of each sequence's last row, since earlier rows see fewer keys.
        fed = [SequenceRows([0], each.position + each.num_tokens - 1, each.block_ids, 1) for each in sequences]
        packed = self._padded(fed, shape.batch.num_seqs).packed()
        shape.words[:num_steps].copy_(page_locked(words, self._device), non_blocking=True)
        shape.buffer[: len(packed)].copy_(page_locked(packed, self._device), non_blocking=True)
        shape.decided[0, 0, :number].copy_(winners)
        if states is not None:
            shape.states[0, :number].copy_(states)
        shape.replays[num_steps]()
        return shape.decided[1 : 1 + num_steps], shape.confidences[:num_steps], shape.states[1 : 1 + num_steps]

    def _padded(self, fed: Sequence[SequenceRows], num_seqs: int) -> InputBatch:
        """Returns the batch of `fed`, padded with sequences of one row in the scratch block."""
        padding = [SequenceRows([0], 0, (self._scratch_block,), 1)] * (num_seqs - len(fed))
        arrays = build_input_batch([*fed, *padding], self._block_size).arrays
        return self._plan(InputBatch(arrays, self._block_size, is_padded=True))

    def _roll(self, rolling: RolloutForward, shape: _Shape, num_tokens: int) -> None:
        """Runs a rollout. This is the function that is captured."""
        fields = shape.batch.on(self._device)
        temperatures = shape.words[0, 4].to(torch.int32).view(torch.float32)[:, None]
        temperatures = torch.where(temperatures > 0.0, temperatures, 1.0)  # a greedy row has 0 there
        for token, words in enumerate(shape.words[:num_tokens].unbind(0)):
            fields.token_ids.copy_(shape.decided[token, 0])
            fields.positions.copy_(words[_POSITION])
            fields.slot_mapping.copy_(words[_SLOT])
            states, logits, confidences = rolling.forward(shape.batch, shape.states[token], words[_DEPTH], temperatures)
            shape.states[token + 1].copy_(states)
            shape.confidences[token].copy_(confidences)
            self._decider.race(logits, words[:TABLE_WORDS], shape.decided[token + 1])
