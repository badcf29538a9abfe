"""The features that a head takes as input along with tokens, and the rules for its rows. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.engine.arrays import Array


class Features(Protocol):
    """The target's features of one sequence (see outrider.engine.feature_spec), the input of a head."""

    def __len__(self) -> int:
        """The number of leading tokens that have features: at most all committed tokens but the newest."""

    def read(self, start: int, end: int) -> Array:
        """Returns the features of tokens [start, end): [end - start, width], a numpy array (see WORDS) or a tensor."""


@dataclass(frozen=True, slots=True)
class HeadRules:
    """How a head is fed. Each token's row needs the feature of the token before, so a text's first token has no row.

    Only committed tokens have features. The rows of tokens after them get the head's own hidden states instead, and are
    recomputed once these tokens are committed.
    """

    keeps_kv: bool = True  # whether the head has KV; if not, a row depends only on its own token and input
    keeps_own_rows: bool = True  # whether rows of uncommitted tokens leave KV; if not, each forward repeats them
    max_own_rows: int | None = None  # maximum number of a path's rows with the head's own states; None: no limit
    num_parallel_rows: int = 0  # rows after a path's rows in a forward that decides tokens; they need room in the cache
    drafts_blocks: bool = False  # whether a forward decides several tokens, whose rows it does not feed
