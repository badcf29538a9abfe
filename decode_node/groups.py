"""The state of sequence groups on this node: prompts, reservations and samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.low_rank import PackedAdapter
from outrider.engine.sampler import SequenceSampling
from outrider.engine.scheduler import EngineSequence, PromptScoring
from outrider.session import OpenSequenceGroup, SampleStart


def scoring_of(opened: OpenSequenceGroup, num_computed: int) -> PromptScoring | None:
    """Returns the state for prompt logprobs; None if none are requested or a prefill node has computed them."""
    num_top, token_ids = opened.options.prompt_logprobs, opened.prompt_token_ids[1:]
    if num_top is None or num_computed >= len(token_ids):
        return None
    return PromptScoring(token_ids, num_top, num_done=num_computed)


@dataclass(slots=True)
class Sample:
    """One running sequence, owned by the engine thread."""

    group: SequenceGroup
    index: int  # 0 <= index < n
    sequence: EngineSequence
    sampling: SequenceSampling
    stop_token_ids: frozenset[int]
    max_length: int = field(init=False)  # number of tokens, prompt included, at which the sample is complete
    _requested_draft_tokens: int = field(init=False)  # the request's limit for one step

    def __post_init__(self) -> None:
        opened = self.group.opened
        options = opened.options
        self.max_length = len(opened.prompt_token_ids) + options.sampling.max_tokens
        asked = options.num_speculative_tokens
        self._requested_draft_tokens = self.max_length if asked is None else asked

    @property
    def num_generated(self) -> int:
        return len(self.sequence.token_ids) - len(self.group.opened.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        return self.max_length - len(self.sequence.token_ids)

    @property
    def may_draft(self) -> bool:
        """Whether the request allows drafts."""
        return self._requested_draft_tokens > 0

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens of the next step, which adds one token beyond the accepted ones. May be negative."""
        return min(self.max_length - len(self.sequence.token_ids) - 1, self._requested_draft_tokens)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """An admitted group. `kv` holds the reservation until the samples take it over."""

    session_id: int
    opened: OpenSequenceGroup
    shared_token_ids: tuple[int, ...]  # tokens with which all samples begin, and for which KV is reserved
    kv_host: str  # the host name by which the router reached this node
    arrival: int
    kv: SequenceKV | None
    compiled: object = None  # the compiled constraint, kept for samples that have not started
    adapter: PackedAdapter | None = None  # kept from the grant on, even if it is unloaded meanwhile
    is_waiting_for_kv: bool = False
    cancelled_samples: set[int] = field(default_factory=set)  # samples that were cancelled before they started
    samples: dict[int, Sample] = field(default_factory=dict)  # unfinished samples, by index
    sequence_ids: dict[int, int] = field(default_factory=dict)  # ids of samples that have not ended, by index
    followers: list[SampleStart] = field(default_factory=list)  # samples waiting for the first to compute shared KV

    @property
    def rank(self) -> tuple[int, int]:
        """The group's place in the order of execution, lowest first: by priority, then by arrival."""
        return -self.opened.options.priority, self.arrival

    @property
    def unstarted_samples(self) -> list[SampleStart]:
        """The samples that start when the KV is available."""
        return self.samples_to_start if self.is_waiting_for_kv else self.followers

    def tables(self) -> Iterator[SequenceKV]:
        """Yields the group's block tables: that of the reservation, or those of its samples."""
        if self.kv is not None:
            yield self.kv
        for sample in self.samples.values():
            if sample.sequence.kv is not None:
                yield sample.sequence.kv

    @property
    def samples_to_start(self) -> list[SampleStart]:
        """The samples to start, by ascending index."""
        return [start for start in self.opened.samples if start.sample not in self.cancelled_samples]


@dataclass(frozen=True, slots=True)
class PrefixLookups:
    """Token counts of prefix cache lookups, over all granted groups."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class GroupTable:
    """Every group on the node, by id and by running sequence. Engine thread only."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, bytes], SequenceGroup] = {}
        self._samples: dict[int, Sample] = {}  # by key in the scheduler, the proposers and the draft stream
        self.next_sequence_id = itertools.count(1).__next__

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(tuple(self._groups.values()))

    @property
    def num_sequences(self) -> int:
        """Number of running samples and of samples of groups that wait for KV. Readable from any thread."""
        return len(self._samples) + sum(len(group.unstarted_samples) for group in self)

    def beside(self, kv: SequenceKV) -> list[SequenceGroup]:
        """Returns the groups that take blocks from the same pool as `kv`, and those that have none at present."""
        tables = {group: tuple(group.tables()) for group in self}
        return [group for group, held in tables.items() if not held or any(map(kv.shares_pool, held))]

    def num_new_blocks(self, kv: SequenceKV, opened: OpenSequenceGroup, num_shared: int, *, arriving: int) -> int:
        """Returns how many blocks a new group's table needs for its shared tokens, of which `arriving` arrive from
        elsewhere; more than are free if its sliding windows have no room.
        """
        needed, num_forks = kv.num_blocks_needed(num_shared), len(opened.samples) - 1
        if kv.windows_fit(num_shared, arriving=arriving, kept_back=self.num_sequences, num_forks=num_forks):
            return needed
        return max(needed, kv.num_free_blocks + 1)

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
        """Returns the samples of `sequences`, in order."""
        samples = self._samples
        return [samples[sequence.key] for sequence in sequences]

    def samples(self) -> list[Sample]:
        return list(self._samples.values())

    def remove_sample(self, sample: Sample) -> None:
        """Removes the sample, and also its group if this was the group's last sample."""
        del sample.group.samples[sample.index]
        del self._samples[sample.sequence.key]
        if not sample.group.samples:
            self.remove(sample.group)

    def remove(self, group: SequenceGroup) -> None:
        self._groups.pop((group.session_id, group.opened.sequence_group_id), None)
