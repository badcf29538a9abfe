"""A smaller model with the target's vocabulary drafts, by the same race on its own logits.

Source: Leviathan et al. 2022; coupled by Daliri, Musco, Suresh 2024 (arXiv 2408.07978):
the same luck on both sides makes draft and target agree far more often than independent
draws would. Drafting on while the target verifies: SSD (2026), PEARL (arXiv 2408.11850).

Torch-free: what needs the model is behind `DraftForward`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.kv_cache.block_pool import NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.speculation.catch_up_budget import CatchUpBudget
from outrider.speculation.draft_stream import SequenceStart, most_tokens_offered
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.path_choice import AheadRow, by_worth, rows_of
from outrider.speculation.path_estimates import NUM_RUNNERS_UP
from outrider.speculation.path_tree import DraftPath, Opening, PathTree
from outrider.speculation.proposers.base import AheadBranch, Progress, Proposal, ProposalRequest
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows
from outrider.speculation.row_budget import RowBudget

NUM_EXTRA_TOKENS = 2
"""A draft forward costs time, so few are spent on tokens that only a later step can use."""

LEAST_GAIN = 0.03
"""Tokens that a branch has to be expected to win beyond what was told of it, to be sent before it is complete."""

SHARE_BESIDE_ANSWERS = 0.25
"""A forward with tokens that were asked for may take longer by this share for what nobody has asked for yet."""

SHARE_ALONE = 1.0
"""The same for a forward without, against the smallest."""


@dataclass(slots=True)
class _Drafted:
    """What is remembered of one sequence: a cache keyed by tokens."""

    tree: PathTree
    start: SequenceStart
    sampling: object  # counts the committed tokens

    def max_length(self, max_model_len: int) -> int:
        return min(max_model_len, self.start.prompt_length + self.start.params.max_tokens)


@dataclass(frozen=True, slots=True)
class _Row:
    """One path's share of the forward that is being put together."""

    drafted: _Drafted
    path: DraftPath
    rows: PathRows


@dataclass(slots=True)
class _Round:
    """One call of `propose`: at most one forward."""

    drafted: list[_Drafted | None]  # of each request; None: the model cannot serve it
    rows: list[_Row]
    copies: list[tuple[int, int]]
    behind: set[int]  # sequences whose prefix needs another call
    no_room: set[int]  # sequences whose draft ends here, for want of a block
    looking_ahead: set[int]  # sequences for which there was something worth drafting


class DraftModelProposer:
    """Ragged batches over the draft model's own paged KV cache. One owner thread.

    A call makes one forward. Its rows are, first, those of drafts that somebody waits for: what their prefix lacks,
    within the budget for catching up, the shortest remainders first, then one token a draft. What is left of its time
    goes to the look-ahead. A draft that is here, because the committed tokens followed a path, needs no forward.
    """

    def __init__(
        self,
        forward: DraftForward,
        *,
        model_name: str,
        vocabulary_fingerprint: str,
        catch_up_tokens_per_step: int = 512,
        catch_up_seconds: float = math.inf,
        description: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert catch_up_tokens_per_step >= 1
        self._forward = forward
        self._model_name = model_name
        self._vocabulary_fingerprint = vocabulary_fingerprint
        self._description = dict(description or {})
        self._catch_up = CatchUpBudget(max_rows=catch_up_tokens_per_step, seconds=catch_up_seconds)
        self._clock = clock
        self._budget = RowBudget()  # by forwards of one row a path
        self._sequences: dict[int, _Drafted] = {}  # least recently used first
        self._num_wasted_tokens = 0  # of sequences that are gone

    @property
    def name(self) -> str:
        return f"draft_model:{self._model_name}"

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._vocabulary_fingerprint

    @property
    def description(self) -> Mapping[str, Any]:
        return self._description

    @property
    def num_extra_tokens(self) -> int:
        return NUM_EXTRA_TOKENS

    @property
    def can_look_ahead(self) -> bool:
        return True

    @property
    def num_wasted_tokens(self) -> int:
        return self._num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, after at most one forward."""
        now = _Round([self._find(request) for request in requests], [], [], set(), set(), set())
        served = [(request, drafted) for request, drafted in zip(requests, now.drafted, strict=True) if drafted]
        waiting = [(request, drafted) for request, drafted in served if not request.looks_ahead]
        if not any(self._is_drafted(request, drafted) for request, drafted in waiting):
            self._plan_answers(now, waiting)
            self._plan_look_ahead(now, [(request, drafted) for request, drafted in served if request.looks_ahead])
            self._run(now)
        return [self._proposal(now, request, drafted) for request, drafted in zip(requests, now.drafted, strict=True)]

    def forget(self, sequence_id: int) -> None:
        """Frees KV and state of a sequence; an unknown one is fine."""
        drafted = self._sequences.pop(sequence_id, None)
        if drafted is not None:
            drafted.tree.free()
            self._count_waste(drafted)

    def check_integrity(self) -> None:
        """Raises InternalError unless the pool's blocks are exactly those of the paths."""
        self._forward.pool.check_integrity(
            [path.kv.block_ids for drafted in self._sequences.values() for path in drafted.tree.paths]
        )

    # --- sequences ------------------------------------------------------------------------

    def _find(self, request: ProposalRequest) -> _Drafted | None:
        """Fits what is remembered to the request's tokens. None: this model cannot serve it."""
        token_ids = request.token_ids
        drafted = self._sequences.get(request.sequence_id)
        if drafted is not None and not drafted.tree.is_continued_by(token_ids):
            self.forget(request.sequence_id)
            drafted = None
        new = token_ids if drafted is None else token_ids[len(drafted.tree) :]
        too_long = len(token_ids) + request.num_wanted > self._forward.max_model_len
        if request.start is None or not token_ids or too_long or max(new, default=0) >= self._forward.vocab_size:
            return None
        if drafted is None:
            # The last token is always computed: its logits begin the draft.
            kv = SequenceKV.create(
                self._forward.pool,
                token_ids,
                max_cached_tokens=len(token_ids) - 1,
                cache_salt=request.start.cache_salt,
            )
            start = request.start
            tree = PathTree(kv, token_ids, stop_token_ids=start.stop_token_ids, with_siblings=start.takes_siblings)
            drafted = _Drafted(tree, request.start, self._forward.start(request.start, token_ids))
        else:
            self._follow(drafted, token_ids)
            del self._sequences[request.sequence_id]  # goes to the end: used last
        self._sequences[request.sequence_id] = drafted
        return drafted

    def _follow(self, drafted: _Drafted, token_ids: Sequence[int]) -> None:
        is_past_prompt = len(drafted.tree) >= drafted.start.prompt_length  # the rest of a prompt was not generated
        new = drafted.tree.follow(token_ids)
        self._count_waste(drafted)
        if new and is_past_prompt:
            self._forward.commit(drafted.sampling, new)
        elif new:
            drafted.sampling = self._forward.start(drafted.start, token_ids)

    def _count_waste(self, drafted: _Drafted) -> None:
        self._num_wasted_tokens += drafted.tree.num_wasted_tokens
        drafted.tree.num_wasted_tokens = 0

    def _is_drafted(self, request: ProposalRequest, drafted: _Drafted) -> bool:
        """Whether there is an answer: the whole draft, or its first token if the rest may follow by look-ahead."""
        tree, main = drafted.tree, drafted.tree.main
        if request.num_wanted <= 0:
            return main.kv.num_tokens >= len(tree)
        return len(main.token_ids) >= (1 if request.max_alternatives else request.num_wanted) or (
            bool(main.token_ids) and tree.is_over(main, max_length=drafted.max_length(self._forward.max_model_len))
        )

    # --- planning -------------------------------------------------------------------------

    def _plan_answers(self, now: _Round, waiting: Sequence[tuple[ProposalRequest, _Drafted]]) -> None:
        """Rows of the main paths that somebody waits for, the shortest remainders first."""
        busy = [drafted for _, drafted in waiting]
        budget = self._catch_up.num_rows
        for request, drafted in sorted(waiting, key=lambda each: each[1].tree.num_missing(each[1].tree.main)):
            tree, main = drafted.tree, drafted.tree.main
            num_missing = tree.num_missing(main) if request.num_wanted > 0 else len(tree) - main.kv.num_tokens
            is_draft = num_missing == 1 and bool(main.token_ids)
            num_rows = num_missing if is_draft else min(num_missing, budget)
            if num_rows < num_missing:
                now.behind.add(request.sequence_id)
            if num_rows == 0:
                continue
            num_decisions = 0
            if request.num_wanted > 0 and num_rows == num_missing:
                tells_runners_up = request.max_alternatives or drafted.start.takes_siblings
                num_decisions = 1 + (NUM_RUNNERS_UP if tells_runners_up else 0)
            if self._add(now, drafted, main, num_rows=num_rows, num_decisions=num_decisions, evicts_beside=busy):
                budget -= 0 if is_draft else num_rows
            else:
                now.no_room.add(request.sequence_id)

    def _plan_look_ahead(self, now: _Round, ahead: Sequence[tuple[ProposalRequest, _Drafted]]) -> None:
        """The likeliest tokens of all sequences whose target verifies, as many as cost little."""
        candidates: list[AheadRow] = []
        drafted_by_tree: dict[int, _Drafted] = {}
        for request, drafted in ahead:
            rows = rows_of(
                drafted.tree,
                owner=request.owner,
                num_wanted=request.num_wanted,
                max_alternatives=request.max_alternatives,
                max_length=drafted.max_length(self._forward.max_model_len),
            )
            if rows:
                now.looking_ahead.add(request.sequence_id)
                drafted_by_tree[id(drafted.tree)] = drafted
                candidates += rows
        wanted = [row for row in candidates if row.is_wanted]
        for row in wanted:
            self._add_ahead(now, drafted_by_tree[id(row.tree)], row)
        num_left = self._budget.num_more(len(now.rows), share=SHARE_BESIDE_ANSWERS if now.rows else SHARE_ALONE)
        for row in by_worth(row for row in candidates if not row.is_wanted):
            if num_left <= 0:
                break
            num_left -= self._add_ahead(now, drafted_by_tree[id(row.tree)], row)
        if not now.rows:
            now.looking_ahead.clear()  # there is no block for any: asking again would not help

    def _add_ahead(self, now: _Round, drafted: _Drafted, row: AheadRow) -> bool:
        """False: there is no block for it."""
        tree = row.tree
        path = tree.open(row.path) if isinstance(row.path, Opening) else row.path
        is_added = self._add(now, drafted, path, num_rows=1, num_decisions=1 + NUM_RUNNERS_UP)
        if not is_added and isinstance(row.path, Opening):
            tree.free_alternative(path)
        return is_added

    def _add(
        self,
        now: _Round,
        drafted: _Drafted,
        path: DraftPath,
        *,
        num_rows: int,
        num_decisions: int,
        evicts_beside: Sequence[_Drafted] | None = None,
    ) -> bool:
        """Puts the path's next rows into the forward. False: there is no block for them.

        `evicts_beside`: others than these lose their KV if it is needed; None: nobody does.
        """
        tree = drafted.tree
        missing = tree.missing(path)[:num_rows]
        start = path.kv.num_tokens
        while True:
            try:
                now.copies += path.kv.reserve(start + num_rows)
                break
            except NoFreeBlocksError:
                if evicts_beside is None or not self._evict(now, evicts_beside):
                    return False
        rows = PathRows(
            missing,
            start,
            path.kv.block_table(),
            drafted.sampling,
            tuple(path.token_ids),
            num_decisions,
            drafted.start.wants_distributions,
        )
        now.rows.append(_Row(drafted, path, rows))
        return True

    def _evict(self, now: _Round, busy: Iterable[_Drafted]) -> bool:
        """Frees blocks: alternatives first, then the KV of the sequence that was used least recently."""
        planned = {id(row.path) for row in now.rows}
        for drafted in self._sequences.values():
            for path in drafted.tree.alternatives:
                if id(path) not in planned:
                    drafted.tree.free_alternative(path)
                    return True
        in_use = {id(drafted) for drafted in busy}
        for drafted in self._sequences.values():
            if id(drafted) not in in_use and drafted.tree.main.kv.block_ids:
                drafted.tree.main.kv.free()
                return True
        return False

    # --- the forward ----------------------------------------------------------------------

    def _run(self, now: _Round) -> None:
        if not now.rows:
            return
        started = self._clock()
        try:
            decided = self._forward.decide([row.rows for row in now.rows], now.copies)
        except Exception:
            self._give_up_copies(now)
            raise
        num_rows, seconds = sum(len(row.rows.token_ids) for row in now.rows), self._clock() - started
        budget = self._budget if num_rows == len(now.rows) else self._catch_up
        budget.observe(num_rows, seconds)
        for row, outcome in zip(now.rows, decided, strict=True):
            kv = row.path.kv
            kv.advance(row.rows.start_position + len(row.rows.token_ids))
            if outcome.token_ids:
                row.path.append(outcome.token_ids[0], outcome.token_ids[1:], outcome.distribution)
            if row.path is row.drafted.tree.main:
                kv.publish(row.drafted.tree.token_ids)

    def _give_up_copies(self, now: _Round) -> None:
        """The forward has failed: blocks that it should have copied may hold nothing, and are computed again."""
        destinations = {destination for _, destination in now.copies}
        for kv in (row.path.kv for row in now.rows):
            if not destinations.isdisjoint(kv.block_ids):  # the last one with valid tokens: only that is ever copied
                kv.truncate(kv.num_tokens - kv.num_tokens % self._forward.pool.block_size)

    def _proposal(self, now: _Round, request: ProposalRequest, drafted: _Drafted | None) -> Proposal:
        length = len(request.token_ids)
        if drafted is None:
            return Proposal(sequence_id=request.sequence_id, tree=DraftTree(length))
        if request.looks_ahead:
            return Proposal(
                sequence_id=request.sequence_id,
                tree=DraftTree(length),
                ahead=tuple(self._due(request, drafted)),
                may_go_on=request.sequence_id in now.looking_ahead,
            )
        main = drafted.tree.main
        progress = Progress.DRAFTING
        if request.sequence_id in now.no_room or self._is_drafted(request, drafted):
            progress = Progress.DONE
        elif request.sequence_id in now.behind:
            progress = Progress.CATCHING_UP
        num_offered = 0
        if progress is Progress.DONE:
            main.num_sent = num_offered = min(len(main.token_ids), request.num_wanted)
        return Proposal(
            sequence_id=request.sequence_id,
            tree=DraftTree(length, **drafted.tree.proposed(main, 0, num_offered)),
            progress=progress,
            num_computed=main.kv.num_tokens if progress is Progress.CATCHING_UP else 0,
        )

    def _due(self, request: ProposalRequest, drafted: _Drafted) -> Iterator[AheadBranch]:
        """Paths that have grown to twice of what was told of them, if that wins enough, or to their end."""
        tree, num_wanted = drafted.tree, request.num_wanted
        max_length = drafted.max_length(self._forward.max_model_len)
        for path in tree.paths:
            # The main path has two drafts: what is verified now, and after one more token the next.
            is_next = path is tree.main and len(path.token_ids) > num_wanted + 1
            num_before = num_wanted + 1 if is_next else path.num_assumed
            size, told = len(path.token_ids) - num_before, max(0, path.num_sent - num_before)
            is_complete = size >= num_wanted or tree.is_over(path, max_length=max_length)
            if size <= told or (told >= num_wanted) or not (is_complete or size >= 2 * told):
                continue
            estimates = tree.estimates
            gain = tree.probability(path, num_before) * (estimates.tokens_won(size) - estimates.tokens_won(told))
            if is_complete or gain >= LEAST_GAIN:
                path.num_sent = len(path.token_ids)
                # The main path begins earlier if there is room, for a target that verifies less than it asked for.
                most = most_tokens_offered(num_wanted)
                start = path.num_assumed or min(num_before, max(0, len(path.token_ids) - most))
                yield AheadBranch(
                    assumed_token_ids=tuple(path.token_ids[:start]),
                    probability=tree.probability(path, start),
                    **tree.proposed(path, start, min(start + most, len(path.token_ids))),
                )
