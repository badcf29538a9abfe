"""The committed tokens that decode nodes have sent, and the fair use of memory for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add, truediv

import numpy as np

from draft_node.draft_peer import DraftPeer
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.node import FeatureFormat
from outrider.speculation.draft_stream import DraftStatus, FeatureOffer, SequenceStart, SequenceUpdate
from outrider.speculation.prefix_hash import HashedTokens
from outrider.speculation.proposers.base import MAX_SEQUENCES

MAX_TOKENS = 6 << 20
"""Maximum tokens of all sequences together."""

BYTES_PER_TOKEN = 48
"""Bytes of memory per token: an integer, and its references in lists of the node and of a draft model's proposer."""

BYTES_PER_SEQUENCE = 16_384
"""Bytes of memory per sequence: hashes of its longest prefixes, sampling parameters, estimates."""

MAX_FEATURE_BYTES = 1 << 30
"""Maximum bytes of all sequences' features for a head: enough for 131,072 tokens with 4096 bfloat16 numbers each."""


def max_held_bytes(*, has_head: bool) -> int:
    """Returns the maximum bytes of main memory that all sequences take."""
    num_bytes = MAX_TOKENS * BYTES_PER_TOKEN + MAX_SEQUENCES * BYTES_PER_SEQUENCE
    return num_bytes + MAX_FEATURE_BYTES * 9 // 8 if has_head else num_bytes  # a growing array takes an eighth more


class HeldFeatures:
    """The `Features` of a sequence's first tokens. Not thread-safe."""

    __slots__ = ("_data", "_format")

    def __init__(self, features: FeatureFormat) -> None:
        self._format = features
        self._data = bytearray()

    def __len__(self) -> int:
        """The number of tokens whose features are held."""
        return len(self._data) // self._format.bytes_per_token

    def extend(self, start: int, payload: bytes | memoryview) -> None:
        """Adds features of the tokens from `start` (at most `len(self)`) on. Features already held stay unchanged."""
        assert start <= len(self), "no gap"
        self._data += memoryview(payload)[len(self._data) - start * self._format.bytes_per_token :]

    def read(self, start: int, end: int) -> Words:
        """Returns a copy of the features of tokens [start, end): [end - start, width], in the format's dtype."""
        size = self._format.bytes_per_token
        rows = np.frombuffer(self._data[start * size : end * size], dtype=WORDS[self._format.dtype])
        return rows.reshape(-1, self._format.width)


@dataclass(slots=True, eq=False)
class HeldSequence:
    """The state of one sequence on the draft node."""

    key: int  # the sequence's id for the proposer; never used twice
    peer: DraftPeer
    sequence_id: int  # the peer's id for the sequence
    start: SequenceStart
    tokens: HashedTokens
    features: HeldFeatures | None = None  # None if this node needs no features
    num_counted: int = 0  # number of tokens whose features count as memory: held ones, and those that are offered
    offer: FeatureOffer | None = None  # the last one that was accepted
    is_fetching: bool = False  # whether the offered features are being read, or wait for that
    num_wanted: int = 0
    min_reach: float = 0.0  # see ProposalRequest
    verified: tuple[int, ...] | None = None  # see ProposalRequest
    look_ahead_deadline: float = 0.0  # time (clock seconds) at which its target should have verified the last answer
    num_branches_left: int = 0  # look-ahead branches that may still be sent before the next update

    @property
    def num_features(self) -> int:
        """The number of tokens whose features are held, from the first on."""
        return 0 if self.features is None else len(self.features)


@dataclass(slots=True)
class _Holding:
    """The sequences of one decode node, and the memory that they use."""

    sequences: dict[int, HeldSequence] = field(default_factory=dict)  # by the node's ids, least recently updated first
    used: list[int] = field(default_factory=lambda: [0, 0, 0])  # sequences, tokens, features

    def count(self, held: HeldSequence, sign: int) -> None:
        """Counts a sequence. `sign`: 1 for one that is added, -1 for one that is removed."""
        for place, number in enumerate((1, len(held.tokens), held.num_counted)):
            self.used[place] += sign * number


class HeldSequences:
    """The newest state of all sequences, made from updates that are checked by prefix hash. Draft loop's thread only.

    A decode node gets memory while some is free. After that, a node that holds less than another takes memory from the
    node that holds the most, whose least recently updated sequences are evicted. So a single node may use all memory,
    but cannot keep others out.
    """

    def __init__(
        self,
        *,
        on_forgotten: Callable[[HeldSequence], None],
        on_evicted: Callable[[HeldSequence], None] = lambda _held: None,
        max_sequences: int = MAX_SEQUENCES,
        max_tokens: int = MAX_TOKENS,
        features: FeatureFormat | None = None,
        max_feature_bytes: int = MAX_FEATURE_BYTES,
    ) -> None:
        """`on_evicted` is called before `on_forgotten` for a sequence that is evicted for another decode node.

        `features`: the format that the node's head needs; None: features are not kept.
        """
        self._on_forgotten = on_forgotten
        self._on_displaced = on_evicted
        self._features = features
        max_features = max_tokens if features is None else max_feature_bytes // features.bytes_per_token
        self._limits = (max_sequences, max_tokens, max_features)
        self._holdings: dict[int, _Holding] = {}  # by peer
        self._keys = itertools.count()

    def __len__(self) -> int:
        return sum(len(holding.sequences) for holding in self._holdings.values())

    def apply(self, peer: DraftPeer, update: SequenceUpdate) -> HeldSequence | DraftStatus:
        """Applies an update. Returns the sequence, or the reason for a refusal; a refused sequence is forgotten."""
        held = self._take_out(peer, update.sequence_id)
        outcome = self._updated(peer, held, update)
        if held is not None and outcome is not held:
            self._on_forgotten(held)
        if isinstance(outcome, HeldSequence):
            holding = self._holdings.setdefault(peer.peer_id, _Holding())
            holding.sequences[update.sequence_id] = outcome  # at the end, as the most recently updated
            holding.count(outcome, 1)
        return outcome

    def _updated(
        self, peer: DraftPeer, held: HeldSequence | None, update: SequenceUpdate
    ) -> HeldSequence | DraftStatus:
        """Returns `held` after the update, a new sequence, or a refusal."""
        if not update.length or update.length != update.start_length + len(update.token_ids):
            return DraftStatus.NO_ROOM
        if update.length > peer.hello.max_model_len or max(update.token_ids, default=0) >= peer.hello.vocab_size:
            return DraftStatus.NO_ROOM
        if held is None or not _continues(held.tokens, update):
            if update.start_length or update.start is None:
                return DraftStatus.UNKNOWN_PREFIX
            features = None if self._features is None else HeldFeatures(self._features)
            held = HeldSequence(next(self._keys), peer, update.sequence_id, update.start, HashedTokens(), features)
        num_features = 0
        if self._features is not None:
            num_new, num_odd_bytes = divmod(len(update.features), self._features.bytes_per_token)
            offered = 0 if update.feature_offer is None else update.feature_offer.end_token
            num_features = max(held.num_counted, update.feature_start + num_new, offered)
            if num_odd_bytes or num_features >= update.length:
                return DraftStatus.NO_ROOM
            if update.feature_start > held.num_features:
                return DraftStatus.UNKNOWN_PREFIX
        if not self._make_room(peer, (1, update.length, num_features)):
            return DraftStatus.NO_ROOM
        if held.features is not None:
            held.features.extend(update.feature_start, update.features)
            held.num_counted = num_features
        held.tokens.extend(update.token_ids[len(held.tokens) - update.start_length :])
        held.num_wanted, held.min_reach, held.verified = update.num_wanted, update.min_reach, None
        return held if held.tokens.hash == update.prefix_hash else DraftStatus.UNKNOWN_PREFIX

    def find(self, peer: DraftPeer, sequence_id: int) -> HeldSequence | None:
        return self._holdings.get(peer.peer_id, _Holding()).sequences.get(sequence_id)

    def close(self, peer: DraftPeer, sequence_id: int) -> None:
        """Forgets a sequence, if it is known."""
        held = self._take_out(peer, sequence_id)
        if held is not None:
            self._on_forgotten(held)

    def close_peer(self, peer_id: int) -> None:
        """Forgets all sequences of a decode node."""
        holding = self._holdings.pop(peer_id, _Holding())
        for held in holding.sequences.values():
            self._on_forgotten(held)

    def _take_out(self, peer: DraftPeer, sequence_id: int) -> HeldSequence | None:
        holding = self._holdings.get(peer.peer_id, _Holding())
        held = holding.sequences.pop(sequence_id, None)
        if held is not None:
            holding.count(held, -1)
        return held

    def _make_room(self, peer: DraftPeer, needed: tuple[int, int, int]) -> bool:
        """Makes room for (sequences, tokens, features). Returns False if the peer itself would hold the most."""
        own = self._holdings.get(peer.peer_id, _Holding())
        own_share = self._share(map(add, own.used, needed))
        while self._share(map(sum, zip(needed, *(each.used for each in self._holdings.values()), strict=True))) > 1.0:
            largest = max(self._holdings.values(), key=lambda each: self._share(each.used), default=own)
            if self._share(largest.used) <= own_share:
                return False
            oldest = next(iter(largest.sequences.values()))
            self._on_displaced(oldest)
            self.close(oldest.peer, oldest.sequence_id)
        return True

    def _share(self, used: Iterable[int]) -> float:
        """Returns the used fraction of the scarcest resource."""
        return max(map(truediv, used, self._limits))


def _continues(tokens: HashedTokens, update: SequenceUpdate) -> bool:
    """Returns whether the update's tokens agree with the held ones and leave no gap."""
    num_overlapping = len(tokens) - update.start_length
    if not 0 <= num_overlapping <= len(update.token_ids):
        return False
    return tuple(tokens.token_ids[update.start_length :]) == update.token_ids[:num_overlapping]
