"""Sequence groups on this node: a prompt, its reservation, its samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.sampler import SequenceSampling
from outrider.engine.scheduler import EngineSequence
from outrider.session import OpenSequenceGroup


@dataclass(slots=True)
class Sample:
    """One running sequence. Owned by the engine thread."""

    group: SequenceGroup
    index: int  # 0 <= index < n
    sequence: EngineSequence
    sampling: SequenceSampling
    stop_token_ids: frozenset[int]

    @property
    def sequence_id(self) -> int:
        """The key in scheduler, proposers and draft stream; unique in this process."""
        return self.sequence.key

    @property
    def num_generated(self) -> int:
        return len(self.sequence.token_ids) - len(self.group.opened.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        return self.group.opened.sampling.max_tokens - self.num_generated


@dataclass(slots=True)
class SequenceGroup:
    """One admitted Open. `kv` holds the reservation until the samples take it over."""

    session_id: int
    opened: OpenSequenceGroup
    arrival: int
    kv: SequenceKV | None
    transfer_id: bytes = b""  # set while a transfer is awaited
    kv_deadline: float = math.inf  # when that is given up, on the desk's clock
    cancelled_samples: set[int] = field(default_factory=set)  # before they could start
    samples: dict[int, Sample] = field(default_factory=dict)  # unfinished ones, by index

    @property
    def is_waiting_for_kv(self) -> bool:
        return bool(self.transfer_id)

    @property
    def num_unstarted_samples(self) -> int:
        return len(self.wanted_samples) if self.is_waiting_for_kv else 0

    @property
    def wanted_samples(self) -> list[int]:
        """Indexes of the samples to start, lowest first."""
        return [index for index in range(self.opened.sampling.n) if index not in self.cancelled_samples]


class GroupTable:
    """Every group on the node, by id, by transfer and by running sequence. Engine thread only."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, bytes], SequenceGroup] = {}
        self._by_transfer: dict[bytes, SequenceGroup] = {}
        self._samples: dict[int, Sample] = {}
        self._sequence_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(tuple(self._groups.values()))

    @property
    def num_sequences(self) -> int:
        """Running samples, and those of groups that still wait for their KV."""
        return len(self._samples) + sum(group.num_unstarted_samples for group in self._by_transfer.values())

    @property
    def num_waiting_for_kv(self) -> int:
        return len(self._by_transfer)

    def next_sequence_id(self) -> int:
        return next(self._sequence_ids)

    def add(self, group: SequenceGroup) -> None:
        key = (group.session_id, group.opened.sequence_group_id)
        assert key not in self._groups
        self._groups[key] = group
        if group.transfer_id:
            self._by_transfer[group.transfer_id] = group

    def find(self, session_id: int, sequence_group_id: bytes) -> SequenceGroup | None:
        return self._groups.get((session_id, sequence_group_id))

    def find_transfer(self, transfer_id: bytes) -> SequenceGroup | None:
        return self._by_transfer.get(transfer_id)

    def waiting_for_kv(self) -> list[SequenceGroup]:
        """Longest waiting first."""
        return list(self._by_transfer.values())

    def of_session(self, session_id: int) -> list[SequenceGroup]:
        return [group for group in self._groups.values() if group.session_id == session_id]

    def end_transfer(self, group: SequenceGroup) -> None:
        self._by_transfer.pop(group.transfer_id, None)
        group.transfer_id = b""

    def add_sample(self, sample: Sample) -> None:
        sample.group.samples[sample.index] = sample
        self._samples[sample.sequence_id] = sample

    def sample_of(self, sequence: EngineSequence) -> Sample:
        return self._samples[sequence.key]

    def samples(self) -> list[Sample]:
        return list(self._samples.values())

    def remove_sample(self, sample: Sample) -> None:
        """Its group goes with the last of them."""
        del sample.group.samples[sample.index]
        del self._samples[sample.sequence_id]
        if not sample.group.samples:
            self.remove(sample.group)

    def remove(self, group: SequenceGroup) -> None:
        self._groups.pop((group.session_id, group.opened.sequence_group_id), None)
        self.end_transfer(group)
