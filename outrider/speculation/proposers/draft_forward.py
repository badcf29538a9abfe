"""The interface between a draft model or head and its proposer: a KV cache, and a forward that decides next tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from outrider.engine.arrays import Array, Arrays, ids_like, largest_keys, namespace
from outrider.engine.device import device_type
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.pending import Pending, read
from outrider.engine.sampler import Sampler, SampleRows, SequenceSampling
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.order import ids_of_keys, order_keys
from outrider.speculation.acceptance_record import NUM_RUNNERS_UP
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.features import Features, HeadRules
from outrider.speculation.path_tree import DraftedToken, DraftPath, PathTree
from outrider.speculation.token_distribution import MAX_DISTRIBUTION_IDS, TokenDistribution

if TYPE_CHECKING:
    from outrider.engine.rollouts import RolloutForward, Rollouts

_log = logging.getLogger(__name__)


class PathRows(NamedTuple):
    """One path's share of a forward: consecutive tokens, the last of which may be followed by a decision."""

    token_ids: Sequence[int]  # at least one
    start_position: int  # position of the first token; the KV of all tokens before it is in the cache
    # These blocks cover the rows [0, start_position + len(token_ids) + max_tokens - 1). For a head, they cover one row
    # less, and its parallel rows in addition.
    block_ids: Sequence[int]
    sampling: SequenceSampling  # made by `start`
    assumed_token_ids: tuple[int, ...] = ()  # the path's tokens, which count as generated
    num_decisions: int = 0  # 0: only compute KV; 1: decide the next token; n: also n - 1 runners-up
    wants_distribution: bool = False  # whether the next token's distribution is wanted
    features: Features | None = None  # for a head: the features of the committed tokens
    num_committed: int = 0  # for a head: `states` replace features from this position onwards
    states: tuple[object, ...] = ()  # a head's own hidden states, one for each token from `num_committed` onwards
    max_tokens: int = 1  # maximum number of tokens to decide, if the forward can decide several
    min_reach: float = 0.0  # the request's min_reach; tokens after a less likely path are dropped
    reach: float = 1.0  # the path's confidence


@dataclass(slots=True)
class Plan:
    """The work of one call of `propose`: at most one forward."""

    rows: list[PathRows] = field(default_factory=list)
    paths: list[tuple[PathTree, DraftPath]] = field(default_factory=list)  # one for each of `rows`
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy before the forward: (from, to)
    behind: set[int] = field(default_factory=set)  # sequences whose prefix needs another call
    no_room: set[int] = field(default_factory=set)  # sequences whose draft ends here, as no block is free
    looking_ahead: set[int] = field(default_factory=set)  # sequences with something left to draft ahead


def add_decided(tree: PathTree, path: DraftPath, rows: PathRows, decided: DraftedToken) -> None:
    """Adds decided tokens to a path. Drops those after which drafting one by one would end."""
    path.kv.advance(tree.rows_before(min(rows.start_position + len(rows.token_ids), tree.max_fed(path))))
    for index, each in enumerate((decided, *decided.following)):
        if not each.token_ids:
            break
        if index and path.confidence < rows.min_reach:
            break
        if index and tree.is_complete(path):
            break
        if index and rows.max_tokens > 1:
            path.kv.advance(path.kv.num_tokens + 1)  # the rollout has fed the token before this one
        path.decided.append(each)
    if path is tree.main:
        path.kv.publish(tree.token_ids)


class DraftForward(Protocol):
    """The forward passes of a draft model (`ModelForward`) or of a head (`HeadForward`). One thread owns it.

    Both decide in the same way: they run the target's own race on their logits and return its winner and runners-up.
    """

    __slots__ = ()
    pool: BlockPool
    sampler: Sampler
    max_model_len: int
    vocab_size: int
    head: HeadRules | None  # None: a model, which is fed with tokens only
    kv_cache: PagedKVCache | None  # None: a head without KV
    rollouts: Rollouts | None = None  # graphs that decide several tokens of a path on a GPU, without the host

    def rolling(self) -> RolloutForward | None:
        """Returns the forward that rollouts run, or None if CUDA graphs cannot capture it."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens that `decide` decides after one path; 1 without rollouts."""
        return 1 if self.rollouts is None else 1 + self.rollouts.max_tokens

    def decide(self, rows: Sequence[PathRows], block_copies: Sequence[tuple[int, int]]) -> list[DraftedToken]:
        """Copies blocks, runs one forward pass, and rolls out the paths that may get more than one token.

        Returns one decision for each element of `rows`, in order. The `following` of a decision
        has the decisions at later positions.
        """
        if self.kv_cache is not None and block_copies:
            self.kv_cache.copy_blocks(block_copies)
        return self._run(rows)

    def _run(self, rows: Sequence[PathRows]) -> list[DraftedToken]:
        """Runs a forward pass and calls `_decide` with its logits."""
        raise NotImplementedError

    def is_ready(self, start: SequenceStart) -> bool:
        """Returns whether the sequence's constraint, if any, is compiled. If not, its compilation has been started."""
        constraint = start.options.sampling.constraint
        if constraint is None:
            return True
        assert self.sampler.constraints is not None
        compiled = self.sampler.constraints.prepare(constraint)
        return compiled.done() and compiled.exception() is None

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> SequenceSampling:
        """Returns the sampling state of a sequence with these committed tokens."""
        params = start.options.sampling
        if start.wants_distributions:  # tokens must be drawn from the distribution that is sent, whose size is limited
            params = replace(params, top_k=min(params.top_k or MAX_DISTRIBUTION_IDS, MAX_DISTRIBUTION_IDS))
        return self.sampler.start(
            params,
            sample=start.sample,
            prompt_token_ids=token_ids[: start.prompt_length],
            generated_token_ids=token_ids[start.prompt_length :],
            stop_token_ids=start.options.stop_token_ids,
        )

    def commit(self, sampling: SequenceSampling, token_ids: Sequence[int]) -> None:
        """Adds newly committed tokens to a sequence's sampling state."""
        self.sampler.commit(sampling, token_ids)

    def _decide(
        self,
        logits: Array,
        rows: Sequence[PathRows],
        *,
        num_parallel: int = 1,
        confidences: Array | None = None,
        states: Array | None = None,
        chosen: Array | None = None,
    ) -> list[DraftedToken]:
        """Returns one decision for each of `rows`, empty if the row requests none. Waits for the device once.

        Decisions at later positions, by a parallel head or a rollout, are in the `following` of a path's decision.
        `logits`: [num_deciding * num_parallel, vocab_size] float32, for the positions after each path, the next
        position first. Penalties ignore the undecided tokens in between. For a head, `confidences`
        [num_deciding * num_parallel] float64 are its confidences at these positions, and `states`
        [num_deciding * num_parallel, width] are its own hidden states before them. `chosen` [num_deciding *
        num_parallel] int64 are the winners of the races if they have been run.
        """
        places = [
            (index, ahead) for index, row in enumerate(rows) if row.num_decisions for ahead in range(num_parallel)
        ]
        samples = [sample_rows(rows[index], ahead) for index, ahead in places]
        asking = [place for place, (index, ahead) in enumerate(places) if rows[index].wants_distribution and not ahead]
        distributions = self._distributions(logits, samples, asking)
        rollout: Pending[dict[int, tuple[DraftedToken, ...]]] = Pending((), lambda _: {})
        rounds: list[tuple[list[int], Pending[list[int]]]] = []  # for each round: places, and the tokens decided there
        deciding = list(range(len(places)))
        while deciding:
            if chosen is None or rounds:
                sampled = self.sampler.decide(logits, [samples[place] for place in deciding])
            else:
                sampled = chosen
            if self.rollouts is not None and not rounds:  # runners-up are queued while the rollout runs
                rollout = self._roll_out(self.rollouts, [rows[index] for index, _ in places], sampled, states)
            rounds.append((deciding, Pending((sampled,), lambda arrays: arrays[0].tolist())))
            again = [at for at, place in enumerate(deciding) if rows[places[place][0]].num_decisions > len(rounds)]
            if again:
                logits = _without(logits, again, sampled)
            deciding = [deciding[at] for at in again]
        # Each path's states are copied, since a view would keep those of all sequences for as long as it needs its own.
        own: Iterator[Any] = repeat(None)
        if states is not None:
            parts = [states[at : at + num_parallel] for at in range(0, len(states), num_parallel)]
            own = chain.from_iterable([namespace(states).asarray(part, copy=True) for part in parts])
        sure = Pending(() if confidences is None else (confidences,), lambda arrays: [each.tolist() for each in arrays])
        found, confident, rolled, *winners = read(distributions, sure, rollout, *(pending for _, pending in rounds))
        token_ids: list[list[int]] = [[] for _ in places]
        for (decided, _), ids in zip(rounds, winners, strict=True):
            for place, token_id in zip(decided, ids, strict=True):
                token_ids[place].append(token_id)
        sure_of = confident[0] if confident else [1.0] * len(places)
        made = [
            DraftedToken(allowed_of(ids, samples[place]), found.get(place), next(own), confidence=sure_of[place])
            for place, ids in enumerate(token_ids)
        ]
        firsts = iter(range(0, len(places), num_parallel))
        return [
            made[first := next(firsts)]._replace(
                following=rolled.get(first, tuple(made[first + 1 : first + num_parallel])),
            )
            if row.num_decisions
            else DraftedToken(())
            for row in rows
        ]

    def _roll_out(
        self, rollouts: Rollouts, rows: Sequence[PathRows], winners: Array, states: Array | None
    ) -> Pending[dict[int, tuple[DraftedToken, ...]]]:
        """Queues rollouts. Returns each path's decisions after its first token, by the path's index in `rows`.

        `winners`: [len(rows)] int64, the first tokens.
        """
        from outrider.engine.rollouts import RolloutSequence  # imports torch and triton

        places = [place for place, row in enumerate(rows) if _can_be_rolled_out(row)][: rollouts.max_sequences]
        if not places:
            return Pending((), lambda _: {})
        rolled, at, is_head = [rows[place] for place in places], ids_like(places, winners), self.head is not None
        sequences = []
        for row in rolled:
            decision = next(sample_rows(row, 0).decisions())
            fed_at, depth = decision.position - is_head, decision.position + 1 - row.num_committed
            sequences.append(RolloutSequence(decision, row.max_tokens - 1, fed_at, row.block_ids, depth))
        decided, confidences, own = rollouts.queue(sequences, winners[at], None if states is None else states[at])
        states_of = [own[:, index].clone() if is_head else repeat(None) for index in range(len(rolled))]

        def finish(arrays: Arrays) -> dict[int, tuple[DraftedToken, ...]]:
            found = {}
            for index, (place, row) in enumerate(zip(places, rolled, strict=True)):
                token_ids = arrays[0][: row.max_tokens - 1, : row.num_decisions, index].tolist()
                found[place] = tuple(
                    DraftedToken(tuple(ids), state=state, confidence=confidence)
                    for ids, confidence, state in zip(
                        token_ids, arrays[1][:, index].tolist(), states_of[index], strict=False
                    )
                )
            return found

        return Pending((decided, confidences), finish)

    def _distributions(
        self, logits: Array, samples: Sequence[SampleRows], places: Sequence[int]
    ) -> Pending[dict[int, TokenDistribution]]:
        """Returns the next token's distribution at each of `places`. `logits`: [len(samples), vocab_size]."""
        if not places:
            return Pending((), lambda _: {})
        xp = namespace(logits)
        values = self.sampler.distribution(logits[ids_like(places, logits)], [samples[place] for place in places])
        ids = ids_of_keys(largest_keys(order_keys(values), min(MAX_DISTRIBUTION_IDS, values.shape[1])))
        largest = xp.max(values, axis=1, keepdims=True)
        masses = masses_of(xp.take_along_axis(values, ids, axis=1), largest)  # [len(places), 32]
        masses = xp.where(xp.isfinite(largest), masses, 0)  # zeros if there is no distribution

        def finish(arrays: Arrays) -> dict[int, TokenDistribution]:
            probs = (arrays[1] / np.maximum(arrays[1].sum(axis=1, keepdims=True), 1)).astype(np.float32)
            found = {}
            for place, ids, weights in zip(places, arrays[0].tolist(), probs.tolist(), strict=True):
                kept = [(token_id, weight) for token_id, weight in zip(ids, weights, strict=True) if weight > 0.0]
                found[place] = TokenDistribution(tuple(token_id for token_id, _ in kept), tuple(w for _, w in kept))
            return found

        return Pending((ids, masses), finish)


def open_rollouts(forward: DraftForward, device: str) -> Rollouts | None:
    """Captures rollouts of a drafter on a GPU, before any block is handed out.

    Returns None if nothing can be captured. Logs a warning and returns None if a capture fails.
    """
    rolling = None if device_type(device) == "cpu" else forward.rolling()
    if rolling is None or forward.kv_cache is None:
        return None
    import torch

    from outrider.engine.rollouts import Rollouts
    from outrider.engine.step_graphs import cuda_graphs

    try:
        return Rollouts(
            rolling,
            cuda_graphs(torch.device(device)),
            sampler=forward.sampler,
            kv_cache=forward.kv_cache,
            max_model_len=forward.max_model_len,
            num_races=1 + NUM_RUNNERS_UP,
        )
    except RuntimeError as error:
        _log.warning(
            "no rollouts: each draft token waits for the host, as graphs of several were not captured: %s", error
        )
        return None


def sample_rows(row: PathRows, num_ahead: int) -> SampleRows:
    position = row.start_position + len(row.token_ids) + num_ahead
    # The tokens in between are unknown, and so is what a grammar allows after them.
    state = replace(row.sampling, constraint=None) if num_ahead else row.sampling
    return SampleRows(state, position, draft_token_ids=(), assumed_token_ids=row.assumed_token_ids)


def _can_be_rolled_out(row: PathRows) -> bool:
    """Returns whether the row wants more than one token and the race alone decides them."""
    is_edited = row.sampling.penalties.changes(len(row.assumed_token_ids)) or row.sampling.constraint is not None
    return row.max_tokens > 1 and not (is_edited or row.wants_distribution)


def allowed_of(raced: Sequence[int], sample: SampleRows) -> tuple[int, ...]:
    """Returns the winner of a race and its valid runners-up, of which a constraint may leave fewer than were wanted."""
    masks = sample.masks() if len(raced) > 1 else None
    if masks is None:
        return tuple(raced)
    allowed = (each for each in raced[1:] if masks[0, each // 32] >> each % 32 & 1)
    return tuple(dict.fromkeys((raced[0], *allowed)))


def _without(logits: Array, rows: Sequence[int], token_ids: Array) -> Array:
    """Returns `rows` of `logits` as [len(rows), vocab_size], in each of which the winner cannot win again.

    `logits`: [num_rows, vocab_size]. `token_ids`: [num_rows] int64, the winners of all rows.
    """
    xp, places = namespace(logits), ids_like(rows, logits)
    logits = logits[places]
    logits[xp.arange(len(rows), device=logits.device), token_ids[places]] = -math.inf
    return logits
