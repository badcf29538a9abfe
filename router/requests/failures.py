"""A request's failure budget: a poison request, which makes nodes fail, must not bring down all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import LOSES_NODES, PeerLostError
from outrider.rpc.status import UNREACHABLE

MAX_LOST_NODES = 3
"""Nodes of either role that may fail a request without a new token, over all attempts, before it fails."""
MAX_FAILED_TRANSFERS = 3
"""KV transfers that may fail without a new token before the decode node computes the prompt itself."""
NODE_CAUSES = frozenset({"decode_lost", "decode_silent", "token_mismatch", "protocol", UNREACHABLE})
"""Causes of losses that are the node's fault. Other losses may be the request's own fault."""


@dataclass(slots=True)
class FailureBudget:
    """Counts a request's losses since its answer's last new token."""

    num_lost_nodes: int = 0
    num_failed_transfers: int = 0
    avoided: frozenset[bytes] = frozenset()  # incarnations of nodes that have failed the request; never reset
    suspects: set[bytes] = field(default_factory=set)  # incarnations of nodes that the request itself may have failed
    _num_tokens: int = 0  # generated tokens of the answer at the last reset

    def look_at(self, num_generated_tokens: int) -> None:
        """Resets the counts if there are new tokens."""
        if num_generated_tokens > self._num_tokens:
            self._num_tokens = num_generated_tokens
            self.num_lost_nodes = self.num_failed_transfers = 0
            self.suspects.clear()

    def add_node(self, incarnation: bytes) -> None:
        """Counts a node that ended, or that failed the request."""
        self.num_lost_nodes += 1
        self.avoided |= {incarnation}

    def add_transfer(self, incarnation: bytes) -> None:
        """Counts a failed transfer from this prefill node."""
        self.num_failed_transfers += 1
        self.avoided |= {incarnation}

    @property
    def may_transfer(self) -> bool:
        return self.num_failed_transfers < MAX_FAILED_TRANSFERS

    @property
    def may_open_second(self) -> bool:
        """Whether a second attempt may run: the budget must allow for the loss of both."""
        return self.num_lost_nodes + 2 <= MAX_LOST_NODES

    def final_error(self, last: PeerLostError) -> PeerLostError | None:
        """Returns the error that ends the request after too many losses; None: it continues."""
        if self.num_lost_nodes < MAX_LOST_NODES:
            return None
        message = f"{self.num_lost_nodes} nodes failed while serving this request without a new token"
        return PeerLostError(f"{message}; the last: {last.message}", node=last.node, reason=LOSES_NODES)
