"""Where a layer's experts are if they are divided among ranks, and which of them have a second copy. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MIN_GAP = 0.1
"""Gap between two ranks' loads, by the mean load, below which sending an expert's weights gains too little."""


def home_range(num_experts: int, num_ranks: int, rank: int) -> range:
    """Returns the experts that a rank always has. Their numbers differ by at most one between ranks."""
    return range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)


def home_ranks(num_experts: int, num_ranks: int) -> list[int]:
    """Returns the rank that always has each expert."""
    return [rank for rank in range(num_ranks) for _ in home_range(num_experts, num_ranks, rank)]


def choose_copies(loads: Sequence[float], *, num_ranks: int, num_spares: int) -> dict[int, int]:
    """Returns the experts that get a second copy, each with the rank of this copy.

    An expert with a copy divides its rows equally between its two ranks. Again and again, the busiest rank shares the
    busiest of its experts that relieves it with the least busy rank, unless their loads are almost the same. So the
    load of the busiest rank never grows.

    `loads`: the number of rows of each expert. `num_spares`: the number of copies for which each rank has memory.
    """
    homes = home_ranks(len(loads), num_ranks)
    of_rank = rank_loads(loads, {}, num_ranks=num_ranks)
    room, copies = [num_spares] * num_ranks, dict[int, int]()
    while any(room):
        busiest = max(range(num_ranks), key=of_rank.__getitem__)
        least = min((rank for rank in range(num_ranks) if room[rank]), key=of_rank.__getitem__)
        gap = of_rank[busiest] - of_rank[least]
        if gap < MIN_GAP * sum(loads) / num_ranks:
            break
        own = [each for each, home in enumerate(homes) if home == busiest and each not in copies]
        expert = max((each for each in own if 0 < loads[each] / 2 < gap), key=loads.__getitem__, default=None)
        if expert is None:
            break
        of_rank[busiest] -= loads[expert] / 2
        of_rank[least] += loads[expert] / 2
        room[least] -= 1
        copies[expert] = least
    return copies


def rank_loads(loads: Sequence[float], copies: Mapping[int, int], *, num_ranks: int) -> list[float]:
    """Returns the number of rows of each rank, with these copies."""
    of_rank = [0.0] * num_ranks
    for expert, home in enumerate(home_ranks(len(loads), num_ranks)):
        for rank in (home, copies.get(expert, home)):
            of_rank[rank] += loads[expert] / 2
    return of_rank
