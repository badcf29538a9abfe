"""Sequence groups on this node: a prompt, its reservation, its samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.sampler import SequenceSampling
from outrider.engine.scheduler import EngineSequence, PromptScoring
from outrider.session import OpenSequenceGroup, SampleStart


def cached_table(pool: BlockPool, opened: OpenSequenceGroup, shared_token_ids: Sequence[int]) -> SequenceKV:
    """Of what all samples begin with: as much of it as the prefix cache has.

    Nothing where logprobs of the prompt are wanted: they come of computing it.
    """
    max_cached_tokens = len(shared_token_ids) if opened.options.prompt_logprobs is None else 0
    return SequenceKV.create(
        pool, shared_token_ids, max_cached_tokens=max_cached_tokens, cache_salt=opened.options.cache_salt
    )


def scoring_of(opened: OpenSequenceGroup, num_computed: int) -> PromptScoring | None:
    """Of what this node is to compute of a prompt. None: nothing was asked for, or a prefill node has computed it."""
    num_top, token_ids = opened.options.prompt_logprobs, opened.prompt_token_ids[1:]
    if num_top is None or num_computed >= len(token_ids):
        return None
    return PromptScoring(token_ids, num_top, num_done=num_computed)


@dataclass(slots=True)
class Sample:
    """One running sequence. Owned by the engine thread."""

    group: SequenceGroup
    index: int  # 0 <= index < n
    sequence: EngineSequence
    sampling: SequenceSampling
    stop_token_ids: frozenset[int]
    max_length: int = field(init=False)  # tokens with which the sample is complete, the prompt's among them
    _asked_draft_tokens: int = field(init=False)  # the most that the request allows in a step

    def __post_init__(self) -> None:
        opened = self.group.opened
        options = opened.options
        self.max_length = len(opened.prompt_token_ids) + options.sampling.max_tokens
        asked = options.num_speculative_tokens
        self._asked_draft_tokens = self.max_length if asked is None else asked

    @property
    def num_generated(self) -> int:
        return len(self.sequence.token_ids) - len(self.group.opened.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        return self.max_length - len(self.sequence.token_ids)

    @property
    def may_draft(self) -> bool:
        """Whether the request allows drafts at all."""
        return self._asked_draft_tokens > 0

    @property
    def max_draft_tokens(self) -> int:
        """In the next step: its last token needs no draft. May be negative."""
        return min(self.max_length - len(self.sequence.token_ids) - 1, self._asked_draft_tokens)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One admitted Open. `kv` holds the reservation until the samples take it over."""

    session_id: int
    opened: OpenSequenceGroup
    shared_token_ids: tuple[int, ...]  # what all samples begin with: what KV is reserved for
    kv_host: str  # under which the router reached this node
    arrival: int
    kv: SequenceKV | None
    compiled: object = None  # its constraint, kept for samples that have not started
    is_waiting_for_kv: bool = False
    cancelled_samples: set[int] = field(default_factory=set)  # before they could start
    samples: dict[int, Sample] = field(default_factory=dict)  # unfinished ones, by index
    sequence_ids: dict[int, int] = field(default_factory=dict)  # by index of samples that have not ended
    followers: list[SampleStart] = field(default_factory=list)  # start when the only sample has computed what is shared

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs first: by priority, then age."""
        return -self.opened.options.priority, self.arrival

    @property
    def unstarted_samples(self) -> list[SampleStart]:
        """Those that start when the KV is there."""
        return self.wanted_samples if self.is_waiting_for_kv else self.followers

    def tables(self) -> Iterator[SequenceKV]:
        """The block tables that it holds: the reservation's, or its samples'."""
        if self.kv is not None:
            yield self.kv
        for sample in self.samples.values():
            if sample.sequence.kv is not None:
                yield sample.sequence.kv

    @property
    def wanted_samples(self) -> list[SampleStart]:
        """The samples to start, lowest first."""
        return [start for start in self.opened.samples if start.sample not in self.cancelled_samples]


@dataclass(frozen=True, slots=True)
class PrefixLookups:
    """Totals over granted groups."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class GroupTable:
    """Every group on the node, by id and by running sequence. Engine thread only."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, bytes], SequenceGroup] = {}
        self._samples: dict[int, Sample] = {}  # by their key in scheduler, proposers and draft stream
        self.next_sequence_id = itertools.count(1).__next__

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(tuple(self._groups.values()))

    @property
    def num_sequences(self) -> int:
        """Running samples, and those of groups that still wait for their KV. May be read by any thread."""
        return len(self._samples) + sum(len(group.unstarted_samples) for group in self)

    def add(self, group: SequenceGroup) -> None:
        key = (group.session_id, group.opened.sequence_group_id)
        assert key not in self._groups
        self._groups[key] = group

    def find(self, session_id: int, sequence_group_id: bytes) -> SequenceGroup | None:
        return self._groups.get((session_id, sequence_group_id))

    def of_session(self, session_id: int) -> list[SequenceGroup]:
        return [group for group in self._groups.values() if group.session_id == session_id]

    def add_sample(self, sample: Sample) -> None:
        sample.group.samples[sample.index] = sample
        self._samples[sample.sequence.key] = sample

    def samples_of(self, sequences: Iterable[EngineSequence]) -> list[Sample]:
        """Whose they are, in order."""
        samples = self._samples
        return [samples[sequence.key] for sequence in sequences]

    def samples(self) -> list[Sample]:
        return list(self._samples.values())

    def remove_sample(self, sample: Sample) -> None:
        """Its group goes with the last of them."""
        del sample.group.samples[sample.index]
        del self._samples[sample.sequence.key]
        if not sample.group.samples:
            self.remove(sample.group)

    def remove(self, group: SequenceGroup) -> None:
        self._groups.pop((group.session_id, group.opened.sequence_group_id), None)
