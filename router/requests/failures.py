"""A request's failure budget: a request that makes nodes fail must not fail them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import LOSES_NODES, PeerLostError
from outrider.rpc.status import UNREACHABLE

MAX_LOST_NODES = 3
"""Nodes that may lose a request without a new token, over all attempts and both roles, before it fails."""
MAX_FAILED_TRANSFERS = 3
"""KV transfers that may fail without a new token before the decode node computes the prompt itself."""
NODE_CAUSES = frozenset({"decode_lost", "decode_silent", "token_mismatch", "protocol", UNREACHABLE})
"""Causes of losses that are the node's fault. The request itself may have caused other losses."""


@dataclass(slots=True)
class FailureBudget:
    """Counts a request's losses since its answer's last new token."""

    num_lost_nodes: int = 0
    num_failed_transfers: int = 0
    avoided: frozenset[bytes] = frozenset()  # processes that have lost the request; they stay here
    suspects: set[bytes] = field(default_factory=set)  # processes known to have failed this request only
    _num_tokens: int = 0  # generated tokens of the answer when last updated

    def look_at(self, num_generated_tokens: int) -> None:
        """Resets the counts if there are new tokens."""
        if num_generated_tokens > self._num_tokens:
            self._num_tokens = num_generated_tokens
            self.num_lost_nodes = self.num_failed_transfers = 0
            self.suspects.clear()

    def add_node(self, incarnation: bytes) -> None:
        """Counts a node that ended or gave up the request."""
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
        """Whether a second attempt may run, considering that both might be lost."""
        return self.num_lost_nodes + 2 <= MAX_LOST_NODES

    def final_error(self, last: PeerLostError) -> PeerLostError | None:
        """Returns the error that ends the request after too many losses; None: it continues."""
        if self.num_lost_nodes < MAX_LOST_NODES:
            return None
        message = f"{self.num_lost_nodes} nodes were lost without a new token; the last: {last.message}"
        return PeerLostError(message, node=last.node, reason=LOSES_NODES)
