"""Drafts with a smaller model of the target's vocabulary, or with a head, by running the target's race on its logits.

Sources: Leviathan et al. 2022. Coupling: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); with the same random words on
both sides, draft and target agree far more often than with independent draws. Drafting while the target verifies: SSD
(2026), PEARL (arXiv 2408.11850).

Torch-free: the model itself is behind `DraftForward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from outrider.engine.kv_cache.block_pool import NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.speculation.acceptance_record import NUM_RUNNERS_UP
from outrider.speculation.draft_stream import MAX_BRANCH_TOKENS, max_offered_tokens
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.path_choice import AheadRow, candidate_rows, num_verified, round_robin
from outrider.speculation.path_tree import DraftPath, Opening, PathTree
from outrider.speculation.proposers.base import (
    MAX_SEQUENCES,
    AheadBranch,
    Progress,
    Proposal,
    ProposalRequest,
    ProposerInfo,
    nothing,
)
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows, Plan, add_decided
from outrider.speculation.row_budget import MAX_ROWS, RowBudget

NUM_EXTRA_TOKENS = 2
"""Number of tokens drafted beyond num_wanted; few, because each costs a forward and is used only in a later step."""

MAX_CATCH_UP_ROWS = 512
"""Maximum number of prefix rows in one forward, because more would cost more than they gain. The shortest prefixes come
first."""

FIRST_SHARE = 0.25
"""Fraction of a forward's prefix rows that is kept for the request that has waited longest."""

CATCH_UP_SECONDS = 0.1
"""Intended seconds of a forward that computes prefixes. It is short, as the drafts of other sequences wait for it."""

MAX_FORWARD_LOGITS = MAX_SEQUENCES + MAX_ROWS
MAX_FORWARD_ROWS = MAX_FORWARD_LOGITS + MAX_CATCH_UP_ROWS
"""Maximum number of rows in a forward: a draft token for each sequence, the look-ahead, and prefixes."""

MIN_GAIN = 0.03
"""An incomplete branch is sent only if its unsent tokens are expected to gain at least this number of tokens."""

SHARE_WITH_ANSWERS = 0.25
"""Fraction by which look-ahead may lengthen a forward that computes answers."""

SHARE_ALONE = 1.0
"""Fraction by which a forward that computes only look-ahead may take longer than the smallest forward."""


class DraftModelProposer:
    """Computes ragged batches over the draft model's own paged KV cache. One thread owns it.

    A call makes one forward, which a rollout may follow (`outrider.engine.rollouts`; on a CPU `NativeHeadSteps`). Its
    first rows are those of unanswered updates: missing prefixes within the catch-up budget, shortest first, then one
    token for each draft. The remaining time is used for the look-ahead. If the committed tokens followed a path, the
    rest of the path is a draft that needs no forward.
    """

    def __init__(
        self,
        forward: DraftForward,
        info: ProposerInfo,
        *,
        max_catch_up_rows: int = MAX_CATCH_UP_ROWS,
        catch_up_seconds: float = CATCH_UP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`info`: the proposer's properties; the number of extra tokens and the look-ahead are set here."""
        assert max_catch_up_rows >= 1
        self._forward = forward
        self._head = forward.head
        self._drafts_blocks = self._head is not None and self._head.drafts_blocks
        can_look_ahead = self._head is None or self._head.max_own_rows != 0
        self.info = replace(info, num_extra_tokens=NUM_EXTRA_TOKENS, can_look_ahead=can_look_ahead)
        self._budget = RowBudget(max_prefix_rows=max_catch_up_rows, prefix_seconds=catch_up_seconds)
        self._clock = clock
        self._skipped_forward = False  # whether the last call skipped the forward to answer some requests at once
        self._trees: dict[int, PathTree] = {}  # by sequence, least recently used first
        self.num_wasted_tokens = 0

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, after at most one forward and a rollout."""
        plan = Plan()
        trees = [self._tree(request) for request in requests]
        served = [(request, tree) for request, tree in zip(requests, trees, strict=True) if tree]
        waiting = [(request, tree) for request, tree in served if not request.looks_ahead]
        undrafted = [(request, tree) for request, tree in waiting if not self._has_answer(request, tree)]
        # Requests that need no forward are answered at once, unless others were passed over in the last call.
        self._skipped_forward = len(undrafted) < len(waiting) and not (undrafted and self._skipped_forward)
        if not self._skipped_forward:
            self._plan_answers(plan, undrafted)
            if len(waiting) < len(served):
                self._plan_look_ahead(plan, [(request, tree) for request, tree in served if request.looks_ahead])
            self._run(plan)
        return [self._proposal(plan, request, tree) for request, tree in zip(requests, trees, strict=True)]

    def forget(self, sequence_id: int) -> None:
        tree = self._trees.pop(sequence_id, None)
        if tree is not None:
            tree.free()
            self._count_waste(tree)

    def _tree(self, request: ProposalRequest) -> PathTree | None:
        """Returns the request's paths, rooted at its newest token, or None if the model cannot serve it (yet)."""
        token_ids, start = request.token_ids, request.start
        tree = self._trees.get(request.sequence_id)
        if tree is not None and not tree.is_continued_by(token_ids):
            self.forget(request.sequence_id)
            tree = None
        new = token_ids if tree is None else token_ids[len(tree) :]
        too_long = len(token_ids) + request.num_wanted > self._forward.max_model_len
        if start is None or not token_ids or too_long or max(new, default=0) >= self._forward.vocab_size:
            return None
        # A head is fed with all committed tokens but the first, which has no row, so one token is not enough.
        if self._head is not None and not (request.features and len(request.features) >= len(token_ids) - 1 >= 1):
            return None
        if tree is None:
            if not self._forward.is_ready(start):
                return None
            sampling = self._forward.start(start, token_ids)
            # The last token is always computed, because its logits decide the first draft token.
            kv = SequenceKV.create(
                self._forward.pool,
                token_ids,
                max_cached_tokens=len(token_ids) - 1,
                cache_salt=start.options.cache_salt,
            )
            max_model_len = self._forward.max_model_len
            tree = PathTree(kv, token_ids, start, max_model_len=max_model_len, sampling=sampling, head=self._head)
        else:
            self._follow(tree, token_ids)
            del self._trees[request.sequence_id]  # moves the tree to the end, as the most recently used one
        tree.features, is_known = request.features, max(request.verified or (), default=0) < self._forward.vocab_size
        # The length of a drawn draft must not depend on tokens that were drawn.
        tree.verified = request.verified if is_known and not start.wants_distributions else None
        self._trees[request.sequence_id] = tree
        return tree

    def _follow(self, tree: PathTree, token_ids: Sequence[int]) -> None:
        is_past_prompt = len(tree) >= tree.start.prompt_length  # tokens of the prompt do not count as generated
        new = tree.follow(token_ids)
        self._count_waste(tree)
        if new and is_past_prompt:
            self._forward.commit(tree.sampling, new)
        elif new:
            tree.sampling = self._forward.start(tree.start, token_ids)

    def _count_waste(self, tree: PathTree) -> None:
        self.num_wasted_tokens += tree.num_wasted_tokens
        tree.num_wasted_tokens = 0

    def _has_answer(self, request: ProposalRequest, tree: PathTree) -> bool:
        """Returns whether there is an answer: a whole draft or block, or a token if look-ahead can send the rest."""
        if request.num_wanted <= 0:
            return not tree.num_behind
        answer = tree.best_path(allow_stale=request.max_alternatives > 0)
        return len(answer) >= (1 if request.max_alternatives or self._drafts_blocks else request.num_wanted) or (
            bool(answer) and (tree.is_complete(answer) or answer.confidence < request.min_reach)
        )

    def _plan_answers(self, plan: Plan, waiting: Sequence[tuple[ProposalRequest, PathTree]]) -> None:
        """Adds the rows of requests that wait for an answer, the shortest missing prefixes first.

        A fraction of the budget is kept for the first request that has a prefix to compute. So a long prefix is
        computed in bounded time.
        """
        busy = [tree for _, tree in waiting]
        budget = self._budget.num_prefix_rows
        missing: dict[int, int] = {}  # number of missing rows, by sequence id
        catching_up: list[int] = []
        for request, tree in waiting:
            num_missing = tree.num_missing(tree.main) if request.num_wanted > 0 else tree.num_behind
            missing[request.sequence_id] = num_missing
            if num_missing > tree.max_path_rows or not (tree.main or self._head is not None):
                catching_up.append(request.sequence_id)
        first = next(iter(catching_up), None)
        kept = int(FIRST_SHARE * budget)  # rows kept for the first one
        for request, tree in sorted(waiting, key=lambda each: missing[each[0].sequence_id]):
            main, num_missing = tree.main, missing[request.sequence_id]
            is_draft = request.sequence_id not in catching_up
            if request.sequence_id == first:
                kept = 0
            num_rows = num_missing if is_draft else min(num_missing, max(0, budget - kept))
            if num_rows < num_missing:
                plan.behind.add(request.sequence_id)
            if num_rows == 0:
                continue
            num_decisions = 0
            if request.num_wanted > 0 and num_rows == num_missing:
                num_decisions = 1 + NUM_RUNNERS_UP * (request.max_alternatives > 0 or tree.start.takes_siblings)
            is_added = self._add(
                plan,
                tree,
                main,
                num_rows=num_rows,
                num_decisions=num_decisions,
                max_tokens=max(1, request.num_wanted - len(main)),
                min_reach=request.min_reach,
                kept=busy,
            )
            if is_added:
                budget -= 0 if is_draft else num_rows
            else:
                plan.no_room.add(request.sequence_id)

    def _plan_look_ahead(self, plan: Plan, ahead: Sequence[tuple[ProposalRequest, PathTree]]) -> None:
        """Adds the likeliest paths of all sequences with look-ahead, while the forward gets only a bit longer."""
        candidates: list[AheadRow] = []
        for request, tree in ahead:
            num_wanted, max_alternatives = request.num_wanted, request.max_alternatives
            rows = candidate_rows(tree, owner=request.owner, num_wanted=num_wanted, max_alternatives=max_alternatives)
            if rows:
                plan.looking_ahead.add(request.sequence_id)
                candidates += rows
        # An answer in the same forward waits for no longer rollout than its own.
        max_tokens = max([row.max_tokens for row in plan.rows], default=MAX_BRANCH_TOKENS)
        for row in (row for row in candidates if row.is_wanted):
            self._add_ahead(plan, row, max_tokens)
        num_left = self._budget.num_more(len(plan.rows), share=SHARE_WITH_ANSWERS if plan.rows else SHARE_ALONE)
        for row in round_robin(row for row in candidates if not row.is_wanted):
            if num_left <= 0:
                break
            num_left -= self._add_ahead(plan, row, max_tokens)
        if not plan.rows:
            plan.looking_ahead.clear()  # no block is free: another call would not help

    def _add_ahead(self, plan: Plan, row: AheadRow, max_tokens: int) -> bool:
        """Adds at most `max_tokens` next tokens of a path. Returns False if there is no block for them."""
        tree = row.tree
        path = tree.open(row.path) if isinstance(row.path, Opening) else row.path
        num_rows, max_tokens = tree.num_missing(path), min(max_tokens, row.max_tokens)
        is_added = self._add(
            plan, tree, path, num_rows=num_rows, num_decisions=1 + NUM_RUNNERS_UP, max_tokens=max_tokens
        )
        if not is_added and isinstance(row.path, Opening):
            tree.free_alternative(path)
        return is_added

    def _add(
        self,
        plan: Plan,
        tree: PathTree,
        path: DraftPath,
        *,
        num_rows: int,
        num_decisions: int,
        max_tokens: int,
        min_reach: float = 0.0,
        kept: Sequence[PathTree] | None = None,
    ) -> bool:
        """Adds the path's next rows to the forward. Returns False if there is no block for them.

        `max_tokens`: number of tokens wanted after the path. The forward may decide fewer, and there may be blocks for
        only one. `min_reach`: as in the request. `kept`: sequences whose main paths keep their KV while other KV is
        evicted, which happens if there is no block even for one token; None: nothing is evicted.
        """
        missing = tree.missing(path)[:num_rows]
        start = tree.first_missing(path)
        num_parallel_rows = self._head.num_parallel_rows if self._head and num_decisions else 0
        limit = min(self._forward.max_tokens, tree.num_left_of(path)) if num_decisions else 1
        max_tokens = max(1, min(max_tokens, limit))
        while True:
            try:
                plan.copies += path.kv.reserve(tree.rows_before(start + num_rows) + num_parallel_rows + max_tokens - 1)
                break
            except NoFreeBlocksError:
                if max_tokens > 1:
                    max_tokens = 1
                elif kept is None or not self._evict(plan, kept):
                    return False
        own = path.decided[max(0, start - len(tree)) : max(0, start + num_rows - len(tree))]
        rows = PathRows(
            missing,
            start,
            path.kv.block_table(),
            tree.sampling,
            tuple(path.token_ids),
            num_decisions,
            tree.start.wants_distributions,
            tree.features,
            len(tree),
            tuple([each.state for each in own]),
            max_tokens,
            min_reach,
            path.confidence,
        )
        plan.rows.append(rows)
        plan.paths.append((tree, path))
        return True

    def _evict(self, plan: Plan, busy: Iterable[PathTree]) -> bool:
        """Frees blocks of an alternative or else of the least recently used sequence. Returns whether it freed any."""
        planned = {id(path) for _, path in plan.paths}
        for tree in self._trees.values():
            for path in tree.alternatives:
                if id(path) not in planned:
                    tree.free_alternative(path)
                    return True
        in_use = {id(tree) for tree in busy}
        for tree in self._trees.values():
            if id(tree) not in in_use and tree.main.kv.block_ids:
                tree.main.kv.free()
                return True
        return False

    def _run(self, plan: Plan) -> None:
        if not plan.rows:
            return
        started = self._clock()
        try:
            decided = self._forward.decide(plan.rows, plan.copies)
        except Exception:
            self._invalidate_copies(plan)
            raise
        self._budget.observe(
            sum(max(1, len(row.token_ids) - len(row.states)) for row in plan.rows),
            len(plan.rows),
            self._clock() - started,
            num_forwards=1 if self._drafts_blocks else max(1 + len(each.following) for each in decided),
        )
        for (tree, path), rows, outcome in zip(plan.paths, plan.rows, decided, strict=True):
            add_decided(tree, path, rows, outcome)

    def _invalidate_copies(self, plan: Plan) -> None:
        """Truncates KV at blocks that a failed forward may not have copied."""
        destinations = {destination for _, destination in plan.copies}
        for kv in (path.kv for _, path in plan.paths):
            if not destinations.isdisjoint(kv.block_ids):  # only the last block with valid tokens is ever copied
                kv.truncate(kv.num_tokens - kv.num_tokens % self._forward.pool.block_size)

    def _proposal(self, plan: Plan, request: ProposalRequest, tree: PathTree | None) -> Proposal:
        length = len(request.token_ids)
        if tree is None:
            return nothing(request)
        if request.looks_ahead:
            return Proposal(
                sequence_id=request.sequence_id,
                tree=DraftTree(length),
                ahead=tuple(self._due(request, tree)),
                has_more=request.sequence_id in plan.looking_ahead,
            )
        answer = tree.best_path(allow_stale=request.max_alternatives > 0)
        progress = Progress.DRAFTING
        if request.sequence_id in plan.no_room or self._has_answer(request, tree):
            progress = Progress.DONE
        elif request.sequence_id in plan.behind:
            progress = Progress.CATCHING_UP
        num_offered = 0
        if progress is Progress.DONE:
            # Tokens that the look-ahead has added already are sent as well, for the next step.
            limit = max_offered_tokens(request.num_wanted) if request.max_alternatives else request.num_wanted
            tree.main.num_sent = num_offered = min(len(answer), limit) if request.num_wanted > 0 else 0
        return Proposal(
            sequence_id=request.sequence_id,
            tree=tree.proposed(answer, 0, num_offered),
            progress=progress,
            num_behind=tree.num_behind,
        )

    def _due(self, request: ProposalRequest, tree: PathTree) -> Iterator[AheadBranch]:
        """Yields branches to send: complete paths, and paths that gain enough and have doubled since the last send."""
        num_wanted = request.num_wanted
        tree.drop_wrong_stale_path()
        num_first = num_verified(tree, num_wanted)
        for each in tree.paths:
            path = tree.best_path(allow_stale=True) if each is tree.main else each
            # The main path holds two drafts: the one that is verified now and, after one more token, the next one.
            is_next = each is tree.main and len(path) > num_first + 1
            num_before = num_first + 1 if is_next else path.num_assumed
            size, num_sent = len(path) - num_before, max(0, path.num_sent - num_before)
            is_complete = size >= num_wanted or tree.is_complete(path)
            if size <= num_sent or (num_sent >= num_wanted) or not (is_complete or size >= 2 * num_sent):
                continue
            gains = (
                tree.probability(path, num_tokens) for num_tokens in range(num_before + num_sent + 1, len(path) + 1)
            )
            if is_complete or sum(gains) >= MIN_GAIN:
                each.num_sent = len(path)
                # If there is room, the main path's branch begins earlier, as the target may verify less than wanted.
                limit = max_offered_tokens(num_wanted)
                start = path.num_assumed or min(num_before, max(0, len(path) - limit))
                yield AheadBranch(
                    tuple(path.token_ids[:start]), tree.proposed(path, start, min(start + limit, len(path)))
                )
