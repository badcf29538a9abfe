"""A layer's experts, divided among ranks. Rows go to the ranks that have their experts, and the products come back.

An expert's product of a row has the same bits in every rank and every batch. The row's own rank adds the products in
the order of the router's slots, as the kernels of one rank do, so that a row's bits do not depend on the ranks. That is
why a product comes back for each slot, and not one sum from each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.engine.expert_placement import choose_copies, home_range, home_ranks, rank_loads
from outrider.engine.experts import MakeExperts, are_experts


class OwnExperts(Protocol):
    """The experts of one rank, numbered from 0: those that it always has, then its copies of others."""

    def products(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """Multiplies each row by an expert: [num_rows, hidden_size] float32. `expert_ids`: [num_rows] int64."""

    def memory_of(self, expert: int) -> list[Tensor]:
        """Returns the memory of an expert's weights, which may be read and overwritten."""


@dataclass(frozen=True, slots=True)
class ExpertDivision:
    """The ranks among which experts are divided, all of the default process group, and this process's rank."""

    rank: int
    num_ranks: int
    num_spares: int  # number of copies of other ranks' experts in each rank and layer
    device: str = "cpu"

    def move_others(self, model: nn.Module) -> None:
        """Moves all weights to the device, except those of experts, of which `divided` moves this rank's."""
        for module in model.modules():
            if not are_experts(module):
                module._apply(lambda tensor: tensor.to(self.device), recurse=False)  # noqa: SLF001 as Module.to does

    def divided(self, make_experts: MakeExperts) -> MakeExperts:
        """Returns a function that makes a layer from all experts and keeps only the weights of this rank's."""

        def make(module: Any) -> nn.Module | None:
            num_experts = module.num_experts
            own = home_range(num_experts, self.num_ranks, self.rank)
            kept = [*own, *[own.start] * self.num_spares]  # spare places begin with any weights
            for name, weights in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(weights.detach()[kept], requires_grad=False))
            module.num_experts = len(kept)
            nn.Module.to(module, self.device)  # in place
            made: Any = make_experts(module)
            return None if made is None else DividedExperts(made, num_experts, self)

        return make


class DividedExperts(nn.Module):
    """Takes the place of a layer's experts. All ranks must call `forward` and `renew_copies` in the same order."""

    def __init__(self, own: OwnExperts, num_experts: int, division: ExpertDivision) -> None:
        """`own`: this rank's experts. `num_experts`: the number of experts in all ranks."""
        super().__init__()
        self._own, self._num_experts, self._division = own, num_experts, division
        homes = home_ranks(num_experts, division.num_ranks)
        places = [expert - homes.index(rank) for expert, rank in enumerate(homes)]
        device = own.memory_of(0)[0].device
        # By copy and expert: its rank, and its place among the experts of this rank. Without a copy, both are the same.
        self._where = torch.tensor([[homes, places]] * 2, device=device)
        self._homes = self._where[0].clone()
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)  # of this rank's rows, by expert
        self._spares = [[-1] * division.num_spares for _ in range(division.num_ranks)]  # the experts that are there
        self.copies: dict[int, int] = {}
        """The experts with a second copy, and the rank that has it."""
        self.balance = 0.0
        """Rows of the busiest rank's experts, divided by the mean of ranks, when `renew_copies` was last called."""

    def forward(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Maps [num_rows, hidden_size] to the same shape and dtype. `expert_ids` and `weights`: [num_rows, slots].

        A rank without rows takes part with empty tensors. On a GPU, the host waits for the numbers of rows.
        """
        num_rows, num_slots = expert_ids.shape
        has_expert = (expert_ids >= 0) & (expert_ids < self._num_experts)
        weights = weights.float().where(has_expert, 0.0)
        ids = expert_ids.where(has_expert, 0).long().reshape(-1)
        self._counts.index_add_(0, ids, has_expert.reshape(-1).long())
        entries = torch.arange(len(ids), device=ids.device)
        ranks, places = self._where[entries // num_slots % 2, :, ids].unbind(1)  # rows alternate between copies
        ranks, order = torch.sort(ranks, stable=True)
        num_sent = torch.zeros(self._division.num_ranks, dtype=torch.int64, device=ids.device)
        num_sent.index_add_(0, ranks, torch.ones_like(ranks))
        num_received = torch.empty_like(num_sent)
        dist.all_to_all_single(num_received, num_sent)
        sent, received = torch.stack([num_sent, num_received]).tolist()
        parts = [_bytes_of(rows[order // num_slots]), _bytes_of(places[order].unsqueeze(1))]
        arrived = _exchanged(torch.cat(parts, 1), sent, received)
        width = parts[0].shape[1]
        there = arrived[:, :width].contiguous().view(rows.dtype), arrived[:, width:].contiguous().view(torch.int64)
        products = there[0].float()
        if len(products):
            products = self._own.products(there[0], there[1][:, 0])
        by_slot = torch.empty((len(ids), rows.shape[1]), device=rows.device)
        by_slot[order] = _exchanged(products, received, sent)
        total = torch.zeros_like(by_slot[:num_rows])
        for slot in range(num_slots):  # two operations, which round as the kernels do
            total = total + by_slot[slot::num_slots] * weights[:, slot, None]
        return total.to(rows.dtype)

    def renew_copies(self) -> None:
        """Chooses the copies by the load since the last calls, of which older ones count less, and fetches their
        weights. It takes as long as sending the weights of as many experts as there are spare places.
        """
        division, counts = self._division, self._counts.clone()
        self._counts //= 2
        dist.all_reduce(counts)
        loads = counts.tolist()
        self.copies = choose_copies(loads, num_ranks=division.num_ranks, num_spares=division.num_spares)
        of_rank = rank_loads(loads, self.copies, num_ranks=division.num_ranks)
        self.balance = max(of_rank) * division.num_ranks / max(sum(of_rank), 1)
        where = self._homes.clone()
        for rank, spares in enumerate(self._spares):
            wanted = [expert for expert, of in self.copies.items() if of == rank]
            missing = [expert for expert in wanted if expert not in spares]
            first_spare = len(home_range(self._num_experts, division.num_ranks, rank))
            for spare in range(len(spares)):
                if spares[spare] not in wanted and missing:
                    spares[spare] = missing.pop()
                    self._copy(spares[spare], rank, first_spare + spare)
                if spares[spare] in wanted:
                    where[:, spares[spare]] = torch.tensor([rank, first_spare + spare], device=where.device)
        self._where[1] = where

    def _copy(self, expert: int, rank: int, place: int) -> None:
        """Sends an expert's weights from its own rank to a place in another one."""
        home, own_place = self._homes[:, expert].tolist()
        if self._division.rank == home:
            for memory in self._own.memory_of(own_place):
                dist.send(memory.contiguous(), rank)
        elif self._division.rank == rank:
            for memory in self._own.memory_of(place):
                dist.recv(memory, home)


def divided_layers(model: nn.Module) -> Iterator[DividedExperts]:
    """Yields the model's divided experts, by layer."""
    return (module for module in model.modules() if isinstance(module, DividedExperts))


def _bytes_of(rows: Tensor) -> Tensor:
    """Returns [num_rows, width] as bytes, which every backend can send: [num_rows, width * itemsize] uint8."""
    return rows.contiguous().view(torch.uint8)


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Sends a number of rows to each rank, in order, and returns those that come from each rank."""
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, received, sent)
    return arrived
