"""Chooses nodes for requests: by free room, then by load and cached prefixes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from outrider.prefill import MAX_SCORED_ROWS
from outrider.request import Adapter
from outrider.session import Rejected, RejectReason
from router.nodes.directory import NodeDirectory
from router.nodes.link import DecodeLink, NodeLink, PrefillLink
from router.nodes.room import Size
from router.scheduling.prefix_map import PREFIX_CHUNK_TOKENS, PrefixMap, prefix_hashes

Link = TypeVar("Link", bound=NodeLink)
Family = tuple[bool, str, Adapter | None, frozenset[bytes], frozenset[bytes]]
NO_NODES: frozenset[bytes] = frozenset()

OUTSTANDING_CHUNKS = 4
"""Maximum chunks of prompt tokens, each computed by one forward pass, that may be in flight on a prefill node."""
HEDGED_SHARE = 0.1
"""Maximum share of the running requests that are hedged, i.e. also opened on another node because theirs is late."""
PREFIX_HIT_BONUS = 4
"""Number of extra running sequences for which a node makes up by having the whole prefix cached."""


@dataclass(frozen=True)
class Demand:
    """A request's requirements for its nodes."""

    token_ids: tuple[int, ...]  # the prompt and the generated tokens; all except the last need KV
    excluded: frozenset[bytes] = frozenset()  # incarnations of nodes that must not be used
    kv_salt: bytes = b""
    num_exact: int | None = None  # of a blended prompt: tokens of its first piece, the only ones that are a prefix
    avoided: frozenset[bytes] = frozenset()  # incarnations of nodes that failed this request, used as a last resort
    numerics: str = ""  # required numerics of the decode and prefill node; empty: any
    is_scored: bool = False  # whether prompt logprobs are wanted; few prompt tokens are then computed per step
    num_samples: int = 1
    adapter: Adapter | None = None  # None: the model itself, which every node has

    @property
    def size(self) -> Size:
        return Size(len(self.token_ids), self.num_samples)

    @property
    def family(self) -> Family:
        """A key shared by demands that differ only in size. The larger one needs at least as much room on any node."""
        return self.is_scored, self.numerics, self.adapter, self.excluded, self.avoided

    @property
    def num_scored_tokens(self) -> int:
        """An upper bound of the number of tokens to score. It counts generated tokens, too."""
        return len(self.token_ids) if self.is_scored else 0

    @cached_property
    def prefix_hashes(self) -> list[int]:
        """Hashes of the prefixes, cached because placement reads those of the queue's first request at each report."""
        return prefix_hashes(self.token_ids[: self.num_exact], salt=self.kv_salt)

    @property
    def decode_hashes(self) -> list[int]:
        """Hashes of the prefixes that decode nodes share with other requests."""
        return self.prefix_hashes if self.num_exact is None else []


@dataclass(slots=True, eq=False)
class Place:
    """A decode and a prefill node, reserved for one request until released. Releasing is idempotent."""

    placement: Placement
    demand: Demand
    decode: DecodeLink
    prefill: PrefillLink | None  # None: no prefill node serves, so the decode node computes the prompt
    num_prefill_tokens: int
    holds_decode: bool = True
    hedged: NodeLink | None = None  # the late node that this place hedges against

    def kv_salt(self, cache_salt: bytes) -> bytes:
        """Returns the salt for the hashes of this place's KV blocks, for a request with the salt `cache_salt`.

        KV computed by nodes of different numerics differs in bits from KV that the decode node computes alone, so
        KV is shared only between places with the same pair of numerics.
        """
        kinds = (self.decode.numerics, "" if self.prefill is None else self.prefill.numerics)
        if kinds[0] == kinds[1] or not all(kinds):
            return cache_salt
        return hashlib.sha256("\0".join((*kinds, cache_salt.hex())).encode()).digest()

    def change_prefill(self, demand: Demand) -> bool:
        """Replaces a failed prefill node with one of the same numerics. Returns False if none is available."""
        self.release_prefill()
        if self.prefill is None:
            return False
        chosen = self.placement.choose_other_prefill(demand, self.prefill)
        if chosen is None:
            return False
        self.demand = demand
        self.prefill, self.num_prefill_tokens = chosen
        return True

    def uncount_hedge(self) -> None:
        """Stops counting a hedge that gave no tokens, so that another request may be hedged against the late node."""
        if self.hedged is not None:
            self.hedged.num_hedges = max(self.hedged.num_hedges - 1, 0)

    def release_prefill(self) -> None:
        """Releases the prefill node, because the prompt is computed or need not be computed."""
        num_tokens, self.num_prefill_tokens = self.num_prefill_tokens, 0
        if num_tokens and self.prefill is not None:
            self.placement.release_prefill(self.prefill, num_tokens, self.demand.num_scored_tokens)

    def release(self, rejected: Rejected | None = None) -> None:
        """Releases both nodes. `rejected`: the decode node's answer if it had no room, or lacked the adapter."""
        try:
            if self.holds_decode:
                self.holds_decode = False
                self.placement.release_decode(self.decode, self.demand, rejected)
        finally:
            self.release_prefill()


class Placement:
    """Chooses places and counts the work in flight on each node. Owned by the event loop.

    A request gets a place only if a prefill node has room too, so that reserved blocks on decode nodes do not
    stay unused.
    """

    def __init__(self, nodes: NodeDirectory, *, prefill_outstanding_tokens: int) -> None:
        self._nodes = nodes
        self._max_outstanding_tokens = prefill_outstanding_tokens
        self._num_chosen = 0
        self._prefixes = PrefixMap()
        self.num_placed = 0  # requests placed on all decode nodes together
        self.on_room: Callable[[], None] = lambda: None  # called when room may have become free

    def place(
        self, demand: Demand, *, reserved: frozenset[bytes] = NO_NODES, must_be_on_time: bool = False
    ) -> Place | None:
        """Returns a place that is free now, or None.

        `reserved`: incarnations of nodes that are reserved for other requests. `must_be_on_time`: late decode nodes are
        not used.
        """
        decode = self._choose_decode(demand, reserved=reserved, must_be_on_time=must_be_on_time)
        if decode is None:
            return None
        prefill: PrefillLink | None = None
        num_uncached = 0
        if self._has_prefill_node(demand):
            chosen = self._choose_prefill(demand, reserved=reserved)
            if chosen is None:
                return None
            prefill, num_uncached = chosen
            self._take_prefill(demand, prefill, num_uncached)
        self._record_choice(decode, demand.decode_hashes)
        decode.change_room(demand.size, -1)
        decode.num_placed += 1
        self.num_placed += 1
        return Place(self, demand, decode, prefill, num_uncached)

    def choose_other_prefill(self, demand: Demand, failed: PrefillLink) -> tuple[PrefillLink, int] | None:
        """Chooses a node (the failed one last) and counts the prompt there. Returns (node, uncached tokens) or None."""
        chosen = self._choose_prefill(demand, failed=failed)
        if chosen is not None:
            self._take_prefill(demand, *chosen)
        return chosen

    def _take_prefill(self, demand: Demand, prefill: PrefillLink, num_uncached: int) -> None:
        self._record_choice(prefill, demand.prefix_hashes)
        prefill.num_outstanding_tokens += num_uncached
        prefill.num_scored_tokens += demand.num_scored_tokens

    def _record_choice(self, link: NodeLink, hashes: Sequence[int]) -> None:
        link.breaker.begin()
        self._prefixes.remember(hashes, link.incarnation)
        self._num_chosen += 1
        link.last_choice = self._num_chosen

    def has_decode_node_on_time(self, demand: Demand) -> bool:
        """Whether a decode node that is not late could take the request."""
        return any(not link.is_late and _can_compute(link, demand) for link in self._nodes.decode_nodes)

    @property
    def awaits_decode_nodes(self) -> bool:
        """Whether a decode node that is not serving now might accept a request that no serving node can accept."""
        return self._nodes.has_unready_decode_target

    def is_usable(self, demand: Demand) -> bool:
        """Whether a serving decode node could take the request once it has room."""
        return any(_can_compute(link, demand) for link in self._nodes.decode_nodes)

    def is_unloaded(self, demand: Demand) -> bool:
        """Whether the demanded adapter was unloaded, so that no decode node will have it."""
        return demand.adapter is not None and self._nodes.adapters.was_unloaded(demand.adapter)

    def usable_nodes(self, demand: Demand) -> frozenset[bytes]:
        """Returns the incarnations of serving decode nodes that could take the request once they have room."""
        return frozenset(link.incarnation for link in self._usable_decode(demand))

    def has_prefill_room(self, demand: Demand) -> bool:
        """Whether the prompt can be computed now: by a prefill node or, if none serves, by the decode node."""
        return not self._has_prefill_node(demand) or self._choose_prefill(demand) is not None

    def nodes_to_reserve(self, demand: Demand, *, decode: bool, prefill: bool) -> frozenset[bytes]:
        """Returns the nodes, at most one of each role, that will probably be the first with room for the request.

        The queue reserves these nodes: the router sends nothing else there, so that their free room grows as needed.
        """
        kept: list[NodeLink] = []
        if decode and (decodes := self._usable_decode(demand)):
            kept.append(max(decodes, key=lambda link: _nearness_of_room(link, demand.size)))
        if prefill and (prefills := self._usable_prefill(demand)):
            kept.append(min(prefills, key=_work_ahead))
        return frozenset(link.incarnation for link in kept)

    def waits_for_scored_prompts(self, demand: Demand) -> bool:
        """Whether the request waits only because of scored prompts on prefill nodes. If so, other requests may pass."""
        links = self._usable_prefill(demand)
        return bool(links) and not any(_has_scoring_room(link, demand) for link in links)

    def _has_prefill_node(self, demand: Demand) -> bool:
        return any(_can_compute(link, demand) for link in self._nodes.prefill_nodes)

    def may_hedge(self, late: NodeLink) -> bool:
        """Whether one more request may be hedged because this node is late.

        The limit keeps hedges from overloading nodes that are late only because they are busy. One hedge is always
        allowed, others up to `HEDGED_SHARE` of the running requests. There is no limit if this node is silent and all
        others are on time, which shows that the node is at fault. A link's `num_hedges` counts its hedges until it is
        on time again or lost. Migrations from lost or draining nodes do not count.
        """
        others = [link for link in self._nodes.late_nodes if link is not late]
        if late.is_silent and not others:
            return True
        num_hedges = late.num_hedges + sum(link.num_hedges for link in others)
        return num_hedges < max(1, int(self.num_placed * HEDGED_SHARE))

    def may_take_over(self, late: PrefillLink, demand: Demand) -> bool:
        """Whether a late prefill node's work may move to another of the same numerics; counts it as a hedge if so."""
        others = [link for link in self._nodes.prefill_nodes if _can_compute(link, demand)]
        has_other = any(not link.is_late and link.numerics == late.numerics for link in others)
        may_move = late.is_late and has_other and self.may_hedge(late)
        late.num_hedges += may_move
        return may_move

    def release_prefill(self, prefill: PrefillLink, num_tokens: int, num_scored_tokens: int) -> None:
        prefill.num_outstanding_tokens -= num_tokens
        prefill.num_scored_tokens -= num_scored_tokens
        assert prefill.num_outstanding_tokens >= 0, "more prefill tokens released than placed"
        self.on_room()

    def release_decode(self, decode: DecodeLink, demand: Demand, rejected: Rejected | None) -> None:
        decode.num_placed -= 1
        self.num_placed -= 1
        decode.change_room(demand.size, 1)
        if rejected is not None and rejected.reason is RejectReason.NO_ADAPTER:
            decode.add_refused_adapter(demand.adapter)
        elif rejected is not None:
            decode.add_refusal(rejected, demand.size)
        self.on_room()

    def _choose_decode(
        self, demand: Demand, *, reserved: frozenset[bytes] = NO_NODES, must_be_on_time: bool = False
    ) -> DecodeLink | None:
        now, size = time.monotonic(), demand.size
        usable = [link for link in self._usable_decode(demand) if not (must_be_on_time and link.is_late)]
        free = [link for link in usable if link.incarnation not in reserved and link.has_room(size, now)]
        candidates = _healthiest(free, usable)
        return min(candidates, key=lambda link: self._decode_cost(link, demand.decode_hashes), default=None)

    def _usable_decode(self, demand: Demand) -> list[DecodeLink]:
        return _unless_avoided([link for link in self._nodes.decode_nodes if _can_compute(link, demand)], demand)

    def _usable_prefill(self, demand: Demand) -> list[PrefillLink]:
        return _unless_avoided([link for link in self._nodes.prefill_nodes if _can_compute(link, demand)], demand)

    def _decode_cost(self, link: DecodeLink, hashes: Sequence[int]) -> tuple[bool, float, float, float, int, str]:
        report = link.report
        assert report is not None, "a serving node has reported"
        num_running = max(report.load.num_running, link.num_placed)
        held = self._prefixes.num_held_tokens(hashes, link.incarnation)
        share_held = held / max(len(hashes) * PREFIX_CHUNK_TOKENS, 1)
        free_share = report.load.kv_blocks_free / max(report.load.kv_blocks_total, 1)
        cost = num_running - PREFIX_HIT_BONUS * share_held
        return link.is_late, cost, -round(free_share, 1), report.expected_step_seconds, link.last_choice, link.name

    def _limit_of(self, link: PrefillLink) -> int:
        """Returns the limit of uncached prompt tokens in flight. A few chunks keep the node busy; more would wait."""
        rows = link.report.load.max_rows_per_step if link.report is not None else 0
        return OUTSTANDING_CHUNKS * rows or self._max_outstanding_tokens

    def _choose_prefill(
        self, demand: Demand, *, reserved: frozenset[bytes] = NO_NODES, failed: PrefillLink | None = None
    ) -> tuple[PrefillLink, int] | None:
        """Returns (node, uncached tokens) for the node that would finish this prompt first, or None if none has room.

        `failed`: the node to replace. It is the last choice, and excluded while it is late. Nodes of other numerics
        are excluded too, because the block hashes of the reservation depend on the numerics. For a replacement,
        room is not checked, because the prompt already has its reservation.
        """
        usable = self._usable_prefill(demand)
        if failed is not None:
            usable = [
                link for link in usable if link.numerics == failed.numerics and not (link is failed and link.is_late)
            ]
        costs: dict[PrefillLink, tuple[bool, bool, int, int, str]] = {}
        num_uncached: dict[PrefillLink, int] = {}
        for link in usable:
            held = self._prefixes.num_held_tokens(demand.prefix_hashes, link.incarnation)
            num_new = MAX_SCORED_ROWS if demand.is_scored else max(len(demand.token_ids) - 1 - held, 1)
            reported = link.report.load.num_outstanding_tokens if link.report is not None else 0
            own = link.num_outstanding_tokens
            outstanding = max(own, reported)
            is_beyond = own and outstanding + num_new > self._limit_of(link)
            if failed is None and (is_beyond or not _has_scoring_room(link, demand) or link.incarnation in reserved):
                continue  # a prompt above the limit may only go to a node without other work of this router
            num_uncached[link] = num_new
            costs[link] = (link is failed, link.is_late, outstanding + num_new, link.last_choice, link.name)
        best = min(_healthiest(list(costs), usable), key=costs.__getitem__, default=None)
        return None if best is None else (best, num_uncached[best])


def _can_compute(link: NodeLink, demand: Demand) -> bool:
    """Whether the node is not excluded, and has the demanded numerics and adapter."""
    has_numerics = not demand.numerics or link.numerics == demand.numerics
    return has_numerics and link.incarnation not in demand.excluded and link.has_adapter(demand.adapter)


def _has_scoring_room(link: PrefillLink, demand: Demand) -> bool:
    """Whether the limit of scored prompt tokens on the node leaves room for this prompt."""
    ahead, num_tokens = link.num_scored_tokens, demand.num_scored_tokens
    return not (ahead and num_tokens) or ahead + num_tokens <= OUTSTANDING_CHUNKS * MAX_SCORED_ROWS


def _unless_avoided(links: list[Link], demand: Demand) -> list[Link]:
    """Returns the links that have not failed this request; if all have failed it, returns all."""
    if not demand.avoided:
        return links
    return [link for link in links if link.incarnation not in demand.avoided] or links


def _healthiest(free: list[Link], usable: Sequence[Link]) -> list[Link]:
    """Returns the links with room (`free`) whose breaker is closed.

    If there are none, returns those that may get a trial request, or all links with room if the breakers of all
    usable links are open.
    """
    healthy = [link for link in free if not link.breaker.is_open]
    if healthy or all(link.breaker.is_open for link in usable):
        return healthy or free
    return [link for link in free if link.breaker.may_be_tried]


def _nearness_of_room(link: DecodeLink, size: Size) -> tuple[bool, bool, float, int, str]:
    """Returns a sort key, larger for nodes that will have room sooner because less of their running work must end."""
    assert link.report is not None, "a serving node has reported"
    load = link.report.load
    known = (refusal for refusal in link.refusals if refusal.size.num_tokens <= size.num_tokens)
    num_blocks = max((refusal.rejected.kv_blocks_needed for refusal in known), default=0)
    blocks = (num_blocks - load.kv_blocks_free) / max(load.kv_blocks_total - load.kv_blocks_free, 1)
    sequences = (size.num_samples - load.num_sequences_free) / max(load.num_running, 1)
    return not link.is_late, not link.breaker.is_open, -max(blocks, sequences), load.kv_blocks_free, link.name


def _work_ahead(link: PrefillLink) -> tuple[bool, bool, int, str]:
    """Returns a sort key, smaller for the node that will finish its work sooner."""
    return link.is_late, link.breaker.is_open, link.num_outstanding_tokens, link.name
