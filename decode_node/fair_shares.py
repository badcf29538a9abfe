"""Routers that share this node: while one waits for room, no other takes more than its share."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.groups import GroupTable
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.session import NO_ROOM_RETRY_SECONDS

HOLD_BACK_SECONDS = 0.5
"""How long a router that has its share is told to wait: room goes to the others first."""

CLAIM_SECONDS = NO_ROOM_RETRY_SECONDS + 1.0
"""How long a refused router is taken to wait for room; it asks again before that."""


class FairShares:
    """Who was refused for want of room. Engine thread only.

    A session is refused while another waits if it holds its share of the blocks or of the
    sequences already: all of them, divided by the sessions that hold or want some. Sessions
    below their share come in as long as there is room, and without a waiting session nobody
    is limited. At most one claim is kept for each open session.
    """

    def __init__(self, pool: BlockPool, *, max_running_sequences: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._max_running = max_running_sequences
        self._clock = clock
        self._claims: dict[int, float] = {}  # by session: until when it is taken to wait

    def claim(self, session_id: int) -> None:
        """The session was refused for want of room."""
        self._claims[session_id] = self._clock() + CLAIM_SECONDS

    def settle(self, session_id: int) -> None:
        """It was let in, or has ended."""
        self._claims.pop(session_id, None)

    def hold_back_seconds(self, session_id: int, groups: GroupTable) -> float:
        """How long the session has to leave room to others; 0: it may come in."""
        now = self._clock()
        for claimant, until in tuple(self._claims.items()):
            if now >= until:
                del self._claims[claimant]
        others = [until for claimant, until in self._claims.items() if claimant != session_id]
        if not others:
            return 0.0
        contenders = {session_id, *self._claims, *(group.session_id for group in groups)}
        if self._held(session_id, groups) * len(contenders) < 1.0:
            return 0.0
        return min(HOLD_BACK_SECONDS, max(others) - now)

    def _held(self, session_id: int, groups: GroupTable) -> float:
        """Of what is scarcer, the part that the session has: 0 to 1."""
        mine = groups.of_session(session_id)
        num_sequences = sum(len(group.samples) + len(group.unstarted_samples) for group in mine)
        blocks = {block_id for group in mine for kv in group.tables() for block_id in kv.block_ids}
        return max(num_sequences / self._max_running, len(blocks) / self._pool.num_blocks)
