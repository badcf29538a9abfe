"""Scheduler, pool and cache under load: all tokens are right, no block is lost and no sequence starves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence, StepPlan
from outrider.speculation.verify.coupled import accept
from tests.engine.schedules import check
from tests.engine.schedules import drafts as first_come
from tests.support.fake_engine import ScriptedEngine, ScriptedModel, ScriptedRows, greedy
from tests.support.pool_integrity import check_pool

MODEL = ScriptedModel(vocab_size=8, seed=3)
NUM_STEPS_ALLOWED = 5000

Drafter = Callable[[Sequence[int], int], list[int]]


def no_drafter(_context: Sequence[int], _num_wanted: int) -> list[int]:
    return []


def oracle(context: Sequence[int], num_wanted: int) -> list[int]:
    return MODEL.generate(context, num_wanted)


def often_wrong(context: Sequence[int], num_wanted: int) -> list[int]:
    """Drafts the right tokens, but replaces one of them by a wrong one for most lengths of the context."""
    draft = MODEL.generate(context, num_wanted)
    wrong = len(context) % (num_wanted + 1)
    if wrong < num_wanted:
        draft[wrong] = (draft[wrong] + 1) % MODEL.vocab_size
    return draft


@dataclass
class MiniLoop:
    """A minimal loop over an engine: plan, forward, accept, truncate. It checks the pool after every step."""

    engine: ScriptedEngine
    drafter: Drafter
    num_wanted: int = 3
    ends: dict[EngineSequence, int] = field(default_factory=dict)  # length at which each sequence is finished
    plans: list[StepPlan] = field(default_factory=list)

    def add(self, sequence: EngineSequence, *, num_new_tokens: int) -> None:
        self.ends[sequence] = len(sequence.token_ids) + num_new_tokens
        if sequence.kv is None:
            self.engine.scheduler.add(sequence)
        else:
            self.engine.scheduler.add_running(sequence)

    def abort(self, sequence: EngineSequence) -> None:
        del self.ends[sequence]
        self.engine.scheduler.remove(sequence)

    def step(self) -> None:
        drafts = {sequence: self.drafter(sequence.token_ids, self.num_wanted) for sequence in self.ends}
        room = self.engine.scheduler.reserve()
        plan = self.engine.scheduler.assign_rows(
            room, first_come({s.key: len(draft) for s, draft in drafts.items()})(room)
        )
        self.plans.append(plan)
        rows = []
        for item in plan.scheduled:
            sequence, start = item.sequence, item.sequence.num_computed
            draft = drafts[sequence][: item.num_draft_tokens]
            known = sequence.token_ids[start : start + item.num_rows]
            num_logits = 1 + len(draft) if item.reaches_end else 0
            rows.append(ScriptedRows([*known, *draft], start, sequence.kv.block_ids, num_logits))
        targets = [greedy(logits) for logits in self.engine.forward(plan.block_copies, rows)]
        for item in plan.scheduled:
            sequence = item.sequence
            if not item.reaches_end:
                sequence.kv.advance(sequence.num_computed + item.num_rows)
                sequence.kv.publish(sequence.token_ids)
                continue
            draft = drafts[sequence][: item.num_draft_tokens]
            mine, targets = targets[: len(draft) + 1], targets[len(draft) + 1 :]
            num_left = self.ends[sequence] - len(sequence.token_ids)
            sequence.token_ids += accept(draft, mine)[:num_left]
            sequence.kv.truncate(len(sequence.token_ids) - 1)
            sequence.kv.publish(sequence.token_ids)
            if len(sequence.token_ids) == self.ends[sequence]:
                self.abort(sequence)
        self.check()

    def check(self) -> None:
        scheduler = self.engine.scheduler
        check(scheduler)
        assert len(scheduler.running) <= 64
        assert {*scheduler.running, *scheduler._waiting} == set(self.ends)

    def finish(self) -> None:
        while self.ends:
            assert len(self.plans) < NUM_STEPS_ALLOWED, f"starved: {list(self.ends)}"
            self.step()
        check_pool(self.engine.pool, [])
        assert self.engine.pool.num_free_blocks == self.engine.pool.num_blocks


def test_good_drafts_save_steps_and_a_lack_of_blocks_only_costs_drafts():
    num_steps = []
    for drafter in (no_drafter, oracle):
        loop = MiniLoop(ScriptedEngine.create(MODEL, num_blocks=5), drafter)
        loop.add(EngineSequence(key=0, token_ids=[1, 2, 3]), num_new_tokens=17)  # fills the pool to the last slot
        loop.finish()
        assert not any(plan.preempted for plan in loop.plans)
        num_steps.append(len(loop.plans))
    assert num_steps[1] <= num_steps[0] // 3


def test_samples_that_share_a_prompt_each_continue_on_their_own():
    engine = ScriptedEngine.create(MODEL, num_blocks=24)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    kv = SequenceKV.create(engine.pool, prompt, max_cached_tokens=0)
    kv.reserve(6)
    engine.forward((), [ScriptedRows(prompt[:6], 0, kv.block_ids, 0)])
    kv.advance(6)
    tables = [kv, *(kv.fork() for _ in range(5))]
    loop = MiniLoop(engine, often_wrong)
    sequences = [EngineSequence(key=key, token_ids=[*prompt[:6], key], kv=table) for key, table in enumerate(tables)]
    for sequence in sequences:
        loop.add(sequence, num_new_tokens=10)
    loop.finish()
    assert any(plan.block_copies for plan in loop.plans)
    for key, sequence in enumerate(sequences):
        assert sequence.token_ids[7:] == MODEL.generate([*prompt[:6], key], 10)


def test_200_sequences_with_random_aborts_leave_the_pool_whole():
    rng = random.Random(11)
    engine = ScriptedEngine.create(MODEL, num_blocks=28, max_running=16, max_rows_per_step=40)
    loop = MiniLoop(engine, often_wrong)
    survivors: dict[EngineSequence, list[int]] = {}
    shared_prefix = [rng.randrange(8) for _ in range(8)]
    for key in range(200):
        prompt = [*shared_prefix[: rng.randrange(9)], *(rng.randrange(8) for _ in range(rng.randrange(1, 24)))]
        sequence = EngineSequence(key=key, token_ids=prompt.copy(), arrival=key, priority=rng.randrange(3))
        loop.add(sequence, num_new_tokens=rng.randrange(1, 24))
        survivors[sequence] = prompt
        if rng.random() < 0.4:
            loop.step()
        if rng.random() < 0.3 and loop.ends:
            aborted = rng.choice(list(loop.ends))
            loop.abort(aborted)
            del survivors[aborted]
            loop.check()
    loop.finish()
    assert any(plan.preempted for plan in loop.plans)
    for sequence, prompt in survivors.items():
        assert sequence.token_ids[len(prompt) :] == MODEL.generate(prompt, len(sequence.token_ids) - len(prompt))


def test_the_oldest_runs_to_its_end_under_a_flood_of_higher_priorities():
    engine = ScriptedEngine.create(MODEL, num_blocks=8, max_running=4)
    loop = MiniLoop(engine, no_drafter)
    oldest = EngineSequence(key=0, token_ids=[1, 2, 3], priority=-1)
    loop.add(oldest, num_new_tokens=20)
    loop.step()
    for key in range(1, 60):
        loop.add(EngineSequence(key=key, token_ids=[key % 8] * 5, arrival=key, priority=9), num_new_tokens=9)
        loop.step()
    assert oldest not in loop.ends
    assert oldest.num_preemptions == 0
    loop.finish()


@settings(max_examples=40, deadline=None)
@given(
    num_blocks=st.integers(6, 24),
    num_rows=st.integers(1, 20),
    max_running=st.integers(1, 8),
    drafter=st.sampled_from([no_drafter, oracle, often_wrong]),
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10), st.integers(-1, 1)), min_size=1, max_size=8),
)
def test_tokens_depend_on_neither_sizes_nor_drafts(num_blocks, num_rows, max_running, drafter, shapes):
    engine = ScriptedEngine.create(MODEL, num_blocks=num_blocks, max_rows_per_step=num_rows, max_running=max_running)
    loop = MiniLoop(engine, drafter)
    wanted: dict[EngineSequence, list[int]] = {}
    for key, (num_prompt, num_new_tokens, priority) in enumerate(shapes):
        prompt = [(key + i) % 8 for i in range(num_prompt)]
        sequence = EngineSequence(key=key, token_ids=prompt.copy(), arrival=key, priority=priority)
        wanted[sequence] = prompt + MODEL.generate(prompt, num_new_tokens)
        loop.add(sequence, num_new_tokens=num_new_tokens)
    loop.finish()
    for sequence, token_ids in wanted.items():
        assert sequence.token_ids == token_ids
