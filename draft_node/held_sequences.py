"""The committed tokens that decode nodes have sent, and whether they can be trusted to be complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.speculation.draft_stream import DraftHello, DraftStatus, SequenceStart, SequenceUpdate
from outrider.speculation.prefix_hash import HashedTokens

SequenceName = tuple[int, int]  # (peer, the peer's sequence id)


@dataclass(slots=True)
class HeldSequence:
    """One sequence as the draft node knows it."""

    key: int  # its name toward the proposer; never used twice
    name: SequenceName
    start: SequenceStart
    tokens: HashedTokens
    num_wanted: int = 0
    verified_by: float = 0.0  # clock seconds: until then its target verifies what was answered
    num_branches_left: int = 0  # ahead, until the next update


class HeldSequences:
    """Applies updates, checked by prefix hash. Confined to the draft loop's thread."""

    def __init__(self, *, max_sequences: int, on_forgotten: Callable[[int], None]) -> None:
        self._max_sequences = max_sequences
        self._on_forgotten = on_forgotten
        self._held: dict[SequenceName, HeldSequence] = {}
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(self._held.values())

    def get(self, name: SequenceName) -> HeldSequence | None:
        return self._held.get(name)

    def apply(self, peer: int, hello: DraftHello, update: SequenceUpdate) -> HeldSequence | DraftStatus:
        """Takes the newest state over. The sequence on success; else why not, and it is forgotten if it was wrong."""
        name = (peer, update.sequence_id)
        if update.length != update.start_length + len(update.token_ids) or not update.length:
            return self._refuse(name, DraftStatus.NO_ROOM)
        if update.length > hello.max_model_len or any(token_id >= hello.vocab_size for token_id in update.token_ids):
            return self._refuse(name, DraftStatus.NO_ROOM)
        held = self._held.get(name)
        if held is None or not _extend(held.tokens, update):
            if update.start_length != 0 or update.start is None:
                return self._refuse(name, DraftStatus.UNKNOWN_PREFIX)
            held = self._begin(name, update, update.start)
            if held is None:
                return DraftStatus.NO_ROOM
        if held.tokens.hash != update.prefix_hash or len(held.tokens) != update.length:
            return self._refuse(name, DraftStatus.UNKNOWN_PREFIX)
        held.num_wanted = update.num_wanted
        return held

    def close(self, name: SequenceName) -> None:
        """Forgets a sequence; an unknown one is fine."""
        self._drop(name)

    def close_peer(self, peer: int) -> None:
        """Forgets all of a decode node's sequences."""
        for name in [name for name in self._held if name[0] == peer]:
            self.close(name)

    def _begin(self, name: SequenceName, update: SequenceUpdate, start: SequenceStart) -> HeldSequence | None:
        self._drop(name)
        if len(self._held) >= self._max_sequences:
            return None
        held = HeldSequence(self._next_key, name, start, HashedTokens(update.token_ids))
        self._next_key += 1
        self._held[name] = held
        return held

    def _refuse(self, name: SequenceName, refusal: DraftStatus) -> DraftStatus:
        self._drop(name)
        return refusal

    def _drop(self, name: SequenceName) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._on_forgotten(held.key)


def _extend(tokens: HashedTokens, update: SequenceUpdate) -> bool:
    """Adds what is new in the update. False when it does not continue what is held."""
    num_overlapping = len(tokens) - update.start_length
    if num_overlapping < 0 or num_overlapping > len(update.token_ids):
        return False
    if tuple(tokens.token_ids[update.start_length :]) != update.token_ids[:num_overlapping]:
        return False
    tokens.extend(update.token_ids[num_overlapping:])
    return True
