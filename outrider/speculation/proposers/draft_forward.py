"""The interface between a draft model or head and its proposer: a KV cache, and a forward that decides next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.features import Features, HeadRules
from outrider.speculation.path_tree import Decided


@dataclass(frozen=True, slots=True)
class PathRows:
    """One path's share of a forward: consecutive tokens, of which the last may be decided after."""

    token_ids: Sequence[int]  # at least one
    start_position: int  # of the first of them; KV of everything before is in the cache
    block_ids: Sequence[int]  # covers [0, start_position + len(token_ids)); of a head one less, and parallel rows
    sampling: object  # of the sequence: from `start`
    assumed_token_ids: tuple[int, ...] = ()  # of the path: count as generated, besides the committed
    num_decisions: int = 0  # 0: only compute KV; 1: decide the next token; n: and n - 1 runners-up
    wants_distribution: bool = False  # of the next token
    features: Features | None = None  # of a head: of the committed tokens
    num_committed: int = 0  # of a head: tokens; those from here on are fed with `states`, in place of features
    states: tuple[object, ...] = ()  # its own hidden states, one for each such token of `token_ids`


class DraftForward(Protocol):
    """The forward passes of a draft model (`ModelForward`) or of a head (`HeadForward`). One owner thread."""

    @property
    def head(self) -> HeadRules | None:
        """None: a model, which is fed with tokens alone."""

    @property
    def pool(self) -> BlockPool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def is_ready(self, start: SequenceStart) -> bool:
        """Whether the sequence can start: its constraint is compiled. If it can be, it soon will."""

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> object:
        """The sampling state of a sequence with these committed tokens."""

    def commit(self, sampling: object, token_ids: Sequence[int]) -> None:
        """Counts newly committed tokens."""

    def decide(self, rows: Sequence[PathRows], block_copies: Sequence[tuple[int, int]]) -> list[Decided]:
        """Copies blocks, then runs one forward pass. Returns the decisions of each element of `rows`, in order."""
