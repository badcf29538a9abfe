"""Which nodes a request goes to: room first, then the prefix they may still hold, then load."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import xxhash

from outrider.request import Request
from router.node_directory import NodeDirectory
from router.node_link import DecodeLink, NodeLink, PrefillLink

Link = TypeVar("Link")

PREFIX_CHUNK_TOKENS = 32
MAX_PREFIX_CHUNKS = 65_536
"""Chunks that are remembered, over all nodes: 2 million prompt tokens."""
FULL_SECONDS = 0.25
"""A decode node that had no room is asked again after this long, or when something has ended there."""
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


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """One hash for each whole chunk's prefix, the last token left out (it is always computed)."""
    hasher = xxhash.xxh3_64()
    hashes = []
    for start in range(0, len(token_ids) - PREFIX_CHUNK_TOKENS, PREFIX_CHUNK_TOKENS):
        hasher.update(array("I", token_ids[start : start + PREFIX_CHUNK_TOKENS]).tobytes())
        hashes.append(hasher.intdigest())
    return hashes


class Place:
    """A decode node and a prefill node, held for one request until released. Releasing twice does nothing."""

    def __init__(self, placement: Placement, decode: DecodeLink, prefill: PrefillLink, num_prefill_tokens: int) -> None:
        self.decode = decode
        self.prefill = prefill
        self._placement = placement
        self._num_prefill_tokens = num_prefill_tokens
        self._holds_decode = True

    def release_prefill(self) -> None:
        """The prompt has been computed, or need not be."""
        num_tokens, self._num_prefill_tokens = self._num_prefill_tokens, 0
        if num_tokens:
            self._placement.release_prefill(self.prefill, num_tokens)

    def release(self, *, is_full: bool = False) -> None:
        """`is_full`: the decode node had no room."""
        if self._holds_decode:
            self._holds_decode = False
            self._placement.release_decode(self.decode, is_full=is_full)
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
        self._full_until: dict[DecodeLink, float] = {}
        self._num_chosen = 0
        self._chosen_at: WeakKeyDictionary[NodeLink, int] = WeakKeyDictionary()  # equals take turns
        self._held_by_decode = PrefixMap()
        self._held_by_prefill = PrefixMap()

    @property
    def has_nodes(self) -> bool:
        return bool(self._nodes.decode_nodes and self._nodes.prefill_nodes)

    @property
    def num_placed(self) -> int:
        return sum(self._num_placed.values())

    @property
    def num_outstanding_tokens(self) -> int:
        return sum(self._outstanding.values())

    def when_room(self, on_room: Callable[[], None]) -> None:
        """`on_room` is called when a place may have become free."""
        self._on_room = on_room

    def place(self, request: Request, *, excluded: frozenset[bytes] = frozenset()) -> Place | None:
        """A place now, or None. `excluded`: incarnations of decode nodes that this request can never fit on."""
        token_ids = request.prompt_token_ids + request.generated_token_ids
        hashes = prefix_hashes(token_ids)
        decode = self._choose_decode(hashes, excluded)
        if decode is None:
            return None
        chosen = self._choose_prefill(hashes, len(token_ids))
        if chosen is None:
            return None
        prefill, num_uncached = chosen
        self._num_chosen += 1
        self._chosen_at[decode] = self._chosen_at[prefill] = self._num_chosen
        self._held_by_decode.remember(hashes, _incarnation(decode))
        self._held_by_prefill.remember(hashes, _incarnation(prefill))
        self._outstanding[prefill] = self._outstanding.get(prefill, 0) + num_uncached
        self._num_placed[decode] = self._num_placed.get(decode, 0) + 1
        return Place(self, decode, prefill, num_uncached)

    def can_fit_elsewhere(self, excluded: frozenset[bytes]) -> bool:
        """Whether a decode node is left that has not called the request too large."""
        return any(_incarnation(link) not in excluded for link in self._nodes.decode_nodes)

    def release_prefill(self, prefill: PrefillLink, num_tokens: int) -> None:
        left = self._outstanding[prefill] - num_tokens
        assert left >= 0, "more prefill tokens released than placed"
        _set_or_drop(self._outstanding, prefill, left)
        self._on_room()

    def release_decode(self, decode: DecodeLink, *, is_full: bool) -> None:
        _set_or_drop(self._num_placed, decode, self._num_placed[decode] - 1)
        self._full_until.pop(decode, None)
        if is_full:
            now = self._clock()
            self._full_until = {link: until for link, until in self._full_until.items() if until > now}
            self._full_until[decode] = now + FULL_SECONDS
        self._on_room()

    def _choose_decode(self, hashes: Sequence[int], excluded: frozenset[bytes]) -> DecodeLink | None:
        now = self._clock()
        candidates = [
            link
            for link in self._nodes.decode_nodes
            if self._full_until.get(link, 0.0) <= now and _incarnation(link) not in excluded
        ]
        return min(candidates, key=lambda link: self._decode_cost(link, hashes), default=None)

    def _decode_cost(self, link: DecodeLink, hashes: Sequence[int]) -> tuple[float, float, float, int, str]:
        report = link.report
        assert report is not None, "a serving node has reported"
        num_running = max(report.load.num_running, self._num_placed.get(link, 0))
        held = self._held_by_decode.num_held_tokens(hashes, _incarnation(link))
        share_held = held / max(len(hashes) * PREFIX_CHUNK_TOKENS, 1)
        free_share = report.load.kv_blocks_free / max(report.load.kv_blocks_total, 1)
        cost = num_running - PREFIX_WORTH_SEQUENCES * share_held
        turn = self._chosen_at.get(link, 0)
        return cost, -round(free_share, 1), report.expected_step_seconds, turn, link.name

    def _choose_prefill(self, hashes: Sequence[int], num_tokens: int) -> tuple[PrefillLink, int] | None:
        """(node, uncached tokens there) with the least work ahead, this prompt included; None without room."""
        best: tuple[int, int, str, PrefillLink, int] | None = None
        for link in self._nodes.prefill_nodes:
            held = self._held_by_prefill.num_held_tokens(hashes, _incarnation(link))
            num_uncached = max(num_tokens - 1 - held, 1)
            reported = link.report.load.num_outstanding_tokens if link.report is not None else 0
            outstanding = max(self._outstanding.get(link, 0), reported)
            if self._outstanding.get(link, 0) and outstanding + num_uncached > self._limit:
                continue  # a prompt beyond the limit goes to a node that has nothing else of ours
            turn = self._chosen_at.get(link, 0)
            cost = (outstanding + num_uncached, turn, link.name, link, num_uncached)
            best = cost if best is None or cost[:3] < best[:3] else best
        return None if best is None else (best[3], best[4])


def _incarnation(link: DecodeLink | PrefillLink) -> bytes:
    return link.info.incarnation if link.info is not None else b""


def _set_or_drop(counts: dict[Link, int], link: Link, count: int) -> None:
    if count:
        counts[link] = count
    else:
        counts.pop(link, None)
