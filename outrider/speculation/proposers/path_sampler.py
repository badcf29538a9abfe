"""How forwards of draft models and heads decide: the target's own race on other logits, and runners-up of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, repeat

import torch
from torch import Tensor

from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler, SampleRows, SequenceSampling
from outrider.engine.transfer import Arrays, read, upload_ids
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.path_tree import Decided
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.token_distribution import MAX_DISTRIBUTION_IDS, TokenDistribution


class PathSampler:
    """What every `DraftForward` with a sampler does alike."""

    __slots__ = ()
    sampler: Sampler

    def is_ready(self, start: SequenceStart) -> bool:
        constraint = start.options.sampling.constraint
        if constraint is None:
            return True
        compiled = self.sampler.constraints.prepare(constraint)
        return compiled.done() and compiled.exception() is None

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> SequenceSampling:
        params = start.options.sampling
        if start.wants_distributions:  # what is sent is what was drawn from
            params = replace(params, top_k=min(params.top_k or MAX_DISTRIBUTION_IDS, MAX_DISTRIBUTION_IDS))
        return self.sampler.start(
            params,
            sample=start.sample,
            prompt_token_ids=token_ids[: start.prompt_length],
            generated_token_ids=token_ids[start.prompt_length :],
            stop_token_ids=start.options.stop_token_ids,
        )

    def commit(self, sampling: object, token_ids: Sequence[int]) -> None:
        assert isinstance(sampling, SequenceSampling)
        self.sampler.commit(sampling, token_ids)

    def _decide(
        self, logits: Tensor, rows: Sequence[PathRows], *, num_parallel: int = 1, confidences: tuple[Tensor, ...] = ()
    ) -> list[Decided]:
        """Of each of `rows`, `num_parallel` positions; an empty one where none is asked for. Waits once.

        logits: [num_deciding * num_parallel, vocab_size] float32, changed; of the positions after each path, the next
        one first. Penalties count nothing among them. confidences: one [num_deciding] float64, of those next positions.
        """
        places = [
            (index, ahead) for index, row in enumerate(rows) if row.num_decisions for ahead in range(num_parallel)
        ]
        samples = [_sample_rows(rows[index], ahead) for index, ahead in places]
        asking = [place for place, (index, ahead) in enumerate(places) if rows[index].wants_distribution and not ahead]
        distributions = self._distributions(logits, samples, asking)
        rounds: list[tuple[list[int], Pending[list[int]]]] = []  # of each the places, and what was decided there
        deciding = list(range(len(places)))
        while deciding:
            sampled = self.sampler.decide(logits, [samples[place] for place in deciding])
            rounds.append((deciding, Pending((sampled,), lambda arrays: arrays[0].tolist())))
            again = [at for at, place in enumerate(deciding) if rows[places[place][0]].num_decisions > len(rounds)]
            if again:
                logits = _without(logits, again, sampled)
            deciding = [deciding[at] for at in again]
        sure = Pending(confidences, lambda arrays: [each.tolist() for each in arrays])
        found, confident, *winners = read(distributions, sure, *(pending for _, pending in rounds))
        token_ids: list[list[int]] = [[] for _ in places]
        for (decided, _), ids in zip(rounds, winners, strict=True):
            for place, token_id in zip(decided, ids, strict=True):
                if not token_ids[place] or _may_follow(token_ids[place], token_id, samples[place]):
                    token_ids[place].append(token_id)
        made = iter([Decided(tuple(ids), found.get(place)) for place, ids in enumerate(token_ids)])
        sure_of = iter(confident[0]) if confident else repeat(1.0)
        return [
            replace(next(made), confidence=next(sure_of), following=tuple(islice(made, num_parallel - 1)))
            if row.num_decisions
            else Decided(())
            for row in rows
        ]

    def _distributions(
        self, logits: Tensor, samples: Sequence[SampleRows], places: Sequence[int]
    ) -> Pending[dict[int, TokenDistribution]]:
        """What the next token is drawn from, at some of the places. `logits`: [len(samples), vocab_size]."""
        if not places:
            return Pending((), lambda _: {})
        values = self.sampler.distribution(
            logits.index_select(0, upload_ids(places, logits.device)), [samples[place] for place in places]
        )
        likely = values.topk(min(MAX_DISTRIBUTION_IDS, values.shape[1]), dim=1)
        probs = likely.values.softmax(dim=1)  # [len(places), 32] float32

        def finish(arrays: Arrays) -> dict[int, TokenDistribution]:
            found = {}
            for place, ids, weights in zip(places, arrays[0].tolist(), arrays[1].tolist(), strict=True):
                kept = [(token_id, weight) for token_id, weight in zip(ids, weights, strict=True) if weight > 0.0]
                found[place] = TokenDistribution(tuple(token_id for token_id, _ in kept), tuple(w for _, w in kept))
            return found

        return Pending((likely.indices, probs.to(torch.float64)), finish)


def _sample_rows(row: PathRows, num_ahead: int) -> SampleRows:
    assert isinstance(row.sampling, SequenceSampling)
    position = row.start_position + len(row.token_ids) + num_ahead
    # What a grammar allows after tokens that are not known yet is not known either.
    state = replace(row.sampling, constraint=None) if num_ahead else row.sampling
    return SampleRows(state, position, draft_token_ids=(), assumed_token_ids=row.assumed_token_ids)


def _may_follow(winners: Sequence[int], token_id: int, sample: SampleRows) -> bool:
    """Whether a runner-up is one: where a constraint allows no other token than the winners, it means nothing."""
    masks = sample.masks()
    return masks is None or (token_id not in winners and bool(masks[0, token_id // 32] >> token_id % 32 & 1))


def _without(logits: Tensor, rows: Sequence[int], token_ids: Tensor) -> Tensor:
    """These rows, each without the token that has won: [num_rows, vocab_size] -> [len(rows), vocab_size].

    `token_ids`: [num_rows] int64, of all rows. Changes `logits` where they are all of them: nobody reads them again.
    """
    if len(rows) < len(logits):
        places = upload_ids(rows, logits.device)
        logits, token_ids = logits.index_select(0, places), token_ids.index_select(0, places)
    return logits.scatter_(1, token_ids.unsqueeze(1), -torch.inf)
