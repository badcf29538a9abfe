"""A smaller model with the target's vocabulary drafts, by the same race on its own logits.

Source: Leviathan et al. 2022; coupled by Daliri, Musco, Suresh 2024 (arXiv 2408.07978):
the same luck on both sides makes draft and target agree far more often than independent
draws would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import SampledRows, Sampler, SampleRows, SequenceSampling
from outrider.model_hub.loaded_model import LoadedModel
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest

NUM_EXTRA_TOKENS = 2
"""A draft forward costs time, so few are spent on tokens that only a later step can use."""


class DraftForward(Protocol):
    """The forward passes of the draft model; `ModelForward` is the real one."""

    @property
    def pool(self) -> BlockPool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, rows: Sequence[SequenceRows], block_copies: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the logits of the rows that need them.  # [num_logits, vocab_size] float32"""

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> SequenceSampling:
        """The sampling state of a sequence with these committed tokens."""

    def commit(self, state: SequenceSampling, token_ids: Sequence[int]) -> None: ...

    def sample(self, logits: Tensor, rows: Sequence[SampleRows]) -> SampledRows: ...


@dataclass(frozen=True, slots=True)
class ModelForward:
    """Runner, cache and sampler of one loaded draft model."""

    pool: BlockPool
    kv_cache: PagedKVCache
    runner: ModelRunner
    sampler: Sampler
    max_model_len: int
    vocab_size: int

    def forward(self, rows: Sequence[SequenceRows], block_copies: Sequence[tuple[int, int]]) -> Tensor:
        if block_copies:
            self.kv_cache.copy_blocks(block_copies)
        return self.runner.forward(build_input_batch(rows, self.pool.block_size))

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> SequenceSampling:
        return self.sampler.start(
            start.params,
            sample=start.sample,
            prompt_token_ids=token_ids[: start.prompt_length],
            generated_token_ids=token_ids[start.prompt_length :],
            stop_token_ids=start.stop_token_ids,
        )

    def commit(self, state: SequenceSampling, token_ids: Sequence[int]) -> None:
        self.sampler.commit(state, token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRows]) -> SampledRows:
        return self.sampler.sample(logits, rows)


@dataclass(slots=True)
class _Drafted:
    """What is remembered of one sequence: a cache keyed by tokens."""

    kv: SequenceKV
    cached_token_ids: list[int]  # whose KV is in the cache; committed ones, then drafts
    sampling: SequenceSampling
    sampled_token_ids: list[int]  # that `sampling` has counted


@dataclass(slots=True)
class _Draft:
    """One sequence's draft in the making."""

    request: ProposalRequest
    drafted: _Drafted
    start: SequenceStart
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        size = len(self.token_ids)
        return size >= self.request.num_wanted or (size > 0 and self.token_ids[-1] in self.start.stop_token_ids)


class DraftModelProposer:
    """Ragged batches over the draft model's own paged KV cache. One owner thread.

    One call computes at most `catch_up_tokens_per_step` rows of prefixes, the shortest
    remainders first, then drafts for every sequence whose prefix is complete. KV of an
    accepted draft is kept; from the first token that differs it is cut away.
    """

    def __init__(
        self,
        forward: DraftForward,
        *,
        model_name: str,
        vocabulary_fingerprint: str,
        catch_up_tokens_per_step: int = 512,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        assert catch_up_tokens_per_step >= 1
        self._forward = forward
        self._model_name = model_name
        self._vocabulary_fingerprint = vocabulary_fingerprint
        self._description = dict(description or {})
        self._catch_up_tokens = catch_up_tokens_per_step
        self._sequences: dict[int, _Drafted] = {}  # least recently used first

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        *,
        kv_cache: KVCacheConfig,
        attention: str = "auto",
        catch_up_tokens_per_step: int = 512,
    ) -> DraftModelProposer:
        """Over a loaded model, with a cache of its own. Raises ConfigError when the cache does not fit."""
        backend = make_attention_backend(attention, model.device, model.spec.dtype)
        cache = PagedKVCache.sized_for(
            model.spec, kv_cache, block_size=backend.block_size(kv_cache.block_size), device=model.device
        )
        runner = ModelRunner(model, cache, backend)
        runner.warm_up()
        pool = BlockPool(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            hash_seed=model.info.fingerprint.encode(),
            enable_prefix_cache=kv_cache.prefix_cache,
        )
        sampler = Sampler(
            vocab_size=model.spec.vocab_size,
            known_token_ids=model.known_token_ids,
            device=model.device,
            kernels=model.cpu_kernels,
        )
        return cls(
            ModelForward(pool, cache, runner, sampler, model.spec.max_model_len, model.spec.vocab_size),
            model_name=model.info.name,
            vocabulary_fingerprint=model.info.vocabulary_fingerprint,
            catch_up_tokens_per_step=catch_up_tokens_per_step,
            description={
                "dtype": model.info.dtype,
                "numerics": model.info.numerics,
                "kernels": str(model.kernels),
                "weights": model.weights_from,
                "threads": model.num_threads,
            },
        )

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

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request; empty and not caught up where the prefix needs another call."""
        drafts = [draft for request in requests if (draft := self._begin(request)) is not None]
        behind = self._catch_up(drafts)
        wanting = [draft for draft in drafts if draft.token_ids and not draft.is_done]
        while wanting:
            wanting = self._draft_one_token(wanting)
        proposed = {draft.request.sequence_id: tuple(draft.token_ids) for draft in drafts}
        return [
            Proposal(
                sequence_id=request.sequence_id,
                tree=DraftTree(len(request.token_ids), token_ids=proposed.get(request.sequence_id, ())),
                caught_up=request.sequence_id not in behind,
                num_computed=behind.get(request.sequence_id, 0),
            )
            for request in requests
        ]

    def forget(self, sequence_id: int) -> None:
        """Frees KV and state of a sequence; an unknown one is fine."""
        drafted = self._sequences.pop(sequence_id, None)
        if drafted is not None:
            drafted.kv.free()

    def check_integrity(self) -> None:
        """Raises InternalError unless the pool's blocks are exactly those of the sequences."""
        self._forward.pool.check_integrity([drafted.kv.block_ids for drafted in self._sequences.values()])

    def _begin(self, request: ProposalRequest) -> _Draft | None:
        """Fits what is remembered to the request's tokens. None: this model cannot serve it."""
        token_ids = request.token_ids
        too_long = len(token_ids) + request.num_wanted > self._forward.max_model_len
        if request.start is None or not token_ids or too_long or max(token_ids) >= self._forward.vocab_size:
            return None
        drafted = self._sequences.get(request.sequence_id)
        if drafted is None:
            sampling = self._forward.start(request.start, token_ids)
            # The last token is always computed: its logits begin the draft.
            kv = SequenceKV.create(self._forward.pool, token_ids, max_cached_tokens=len(token_ids) - 1)
            drafted = _Drafted(kv, list(token_ids[: kv.num_tokens]), sampling, list(token_ids))
        else:
            self._follow(drafted, request, request.start)
            del self._sequences[request.sequence_id]  # goes to the end: used last
        self._sequences[request.sequence_id] = drafted
        return _Draft(request, drafted, request.start)

    def _follow(self, drafted: _Drafted, request: ProposalRequest, start: SequenceStart) -> None:
        token_ids = request.token_ids
        num_common = min(_common_length(drafted.cached_token_ids, token_ids), len(token_ids) - 1)
        drafted.kv.truncate(num_common)
        del drafted.cached_token_ids[num_common:]
        num_sampled = len(drafted.sampled_token_ids)
        is_past_prompt = num_sampled >= start.prompt_length  # the rest of a prompt was not generated
        if is_past_prompt and _common_length(drafted.sampled_token_ids, token_ids) == num_sampled:
            new_token_ids = list(token_ids[num_sampled:])
            self._forward.commit(drafted.sampling, new_token_ids)
            drafted.sampled_token_ids += new_token_ids
        else:
            drafted.sampling = self._forward.start(start, token_ids)
            drafted.sampled_token_ids = list(token_ids)

    def _catch_up(self, drafts: Sequence[_Draft]) -> dict[int, int]:
        """Computes what prefixes lack, within the budget, and each complete one's first draft token.

        Returns the sequences whose prefix is still incomplete, and how much of it is computed.
        """
        budget = self._catch_up_tokens
        behind: dict[int, int] = {}
        rows: list[SequenceRows] = []
        copies: list[tuple[int, int]] = []
        fed: list[_Draft] = []
        decided: list[_Draft] = []
        for draft in sorted(drafts, key=_num_missing):
            token_ids = draft.request.token_ids
            num_rows = min(_num_missing(draft), budget)
            end = draft.drafted.kv.num_tokens + num_rows
            is_whole = end == len(token_ids)
            if num_rows == 0:
                behind[draft.request.sequence_id] = end
                continue
            reserved = self._reserve(draft, end, fed)
            if reserved is None:
                continue  # no block left: no draft for it this time
            budget -= num_rows
            copies += reserved
            wants_logits = is_whole and draft.request.num_wanted > 0
            rows.append(_rows(draft, token_ids[draft.drafted.kv.num_tokens : end], num_logits=int(wants_logits)))
            fed.append(draft)
            if wants_logits:
                decided.append(draft)
            if not is_whole:
                behind[draft.request.sequence_id] = end
        if rows:
            logits = self._forward.forward(rows, copies)
            self._advance(fed, rows)
            self._decide(decided, logits)
        for draft in fed:
            draft.drafted.kv.publish(draft.request.token_ids)
        return behind

    def _draft_one_token(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Feeds each draft's newest token and decides the next; returns the drafts that go on."""
        rows: list[SequenceRows] = []
        copies: list[tuple[int, int]] = []
        fed: list[_Draft] = []
        for draft in drafts:
            reserved = self._reserve(draft, draft.drafted.kv.num_tokens + 1, drafts)
            if reserved is None:
                continue  # no block left: this draft ends here
            copies += reserved
            rows.append(_rows(draft, draft.token_ids[-1:], num_logits=1))
            fed.append(draft)
        if not rows:
            return []
        logits = self._forward.forward(rows, copies)
        self._advance(fed, rows)
        self._decide(fed, logits)
        return [draft for draft in fed if not draft.is_done]

    def _decide(self, drafts: Sequence[_Draft], logits: Tensor) -> None:
        if not drafts:
            return
        sample_rows = [
            SampleRows(
                state=draft.drafted.sampling,
                position=len(draft.request.token_ids) + len(draft.token_ids),
                draft_token_ids=(),
                assumed_token_ids=tuple(draft.token_ids),
            )
            for draft in drafts
        ]
        sampled = self._forward.sample(logits, sample_rows)
        for draft, token_id in zip(drafts, sampled.token_ids, strict=True):
            draft.token_ids.append(token_id)

    def _advance(self, drafts: Sequence[_Draft], rows: Sequence[SequenceRows]) -> None:
        """The forward has written the KV of these rows."""
        for draft, fed in zip(drafts, rows, strict=True):
            draft.drafted.cached_token_ids += fed.token_ids
            draft.drafted.kv.advance(len(draft.drafted.cached_token_ids))

    def _reserve(self, draft: _Draft, num_tokens: int, busy: Sequence[_Draft]) -> list[tuple[int, int]] | None:
        """Room for `num_tokens` tokens, at the cost of sequences that are not busy now. None: there is none."""
        in_use = {id(other.drafted) for other in busy} | {id(draft.drafted)}
        while True:
            try:
                return draft.drafted.kv.reserve(num_tokens)
            except NoFreeBlocksError:
                victim = next(
                    (key for key, other in self._sequences.items() if id(other) not in in_use and other.kv.block_ids),
                    None,
                )
                if victim is None:
                    return None
                self._sequences[victim].kv.free()
                self._sequences[victim].cached_token_ids.clear()


def _num_missing(draft: _Draft) -> int:
    return len(draft.request.token_ids) - draft.drafted.kv.num_tokens


def _rows(draft: _Draft, token_ids: Sequence[int], *, num_logits: int) -> SequenceRows:
    kv = draft.drafted.kv
    return SequenceRows(
        token_ids=token_ids, start_position=kv.num_tokens, block_ids=kv.block_table(), num_logits=num_logits
    )


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    size = min(len(one), len(other))
    if list(one[:size]) == list(other[:size]):  # nearly always, and compared in C
        return size
    return next(index for index in range(size) if one[index] != other[index])
