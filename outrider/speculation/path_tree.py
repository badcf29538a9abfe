"""The drafts of a draft model or head for one sequence: a main path after the committed tokens, and alternatives.

Torch-free: a path knows its tokens and its block table, not how tokens are decided.

The text follows the main path as long as the target decides like the draft model. When the target differs, its
likeliest choices are the runners-up of the draft model's race. An alternative assumes one of them.

A head has one row fewer than tokens. After each commit it drafts again, from the features of the committed tokens.
Until it has done so, the rest of the old main path is kept as the `stale_path`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.sampler import SequenceSampling
from outrider.speculation.acceptance_record import PRIOR_RUNNERS_UP, path_acceptance
from outrider.speculation.draft_stream import MAX_PROPOSAL_TOKENS, MAX_SIBLINGS, SequenceStart
from outrider.speculation.draft_tree import ROOT, DraftTree, num_common
from outrider.speculation.features import Features, HeadRules
from outrider.speculation.token_distribution import TokenDistribution, certain

NUM_GRADES = 4
"""Number of grades of a head's drafts, by its confidence in the first token; grade 0 is the most confident."""


class DraftedToken(NamedTuple):
    """A forward's decision at the position after one path."""

    token_ids: tuple[int, ...]  # the winner of the race, then its runners-up; empty: nothing was decided
    distribution: TokenDistribution | None = None  # the winner's distribution, if requested
    state: object = None  # a head's hidden state after the path: its input in the winner's row
    following: tuple[DraftedToken, ...] = ()  # decisions at later positions, by a parallel head or a rollout
    confidence: float = 1.0  # a head's probability of the likeliest token


@dataclass(slots=True, eq=False)
class DraftPath:
    """Tokens after the committed ones: first assumed tokens, then those that the draft model has decided."""

    kv: SequenceKV  # KV of committed and path tokens, as far as it has been computed
    decided: list[DraftedToken] = field(default_factory=list)  # one for each token
    num_assumed: int = 0  # number of assumed tokens; 0: the main path
    rank: int = 0  # rank of the runner-up that an alternative assumes
    num_sent: int = 0  # tokens sent to the decode node

    def __len__(self) -> int:
        """The number of tokens after the committed ones."""
        return len(self.decided)

    @property
    def token_ids(self) -> list[int]:
        return [each.token_ids[0] for each in self.decided]

    @property
    def num_decided(self) -> int:
        return len(self) - self.num_assumed

    @property
    def confidence(self) -> float:
        """The probability that the text goes through the whole path, estimated from the drafter's confidence."""
        return math.prod(each.confidence for each in self.decided)

    def cut_front(self, num_tokens: int) -> None:
        """Drops the first tokens, which have been committed, and counts the rest as not sent."""
        del self.decided[:num_tokens]
        self.num_assumed = max(0, self.num_assumed - num_tokens)
        self.num_sent = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """An alternative that could be opened: a runner-up in place of a token of the main path."""

    index: int  # index of the replaced token
    rank: int
    probability: float  # probability that the text goes through the token
    token_id: int  # the runner-up, or a draft token of another source


class PathTree:
    """The paths of one sequence, rooted at its committed tokens. Belongs to one thread.

    The KV of the main path is complete up to the newest token that was fed. Alternatives are copy-on-write forks of
    that KV, so common prefixes are computed and stored once.
    """

    def __init__(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        start: SequenceStart,
        *,
        max_model_len: int,
        sampling: SequenceSampling,
        head: HeadRules | None = None,
    ) -> None:
        """`kv` may hold a cached prefix of `token_ids`, but not the last token, whose logits begin the draft.

        `sampling`: the sequence's sampling state, made by `DraftForward.start`; it counts committed tokens.
        """
        self.start = start
        self.sampling = sampling
        self.features: Features | None = None  # a head's features of all committed tokens but the newest
        self.verified: Sequence[int] | None = None  # the draft that the target verifies now; None: not known
        self.acceptance = path_acceptance()  # acceptance at the committed positions for which a path had a token
        self.runner_up_chances = [path_acceptance(prior) for prior in PRIOR_RUNNERS_UP]
        self.main = DraftPath(kv)
        self.alternatives: list[DraftPath] = []
        self.stale_path: DraftPath | None = None  # a head's draft from before the last commit; it owns no KV
        self.num_wasted_tokens = 0  # decided tokens that were dropped and never committed
        self._head = head
        self._num_without_row = 0 if head is None else 1  # leading tokens
        # In rejection sampling a draft whose length depends on its tokens is biased, so drafts go on past a stop token.
        self._stop_token_ids = frozenset(() if start.wants_distributions else start.options.stop_token_ids)
        self._max_length = min(max_model_len, start.prompt_length + start.options.sampling.max_tokens)
        self.token_ids = list(token_ids)
        """The committed tokens; only this tree changes them."""
        self._source = token_ids

    def __len__(self) -> int:
        """The number of committed tokens."""
        return len(self.token_ids)

    @property
    def paths(self) -> Iterator[DraftPath]:
        yield self.main
        yield from self.alternatives

    # --- the root -------------------------------------------------------------------------

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        """Returns whether `token_ids` begins with the committed tokens. The last call's list does: it can only grow."""
        size = len(self)
        if len(token_ids) < size:
            return False
        return token_ids is self._source or list(token_ids[:size]) == self.token_ids

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Moves the root to the end of `token_ids`, which continue the committed tokens, and returns the new tokens.

        The first path that begins with the new tokens becomes the main one. Alternatives that begin with them are kept,
        without these tokens; other paths are freed. If no path begins with the new tokens, the KV of the longest common
        prefix is kept.
        """
        new = tuple(token_ids[len(self) :])
        self._source = token_ids
        if not new:
            return new
        self._learn(new)
        self.token_ids += new
        size = len(new)
        if self._head is not None:
            self._restart_draft(new)
            return new
        num_agreeing = [(num_common(path.token_ids, new), path) for path in self.paths]
        following = [path for num, path in num_agreeing if num == size]
        for num, path in num_agreeing:
            if num < size:
                self.num_wasted_tokens += path.num_decided - max(0, num - path.num_assumed)
        if not following:
            num, path = max(num_agreeing, key=lambda each: min(each[0], each[1].kv.num_tokens - len(self) + size))
            path.kv.truncate(min(path.kv.num_tokens, len(self) - size + num))
            path.decided = [DraftedToken((token_id,)) for token_id in new]
            following = [path]
        for path in self.paths:
            if path not in following:
                path.kv.free()
        for path in following:
            path.cut_front(size)
        self.main, *self.alternatives = following  # the main path is first; if it is gone, only one path is left
        self.main.num_assumed = 0
        return new

    def free(self) -> None:
        """Frees all KV."""
        for path in self.paths:
            self.num_wasted_tokens += path.num_decided
            path.kv.free()
        self.alternatives.clear()

    def free_alternative(self, path: DraftPath) -> None:
        self.alternatives.remove(path)
        self.num_wasted_tokens += path.num_decided
        path.kv.free()

    def best_path(self, *, allow_stale: bool) -> DraftPath:
        """Returns the path to send: the main one, followed by the rest of the stale path if both agree.

        For drawn drafts, the stale path is used only while the main path is empty. If the main path happened to draw
        the same token, this token would be verified against another distribution than it was first drawn from.
        """
        main, stale = self.main, self.stale_path
        if not allow_stale or stale is None or len(stale) <= len(main) or not self._is_stale_path_right(stale):
            return main
        return replace(main, decided=[*main.decided, *stale.decided[len(main) :]])

    def drop_wrong_stale_path(self) -> None:
        """Drops the stale path if it differs from the main path, which then counts as sent only up to that point."""
        main, stale = self.main, self.stale_path
        if stale is not None and not self._is_stale_path_right(stale):
            num_right = 0 if self.start.wants_distributions else num_common(main.token_ids, stale.token_ids)
            main.num_sent = min(main.num_sent, num_right)
            self.num_wasted_tokens += stale.num_decided
            self.stale_path = None

    # --- growth ---------------------------------------------------------------------------

    def first_missing(self, path: DraftPath) -> int:
        """Returns the position of the first of the `missing` tokens."""
        if self._num_fed(path) == self.max_fed(path):  # all tokens were fed, but without logits
            path.kv.truncate(path.kv.num_tokens - 1)
        return self._num_fed(path)

    def missing(self, path: DraftPath) -> Sequence[int]:
        """Returns the tokens that must be fed before the path's next token can be decided; at least one."""
        start = self.first_missing(path)
        if start >= len(self):
            return path.token_ids[start - len(self) :]
        return [*self.token_ids[start:], *path.token_ids]

    def num_missing(self, path: DraftPath) -> int:
        """Returns the number of `missing` tokens."""
        return len(self) + len(path) - min(self._num_fed(path), self.max_fed(path) - 1)

    def max_fed(self, path: DraftPath) -> int:
        """Returns the length of the longest prefix of the path whose rows stay in the KV cache after a forward."""
        keeps_own_rows = self._head is None or self._head.keeps_own_rows
        return len(self) + len(path) * keeps_own_rows

    @property
    def num_behind(self) -> int:
        """The number of committed tokens that have not been fed to the main path."""
        return max(0, len(self) - self._num_fed(self.main))

    @property
    def max_path_rows(self) -> int:
        """Maximum missing rows of a path that still drafts; higher for a head, because it rereads committed tokens."""
        return 1 if self._head is None else 1 + MAX_PROPOSAL_TOKENS

    def rows_before(self, position: int) -> int:
        """Returns the number of rows in the KV cache for the tokens before this position."""
        return position - self._num_without_row

    def is_complete(self, path: DraftPath) -> bool:
        """Returns whether a path ends with a stop token, or has the maximum length or the head's maximum depth."""
        return self.num_left_of(path) <= 0 or (bool(path) and path.decided[-1].token_ids[0] in self._stop_token_ids)

    def num_left_of(self, path: DraftPath) -> int:
        """Returns by how many tokens a path can still grow, given the maximum length and the head's maximum depth."""
        return min(self.num_left, self._max_own_rows + 1) - len(path)

    @property
    def num_left(self) -> int:
        """The number of tokens until the maximum length."""
        return self._max_length - len(self)

    def probability(self, path: DraftPath, num_tokens: int) -> float:
        """Returns the probability of the path's first `num_tokens` tokens, which must include all assumed ones."""
        after = float(self.acceptance.mean ** (num_tokens - path.num_assumed))
        return after * (self._probability_of(path.num_assumed - 1, path.rank) if path.num_assumed else 1.0)

    def openings(self, num_positions: int, *, verified: int | None = None) -> list[Opening]:
        """Returns alternatives to the main path's first tokens that are not open yet, the likeliest first.

        `verified`: a token that the target verifies at the last of these positions instead, which comes first.
        """
        num_forkable = self._num_fed(self.main) - len(self) + 1  # an alternative needs the KV before the replaced token
        if self._head is not None and self._head.drafts_blocks and num_forkable > 0:
            num_forkable = len(self.main)  # an alternative of a parallel head feeds all its rows itself
        last, token_ids = num_positions - 1, self.main.token_ids
        taken = {tuple(path.token_ids[: path.num_assumed]) for path in self.alternatives}
        openings = [
            Opening(index, rank, self._probability_of(index, rank), token_id)
            for index, decided in enumerate(self.main.decided[: min(num_positions, num_forkable, self._max_own_rows)])
            for rank, token_id in enumerate(decided.token_ids[1:])
            if (index, token_id) != (last, verified)
        ]
        openings.sort(key=lambda opening: -opening.probability)
        if verified is not None and last < min(num_forkable, self._max_own_rows):
            openings.insert(0, Opening(last, 0, float(self.acceptance.mean**num_positions), verified))
        return [each for each in openings if (*token_ids[: each.index], each.token_id) not in taken]

    def open(self, opening: Opening) -> DraftPath:
        """Opens an alternative on a fork of the main path's KV, without a forward."""
        main, index = self.main, opening.index
        kv = main.kv.fork()
        kv.truncate(min(kv.num_tokens, self.rows_before(len(self) + index)))
        assumed = [*main.token_ids[:index], opening.token_id]
        # A runner-up has the state of the winner that it replaces.
        decided = [
            DraftedToken((token_id,), state=each.state) for token_id, each in zip(assumed, main.decided, strict=False)
        ]
        path = DraftPath(kv, decided, num_assumed=len(assumed), rank=opening.rank)
        self.alternatives.append(path)
        return path

    def proposed(self, path: DraftPath, start: int, end: int) -> DraftTree:
        """Returns a draft of the path's tokens [start, end), whose prefix includes the path's tokens before `start`."""
        length, probability = len(self) + start, self.probability(path, start)
        grade = min(int((1.0 - path.decided[start].confidence) * NUM_GRADES), NUM_GRADES - 1) if start < end else 0
        if self.start.takes_siblings:  # runners-up are sent as well
            token_ids, parents = self.with_siblings(path, start, end)
            return DraftTree(length, token_ids=token_ids, probability=probability, parents=parents, grade=grade)
        decided = path.decided[start:end]
        drawn = decided if self.start.wants_distributions else ()
        return DraftTree(
            length,
            token_ids=tuple(each.token_ids[0] for each in decided),
            probability=probability,
            distributions=tuple(each.distribution or certain(each.token_ids[0]) for each in drawn),
            grade=grade,
        )

    def with_siblings(self, path: DraftPath, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Joins the path's tokens [start, end) with runners-up of the race as their siblings.

        Returns ids and parents as in DraftTree, in the order of their probability.
        """
        acceptance = self.acceptance.mean
        chances = [each.mean for each in self.runner_up_chances]
        reached = -1.0  # negated probability that the text follows the path up to this place
        # Negated probability, place on the path, rank, id. So tuples sort as tokens do: no token is likelier than its
        # parent, which comes first if they are equally likely.
        on_path: list[tuple[float, int, int, int]] = []
        siblings: list[tuple[float, int, int, int]] = []
        for place, decided in enumerate(path.decided[start:end]):
            missed = reached * (1.0 - acceptance)
            reached *= acceptance
            for rank, token_id in enumerate(decided.token_ids):
                probability = missed * chances[rank - 1] if rank else reached
                (siblings if rank else on_path).append((probability, place, rank, token_id))
        if not siblings:
            return tuple([token_id for *_, token_id in on_path]), ()
        tokens = sorted(on_path + sorted(siblings)[:MAX_SIBLINGS])
        indices = {place: index for index, (_, place, rank, _) in enumerate(tokens) if not rank}
        parents = tuple([indices.get(place - 1, ROOT) for _, place, _, _ in tokens])
        return tuple([token_id for *_, token_id in tokens]), parents

    # --- inside ---------------------------------------------------------------------------

    def _is_stale_path_right(self, stale: DraftPath) -> bool:
        if self.start.wants_distributions:
            return not self.main
        return num_common(self.main.token_ids, stale.token_ids) == min(len(self.main), len(stale))

    @property
    def _max_own_rows(self) -> int:
        limit = None if self._head is None else self._head.max_own_rows
        return self._max_length if limit is None else limit

    def _num_fed(self, path: DraftPath) -> int:
        """Returns the length of the prefix that was fed to the drafter."""
        num_fed = path.kv.num_tokens + self._num_without_row
        if self._head is not None and not self._head.keeps_kv:  # earlier tokens leave no state and need not be fed
            num_fed = max(num_fed, len(self) - 1)
        return num_fed

    def _restart_draft(self, new: Sequence[int]) -> None:
        """Drafts again after a commit of `new`. If a path begins with `new`, its rest becomes the stale path."""
        size, stale = len(new), None
        for path in (*self.paths, *((self.stale_path,) if self.stale_path else ())):
            num_agreeing = num_common(path.token_ids, new)
            self.num_wasted_tokens += path.num_decided - max(0, num_agreeing - path.num_assumed)
            if stale is None and num_agreeing == size < len(path) and path.num_assumed <= size:
                self.num_wasted_tokens -= len(path) - size
                stale = path
        for path in self.alternatives:
            path.kv.free()
        kv = self.main.kv
        kv.truncate(min(kv.num_tokens, self.rows_before(len(self) - size)))
        if stale is not None:
            stale.cut_front(size)
        self.main, self.alternatives, self.stale_path = DraftPath(kv), [], stale

    def _probability_of(self, index: int, rank: int) -> float:
        acceptance = self.acceptance.mean
        return float(acceptance**index) * (1.0 - acceptance) * self.runner_up_chances[rank].mean

    def _learn(self, new: Sequence[int]) -> None:
        """Updates the estimates with the committed tokens, up to the first token that is on no path."""
        path = self.best_path(allow_stale=True)
        for index, token_id in enumerate(new):
            if index >= len(path):
                return
            decided, *runners_up = path.decided[index].token_ids
            if decided == token_id:
                self.acceptance.observe(1, 1)
                continue
            self.acceptance.observe(1, 0)
            for rank, chance in enumerate(self.runner_up_chances):
                chance.observe(1, rank < len(runners_up) and runners_up[rank] == token_id)
            following = next((p for p in self.alternatives if p.token_ids[: index + 1] == list(new[: index + 1])), None)
            if following is None:
                return
            path = following
