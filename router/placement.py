"""Which nodes a request goes to: room first, then the prefix they may still hold, then load."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar
from weakref import WeakKeyDictionary

import xxhash

from outrider.node import NodeLoad
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected
from router.node_directory import NodeDirectory
from router.node_link import DecodeLink, NodeLink, PrefillLink

Link = TypeVar("Link")

PREFIX_CHUNK_TOKENS = 32
MAX_PREFIX_CHUNKS = 65_536
"""Chunks that are remembered, over all nodes: 2 million prompt tokens."""
PREFIX_WORTH_SEQUENCES = 4
"""A node that holds the prompt's prefix may run this many more sequences than another and is still preferred."""


class PrefixMap:
    """Which node saw which prompt prefix last; the least recently used is forgotten first."""

    def __init__(self, max_chunks: int = MAX_PREFIX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._nodes: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # (prefix hash, node's incarnation)

    def num_held_tokens(self, prefix_hashes: Sequence[int], incarnation: bytes) -> int:
        """Prompt tokens from the start that the node has probably computed before."""
        num_chunks = 0
        for prefix_hash in prefix_hashes:
            if (prefix_hash, incarnation) not in self._nodes:
                break
            num_chunks += 1
        return num_chunks * PREFIX_CHUNK_TOKENS

    def remember(self, prefix_hashes: Sequence[int], incarnation: bytes) -> None:
        for prefix_hash in prefix_hashes:
            self._nodes[prefix_hash, incarnation] = None
            self._nodes.move_to_end((prefix_hash, incarnation))
        while len(self._nodes) > self._max_chunks:
            self._nodes.popitem(last=False)


def prefix_hashes(token_ids: Sequence[int], *, salt: bytes = b"") -> list[int]:
    """One hash for each whole chunk's prefix, the last token left out (it is always computed)."""
    hasher = xxhash.xxh3_64(salt)
    hashes = []
    for start in range(0, len(token_ids) - PREFIX_CHUNK_TOKENS, PREFIX_CHUNK_TOKENS):
        hasher.update(array("I", token_ids[start : start + PREFIX_CHUNK_TOKENS]).tobytes())
        hashes.append(hasher.intdigest())
    return hashes


@dataclass(frozen=True)
class Demand:
    """What a place is sought for."""

    token_ids: tuple[int, ...]  # the prompt, and what was generated: KV is wanted of all but the last
    excluded: frozenset[bytes] = frozenset()  # incarnations of decode nodes that will not do
    cache_salt: bytes = b""

    @cached_property
    def prefix_hashes(self) -> list[int]:
        """Made once, however often the queue's head is offered to placement."""
        return prefix_hashes(self.token_ids, salt=self.cache_salt)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decode node had no room. It is not asked again with a whole prompt before a report shows what was missing."""

    not_before: float  # monotonic seconds
    until: float  # then it is asked whatever the report shows
    kv_blocks_needed: int
    num_sequences_needed: int

    @classmethod
    def of(cls, rejected: Rejected, *, now: float) -> Refusal:
        return cls(
            not_before=now + rejected.wait_seconds,
            until=now + NO_ROOM_RETRY_SECONDS,
            kv_blocks_needed=rejected.kv_blocks_needed,
            num_sequences_needed=rejected.num_sequences_needed,
        )

    def is_over(self, load: NodeLoad, now: float) -> bool:
        has_room = load.kv_blocks_free >= self.kv_blocks_needed and load.num_sequences_free >= self.num_sequences_needed
        return now >= self.until or (now >= self.not_before and has_room)


class Place:
    """A decode node and a prefill node, held for one request until released. Releasing twice does nothing."""

    def __init__(self, placement: Placement, decode: DecodeLink, prefill: PrefillLink, num_prefill_tokens: int) -> None:
        self.decode = decode
        self.prefill = prefill
        self._placement = placement
        self._num_prefill_tokens = num_prefill_tokens
        self._holds_decode = True

    def kv_salt(self, cache_salt: bytes) -> bytes:
        """What seeds the hashes of this place's KV, for a request of this salt.

        KV that nodes of different numerics have made together differs in bits from what the decode
        node computes alone: it is shared among its like only.
        """
        kinds = (self.decode.numerics, self.prefill.numerics)
        if kinds[0] == kinds[1] or not all(kinds):
            return cache_salt
        return hashlib.sha256("\0".join((*kinds, cache_salt.hex())).encode()).digest()

    def change_prefill(self, demand: Demand) -> bool:
        """Another prefill node in place of the one held, of its numerics. False: there is none, and none is held."""
        self.release_prefill()
        chosen = self._placement.choose_other_prefill(demand, self.prefill)
        if chosen is None:
            return False
        self.prefill, self._num_prefill_tokens = chosen
        return True

    def has_other_prefill(self) -> bool:
        """Whether another prefill node of the same numerics serves whose progress is not overdue."""
        return self._placement.has_timely_prefill_node(besides=self.prefill)

    def release_prefill(self) -> None:
        """The prompt has been computed, or need not be."""
        num_tokens, self._num_prefill_tokens = self._num_prefill_tokens, 0
        if num_tokens:
            self._placement.release_prefill(self.prefill, num_tokens)

    def release(self, rejected: Rejected | None = None) -> None:
        """`rejected`: the decode node had no room."""
        if self._holds_decode:
            self._holds_decode = False
            self._placement.release_decode(self.decode, rejected)
        self.release_prefill()


class Placement:
    """Chooses places and counts what is under way on each. Owned by the event loop.

    A request gets a place only when a prefill node has room for it, so that blocks
    reserved on decode nodes do not idle.
    """

    def __init__(
        self,
        nodes: NodeDirectory,
        *,
        prefill_outstanding_tokens: int,
        on_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._limit = prefill_outstanding_tokens
        self._on_room = on_room
        self._clock = clock
        self._outstanding: dict[PrefillLink, int] = {}  # uncached prompt tokens that this router sent
        self._num_placed: dict[DecodeLink, int] = {}  # requests that this router placed
        self._refusals: WeakKeyDictionary[DecodeLink, Refusal] = WeakKeyDictionary()
        self._num_chosen = 0
        self._chosen_at: WeakKeyDictionary[NodeLink, int] = WeakKeyDictionary()  # equals take turns
        self._held_by_decode = PrefixMap()
        self._held_by_prefill = PrefixMap()

    @property
    def num_placed(self) -> int:
        return sum(self._num_placed.values())

    @property
    def num_outstanding_tokens(self) -> int:
        return sum(self._outstanding.values())

    def when_room(self, on_room: Callable[[], None]) -> None:
        """`on_room` is called when a place may have become free."""
        self._on_room = on_room

    def place(self, demand: Demand, *, must_be_timely: bool = False) -> Place | None:
        """A place now, or None. `must_be_timely`: not on a decode node whose progress is overdue."""
        decode = self._choose_decode(demand, must_be_timely=must_be_timely)
        if decode is None:
            return None
        chosen = self._choose_prefill(demand)
        if chosen is None:
            return None
        prefill, num_uncached = chosen
        self._held_by_decode.remember(demand.prefix_hashes, decode.incarnation)
        self._num_placed[decode] = self._num_placed.get(decode, 0) + 1
        self._take_prefill(demand, prefill, num_uncached)
        self._chosen_at[decode] = self._num_chosen
        return Place(self, decode, prefill, num_uncached)

    def choose_other_prefill(self, demand: Demand, failed: PrefillLink) -> tuple[PrefillLink, int] | None:
        """(node, uncached tokens there), counted as under way; the one that failed only where it serves again."""
        chosen = self._choose_prefill(demand, avoided=failed, is_limited=False)
        if chosen is not None:
            self._take_prefill(demand, *chosen)
        return chosen

    def _take_prefill(self, demand: Demand, prefill: PrefillLink, num_uncached: int) -> None:
        self._num_chosen += 1
        self._chosen_at[prefill] = self._num_chosen
        self._held_by_prefill.remember(demand.prefix_hashes, prefill.incarnation)
        self._outstanding[prefill] = self._outstanding.get(prefill, 0) + num_uncached

    def has_timely_decode_node(self, excluded: frozenset[bytes]) -> bool:
        """Whether work could move to a decode node that is not among these."""
        return any(not link.is_late and link.incarnation not in excluded for link in self._nodes.decode_nodes)

    def are_others_timely(self, late: NodeLink) -> bool:
        """Whether every prefill and decode node but this one is on time."""
        links = (*self._nodes.decode_nodes, *self._nodes.prefill_nodes)
        return not any(link.is_late for link in links if link is not late)

    def of_other_numerics(self, numerics: str) -> frozenset[bytes]:
        """Incarnations of decode nodes that compute differently."""
        return frozenset(link.incarnation for link in self._nodes.decode_nodes if link.numerics != numerics)

    def could_serve(self, demand: Demand) -> bool:
        """Whether nodes serve that could take it once they have room."""
        return bool(self._nodes.prefill_nodes) and self.can_fit_elsewhere(demand.excluded)

    def has_timely_prefill_node(self, *, besides: PrefillLink) -> bool:
        return any(
            link is not besides and not link.is_late and link.numerics == besides.numerics
            for link in self._nodes.prefill_nodes
        )

    def can_fit_elsewhere(self, excluded: frozenset[bytes]) -> bool:
        """Whether a decode node is left that has not called the request too large."""
        return any(link.incarnation not in excluded for link in self._nodes.decode_nodes)

    def release_prefill(self, prefill: PrefillLink, num_tokens: int) -> None:
        left = self._outstanding[prefill] - num_tokens
        assert left >= 0, "more prefill tokens released than placed"
        _set_or_drop(self._outstanding, prefill, left)
        self._on_room()

    def release_decode(self, decode: DecodeLink, rejected: Rejected | None) -> None:
        _set_or_drop(self._num_placed, decode, self._num_placed[decode] - 1)
        if rejected is not None:
            self._refusals[decode] = Refusal.of(rejected, now=self._clock())
        elif (refusal := self._refusals.get(decode)) is not None and self._clock() >= refusal.not_before:
            del self._refusals[decode]  # what has just ended there was ours
        self._on_room()

    def _choose_decode(self, demand: Demand, *, must_be_timely: bool) -> DecodeLink | None:
        candidates = [
            link
            for link in self._nodes.decode_nodes
            if link.incarnation not in demand.excluded
            and not (must_be_timely and link.is_late)
            and not self._has_no_room(link)
        ]
        return min(candidates, key=lambda link: self._decode_cost(link, demand.prefix_hashes), default=None)

    def _has_no_room(self, link: DecodeLink) -> bool:
        refusal = self._refusals.get(link)
        return refusal is not None and link.report is not None and not refusal.is_over(link.report.load, self._clock())

    def _decode_cost(self, link: DecodeLink, hashes: Sequence[int]) -> tuple[bool, float, float, float, int, str]:
        report = link.report
        assert report is not None, "a serving node has reported"
        num_running = max(report.load.num_running, self._num_placed.get(link, 0))
        held = self._held_by_decode.num_held_tokens(hashes, link.incarnation)
        share_held = held / max(len(hashes) * PREFIX_CHUNK_TOKENS, 1)
        free_share = report.load.kv_blocks_free / max(report.load.kv_blocks_total, 1)
        cost = num_running - PREFIX_WORTH_SEQUENCES * share_held
        turn = self._chosen_at.get(link, 0)
        return link.is_late, cost, -round(free_share, 1), report.expected_step_seconds, turn, link.name

    def _choose_prefill(
        self, demand: Demand, *, avoided: PrefillLink | None = None, is_limited: bool = True
    ) -> tuple[PrefillLink, int] | None:
        """(node, uncached tokens there) with the least work ahead, this prompt included; None without room.

        `avoided` comes last; it does not come at all while it is late or lost, nor do nodes that
        compute differently: the hashes of the reservation's KV say by what it was made. Without
        `is_limited` room is not asked for: the blocks of this prompt are reserved already.
        """
        best: tuple[tuple[bool, bool, int, int, str], PrefillLink, int] | None = None
        for link in self._nodes.prefill_nodes:
            if link is avoided and link.is_late:
                continue
            if avoided is not None and link.numerics != avoided.numerics:
                continue
            held = self._held_by_prefill.num_held_tokens(demand.prefix_hashes, link.incarnation)
            num_uncached = max(len(demand.token_ids) - 1 - held, 1)
            reported = link.report.load.num_outstanding_tokens if link.report is not None else 0
            own = self._outstanding.get(link, 0)
            outstanding = max(own, reported)
            if is_limited and own and outstanding + num_uncached > self._limit:
                continue  # a prompt beyond the limit goes to a node that has nothing else of ours
            turn = self._chosen_at.get(link, 0)
            cost = (link is avoided, link.is_late, outstanding + num_uncached, turn, link.name)
            if best is None or cost < best[0]:
                best = (cost, link, num_uncached)
        return None if best is None else (best[1], best[2])


def _set_or_drop(counts: dict[Link, int], link: Link, count: int) -> None:
    if count:
        counts[link] = count
    else:
        counts.pop(link, None)
