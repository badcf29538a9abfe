"""What all random operations on sequences of a pool have in common."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.pool_integrity import check_pool


@dataclass
class Written:
    """A sequence and the tokens whose KV it should hold."""

    kv: SequenceKV
    token_ids: list[int]


class SequenceMachine(RuleBasedStateMachine):
    """Sequences that are rolled back, forked and freed in any order. At the end the pool is as it was."""

    max_rolled_back = sys.maxsize

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self.pool = pool
        self.sequences: list[Written] = []
        self._free_at_first = pool.free_by_group

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, least = sequence.kv, max(0, sequence.kv.num_tokens - self.max_rolled_back)
        num_tokens = data.draw(st.integers(least, kv.num_tokens))
        kv.truncate(num_tokens)
        assert kv.num_tokens == num_tokens or (kv.windows and kv.num_tokens == 0)
        del sequence.token_ids[kv.num_tokens :]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.append(Written(sequence.kv.fork(), sequence.token_ids.copy()))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        sequence.kv.free()
        sequence.kv.free()

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.kv.free()
        check_pool(self.pool, [])
        assert self.pool.free_by_group == self._free_at_first
