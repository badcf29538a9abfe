"""The order in which clients get their turns: each the same share, whatever the others ask for."""

from __future__ import annotations

import heapq

MAX_CLIENTS = 8192
"""That are remembered: clients choose their names themselves where nobody asks for tokens."""


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996).

    A request's stamp is the virtual time at which it would start if its client had a server
    of its own; the smallest stamp goes first. Requests of one client keep their order. A
    client that was idle starts at the present, so nothing is saved up. Of many clients those that
    have had least are forgotten first.
    """

    def __init__(self, *, max_clients: int = MAX_CLIENTS) -> None:
        self._max_clients = max_clients
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by client: the virtual time at which its last request would end

    def stamp(self, client: str, cost: float) -> float:
        """`cost`: above 0, in any unit."""
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        if len(self._ends) > self._max_clients:
            self._ends = dict(heapq.nlargest(self._max_clients // 2, self._ends.items(), key=lambda item: item[1]))
        return start

    def serve(self, stamp: float) -> None:
        """A request has got its turn: time goes on to its start."""
        self._now = max(self._now, stamp)

    def refund(self, client: str, cost: float) -> None:
        """A request has left without its turn."""
        if client in self._ends:
            self._ends[client] -= cost
