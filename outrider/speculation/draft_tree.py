"""One draft, from the proposer that made it to the verdict on it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.speculation.token_distribution import TokenDistribution


class DraftSource(enum.Enum):
    """Who has made a draft, as far as its acceptance is counted apart."""

    DRAFT_NODE = "draft_node"
    FALLBACK = "fallback"  # the decode node's own proposer


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens proposed after the first `length` tokens of a text; a chain: each token follows the one before it."""

    length: int
    prefix_hash: int | None = None  # of those first tokens; None: the draft has not left its proposer's process
    token_ids: tuple[int, ...] = ()
    source: DraftSource = DraftSource.DRAFT_NODE
    probability: float = 1.0  # the proposer's estimate that the text begins with those first tokens
    distributions: tuple[TokenDistribution, ...] = ()  # what each token was drawn from; empty: each was certain

    def __len__(self) -> int:
        """Tokens proposed."""
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> DraftTree:
        """At most the first `num_tokens` of them."""
        if len(self.token_ids) <= num_tokens:
            return self
        return replace(self, token_ids=self.token_ids[:num_tokens], distributions=self.distributions[:num_tokens])

    def after(self, token_ids: Sequence[int]) -> DraftTree | None:
        """What is proposed after `token_ids`, of which the first `length` are known to be the draft's prefix.

        None: the text went on otherwise, or past the draft.
        """
        num_since = len(token_ids) - self.length
        if num_since == 0:
            return self
        if num_since >= len(self.token_ids) or tuple(token_ids[self.length :]) != self.token_ids[:num_since]:
            return None
        return DraftTree(
            len(token_ids),
            None,
            self.token_ids[num_since:],
            self.source,
            distributions=self.distributions[num_since:],
        )
