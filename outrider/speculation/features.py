"""What a head is fed with besides tokens, and how it drafts, other than a model does. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.engine.arrays import Array


class Features(Protocol):
    """The target's features of one sequence (see outrider.engine.feature_spec), which a head is fed with."""

    def __len__(self) -> int:
        """Tokens whose features are there, from the first on: at most all but the newest committed one."""

    def read(self, start: int, end: int) -> Array:
        """Those of tokens [start, end): [end - start, width], an array of numpy (see WORDS) or a tensor."""


@dataclass(frozen=True, slots=True)
class HeadRules:
    """A token is fed with the feature of the token before it: the first token of a text has no row.

    Features come with committed tokens; until then the head is fed with its own hidden states, and these rows are
    computed anew.
    """

    keeps_kv: bool = True  # else a row sees nothing but its state
    max_own_rows: int | None = None  # that one path feeds with own states; None: any number
    num_parallel_rows: int = 0  # after those of a path, in a forward that decides; they need places in the cache
