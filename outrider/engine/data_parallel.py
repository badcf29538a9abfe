"""The forward pass of a node whose ranks divide the sequences (data-parallel attention) and the experts among them.

All ranks compute a step at the same time, each the rows of its own sequences, and exchange rows in layers with experts
(see `divided_experts`). Rank 0 has the output layer. Never run on a GPU, where nccl would carry the rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.engine.divided_experts import divided_layers
from outrider.engine.input_batch import FIELD_NAMES, BatchFields, InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.module_steps import ModuleSteps
from outrider.engine.ranks.commands import RenewCopies, Step
from outrider.engine.ranks.group import RankGroup
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner, RankLoad

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.attention.base import AttentionBackend

RENEWAL_STEPS = 100
"""Number of steps after which the copies of experts in one layer, the next one, are chosen anew."""


class DataParallelRunner(ModuleSteps):
    """A rank's runner. All ranks of the process group must call its methods in the same order.

    It is not asynchronous on a GPU either, because the host waits in each layer with experts.
    """

    def __init__(self, model: RunnableModel, kv_cache: PagedKVCache, attention: AttentionBackend | None) -> None:
        """Takes arguments of make_runner."""
        super().__init__(model, kv_cache, attention)
        self.is_asynchronous = False
        self.layers = list(divided_layers(self._model))

    def forward(
        self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None, **_others: object
    ) -> Array:
        """Computes this rank's batch, which may have no rows, and sends what the output layer takes to rank 0.

        The result has no logits. Raises: RuntimeError if another rank is gone or too slow.
        """
        hidden = self.hidden_rows(batch, on_layer_done)
        if len(hidden):
            dist.send(hidden.contiguous(), 0)
        return self.logits_of(hidden[:0])

    @torch.inference_mode()
    def hidden_rows(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Does what ModuleSteps.hidden_rows does. Without rows, this rank only computes rows of others, in its experts.

        Raises: RuntimeError if another rank is gone or too slow.
        """
        if batch.num_rows:
            return super().hidden_rows(batch, on_layer_done)
        rows = self.empty_states(0)
        num_dense = self._num_layers - len(self.layers)  # as if these layers came first
        for layer in range(self._num_layers):
            if layer >= num_dense:
                ids = rows.new_empty((0, 1), dtype=torch.int64)
                self.layers[layer - num_dense](rows, ids, rows.new_empty((0, 1)))
            if on_layer_done is not None:
                on_layer_done(layer)
        return rows

    def renew_copies(self, layer: int) -> None:
        """Chooses the copies of experts anew, in this one of the layers with experts."""
        self.layers[layer].renew_copies()


class LeadingDataRunner(ModelRunner):
    """Rank 0's runner, which divides each batch by the ranks of its sequences. Steps are not captured as graphs."""

    def __init__(self, runner: DataParallelRunner, ranks: RankGroup, *, blocks_per_rank: int) -> None:
        """`runner`: computes rank 0's part."""
        self.attention_name, self.can_be_traced = runner.attention_name, runner.can_be_traced
        self.rank_load: RankLoad = RankLoad((0,) * ranks.size)
        self._runner = runner
        self._ranks = ranks
        self._blocks_per_rank = blocks_per_rank
        self._num_steps = 0

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Implements ModelRunner.forward. Raises: RankLostError if another rank is gone."""

        def layer_done(layer: int) -> None:
            self._ranks.layer_done(layer)
            if on_layer_done is not None:
                on_layer_done(layer)

        reports = on_layer_done is not None
        batches, order = divide_batch(batch, self._ranks.size, self._blocks_per_rank)
        with self._ranks.running(*(Step((own,), reports_layers=reports) for own in batches[1:])):
            hidden = [self._runner.hidden_rows(batches[0], layer_done if reports else None)]
            for rank, own in enumerate(batches[1:], start=1):
                hidden.append(self._runner.empty_states(own.num_logits))
                if own.num_logits:
                    dist.recv(hidden[rank], rank)
            by_rank = torch.cat(hidden)
            rows = torch.empty_like(by_rank)
            rows[torch.as_tensor(order, dtype=torch.int64, device=rows.device)] = by_rank
            logits = self._runner.logits_of(rows)
        rows_by_rank = [num + own.num_rows for num, own in zip(self.rank_load.rows_by_rank, batches, strict=True)]
        self.rank_load = self.rank_load._replace(rows_by_rank=tuple(rows_by_rank))
        self._num_steps += 1
        if self._num_steps % RENEWAL_STEPS == 0:
            self.renew_copies(self._num_steps // RENEWAL_STEPS % len(self._runner.layers))
        return logits

    def renew_copies(self, layer: int) -> None:
        """Chooses the copies of experts anew, in this one of the layers with experts. Raises: RankLostError."""
        with self._ranks.running(RenewCopies(layer)):
            self._runner.renew_copies(layer)
        layers = self._runner.layers
        balances = [experts.balance for experts in layers if experts.balance]
        self.rank_load = RankLoad(
            self.rank_load.rows_by_rank,
            num_expert_copies=sum(len(experts.copies) for experts in layers),
            expert_balance=sum(balances) / max(len(balances), 1),
        )


def divide_batch(batch: InputBatch, num_ranks: int, blocks_per_rank: int) -> tuple[list[InputBatch], list[int]]:
    """Returns the batch of each rank's sequences, with the rank's own block numbers, and the places that the logits of
    all these batches, one after another, have in the logits of `batch`.

    All blocks of a sequence must be of one rank: those from rank * blocks_per_rank on.
    """
    assert batch.num_groups == 1
    ranks, blocks = np.divmod(np.frombuffer(batch.arrays.block_tables, np.int32), np.int32(blocks_per_rank))
    divided = replace(batch, arrays=replace(batch.arrays, block_tables=array("i", blocks.tobytes())))
    rows: list[list[SequenceRows]] = [[] for _ in range(num_ranks)]
    order: list[list[int]] = [[] for _ in range(num_ranks)]
    num_logits = 0
    for first, sequence in zip(batch.arrays.table_starts, divided.sequences(), strict=False):
        rank = ranks[first]
        rows[rank].append(sequence)
        order[rank] += range(num_logits, num_logits + sequence.num_logits)
        num_logits += sequence.num_logits
    no_rows = InputBatch(BatchFields(**dict.fromkeys(FIELD_NAMES, array("q"))), batch.block_size)
    return [build_input_batch(own, batch.block_size) if own else no_rows for own in rows], [*chain(*order)]
