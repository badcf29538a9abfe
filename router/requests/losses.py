"""What one request has lost: a request that kills nodes must not kill them all."""

from __future__ import annotations

from outrider.errors import LOSES_NODES, PeerLostError
from router.nodes.breaker import Breaker
from router.requests.answer import Answer

MAX_LOSSES = 3
"""Nodes that may lose a request without a new token, over all attempts and both roles. Then it fails."""
MAX_TRANSFERS = 3
"""KV transfers that may fail without a new token; then the decode node computes the prompt itself."""


class Losses:
    """Counts since the answer's last new token. Owned by the event loop."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_tokens = 0  # that the answer had at the last loss
        self._num_losses = 0
        self._num_transfers = 0  # that failed
        self.avoided: set[bytes] = set()  # incarnations of the nodes, for good
        self._blamed: set[Breaker] = set()  # of nodes that have failed this request alone, as far as is known
        self._cause = object()  # this request, as breakers know it

    def add_node(self, incarnation: bytes) -> None:
        """A node ended, or gave the request up."""
        self._forget_earlier()
        self._num_losses += 1
        self.avoided.add(incarnation)

    def add_transfer(self, incarnation: bytes) -> None:
        """A transfer from this prefill node failed."""
        self._forget_earlier()
        self._num_transfers += 1
        self.avoided.add(incarnation)

    def blame(self, breaker: Breaker) -> None:
        """The node failed this request, and may be well: one that fails on two nodes is the cause itself."""
        self._forget_earlier()
        self._blamed.add(breaker)
        breaker.fail(self._cause)
        if len(self._blamed) > 1:
            self._acquit()

    def _acquit(self) -> None:
        for breaker in self._blamed:
            breaker.forgive(self._cause)

    @property
    def may_transfer(self) -> bool:
        return self._num_transfers < MAX_TRANSFERS

    def may_open_beside_one(self) -> bool:
        """Whether an attempt may begin beside one that runs: both might be lost."""
        self._forget_earlier()
        return self._num_losses + 2 <= MAX_LOSSES

    def final_error(self, last: PeerLostError) -> PeerLostError | None:
        """What the request ends with after too many losses; None: it goes on."""
        if self._num_losses < MAX_LOSSES:
            return None
        self._acquit()
        message = f"{self._num_losses} nodes were lost without a new token; the last: {last.message}"
        return PeerLostError(message, node=last.node, reason=LOSES_NODES)

    def _forget_earlier(self) -> None:
        num_tokens = self._answer.num_generated_tokens
        if num_tokens > self._num_tokens:
            self._num_tokens, self._num_losses, self._num_transfers = num_tokens, 0, 0
            self._blamed.clear()
