"""Blended prompts on a tiny model: what arrives on the decode node depends on the prompt and its pieces only."""

from __future__ import annotations

import itertools
import os
import threading

import numpy as np
import pytest
import torch

from outrider.engine.engine import PromptEngine
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.model_runner import make_runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.prefill import PrefillFigures
from outrider.request import Blend
from prefill_node.jobs import CancelJob, Stop
from prefill_node.prefill_loop import PrefillLoop
from tests.prefill_node.conftest import job_of
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.pool_integrity import check_pool
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import PATIENCE_SECONDS, wait_for

BLOCK_SIZE = 16
LENGTHS = (40, 50, 9, 70)
TOKENS = [3 + (7 * n + n * n // 5) % 290 for n in range(sum(LENGTHS) + 12)]
REDUCTION = FeatureReduction(
    taps=(0, 4, 1), hidden_size=64, projection=torch.randn(48, 3 * 64, generator=torch.Generator().manual_seed(0))
)
NUM_REUSED = 48 + 64  # whole blocks of the pieces, without the first and the one that is shorter than a block


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="bfloat16", overrides={"num_hidden_layers": 4})
    model = load_model(ModelConfig(id=str(path))).with_features(REDUCTION)
    if not model.info.can_blend:
        pytest.skip("KV of this model cannot be moved here")
    return model


class Rig:
    """A prefill loop in its thread, and a decode node's cache."""

    def __init__(self, model, *, num_blocks=64, max_rows_per_step=32, max_pushes=64):
        cache = model.make_cache(num_blocks, BLOCK_SIZE)
        self.pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"seed")
        scheduler = Scheduler(
            self.pool, max_running=8, max_rows_per_step=max_rows_per_step, reserve_blocks_per_running=0
        )
        engine = PromptEngine(self.pool, scheduler, cache, make_runner(model, cache, features=REDUCTION))
        self.decode_cache = model.make_cache(256, BLOCK_SIZE)
        self.incarnation = os.urandom(16)
        inbox = TransferInbox(incarnation=self.incarnation, on_complete=lambda *_: None, on_failed=lambda *_: None)
        self.inbox, self.ended, self.changed = inbox, {}, threading.Condition()
        self.ids, self.blocks = itertools.count(1), itertools.count()
        self.loop = PrefillLoop(
            engine=engine,
            connector=InMemoryConnector({"decode:1": inbox}),
            frame_bytes=8192,
            profiler=StepProfiler(engine.clock, engine.runner.phases),
            emit=self.emit,
            max_pushes=max_pushes,
        )
        self.thread = threading.Thread(target=self.loop.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.loop.submit(Stop())
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        check_pool(self.pool, [])

    def emit(self, ended, _stats):
        with self.changed:
            self.ended.update({end.job_id: end.result for end in ended})
            self.changed.notify_all()

    def submit(self, tokens, **options):
        """Returns (job, its blocks on the decode node)."""
        blocks = [next(self.blocks) for _ in range(-(-len(tokens) // BLOCK_SIZE))]
        ids = {"transfer_id": os.urandom(16), "incarnation": self.incarnation}
        spec = TransferSpec(**ids, start_token=0, end_token=len(tokens), planes=self.decode_cache.planes)
        self.inbox.open(spec, ReservedBlocks(self.decode_cache, blocks))
        job = job_of(next(self.ids), tokens, address="decode:1", **ids, **options)
        self.loop.submit(job)
        return job, blocks

    def step_until(self, is_reached):
        """Runs the loop in this thread, before its own one starts, until something is so."""
        for _ in range(100):
            if is_reached():
                return
            self.loop.step()
        pytest.fail("it was not reached")

    def result(self, job):
        with self.changed:
            assert self.changed.wait_for(lambda: job.job_id in self.ended, PATIENCE_SECONDS), "the job did not end"
        result = self.ended[job.job_id]
        assert isinstance(result, PrefillFigures), result
        return result

    def prefill(self, tokens=TOKENS, **options):
        """Returns (figures, the KV that arrived, by plane: [layers, tokens, bytes])."""
        job, blocks = self.submit(tokens, **options)
        result = self.result(job)
        return result, rows_of(self.decode_cache, blocks, len(tokens))


def rows_of(cache, blocks, num_tokens):
    slots = slots_of(blocks, num_tokens, BLOCK_SIZE)
    return {
        plane.name: cache.read(plane.name, range(plane.num_layers), slots).reshape(plane.num_layers, num_tokens, -1)
        for plane in cache.planes
    }


def is_equal(found, expected):
    return all(np.array_equal(found[name], expected[name]) for name in expected)


def blend(share=0.25, lengths=LENGTHS):
    return Blend(piece_lengths=lengths, recompute_share=share)


@pytest.fixture(scope="module")
def exact(model):
    """The KV of the whole prompt, computed in one pass."""
    cache, blocks = model.make_cache(16, BLOCK_SIZE), list(range(16))
    make_runner(model, cache, features=REDUCTION).forward(
        build_input_batch([SequenceRows(TOKENS, 0, blocks, 0)], BLOCK_SIZE)
    )
    return rows_of(cache, blocks, len(TOKENS))


@pytest.fixture
def rig(model):
    with Rig(model) as rig:
        yield rig


def test_with_all_tokens_computed_it_is_full_computation_to_the_bit(rig, exact):
    for _ in range(2):
        figures, found = rig.prefill(blend=blend(1.0))
        assert is_equal(found, exact)
        assert (figures.num_blended_tokens, figures.num_recomputed_tokens) == (0, NUM_REUSED)


def test_what_arrives_does_not_depend_on_what_is_cached(model):
    with Rig(model) as rig:
        first_figures, first = rig.prefill(blend=blend())
        again_figures, again = rig.prefill(blend=blend())
    assert (first_figures.num_blended_tokens, first_figures.num_recomputed_tokens) == (84, 28)
    assert (first_figures.num_cached_tokens, again_figures.num_cached_tokens) == (0, 32)
    assert is_equal(again, first)
    with Rig(model, max_rows_per_step=200) as rig:
        rig.prefill()  # the whole prompt is cached, exactly
        _, other = rig.prefill(blend=blend())
    assert is_equal(other, first)


def test_blended_prompts_are_never_published(rig, exact):
    rig.prefill(blend=blend())
    figures, found = rig.prefill()
    assert figures.num_cached_tokens == 32  # of the first piece, which is exact
    assert is_equal(found, exact)


def test_reused_tokens_have_the_kv_of_the_piece_alone_above_the_first_layers(model, rig, exact):
    figures, found = rig.prefill(blend=blend(0.0))
    assert figures.num_blended_tokens == NUM_REUSED
    _, alone = rig.prefill(TOKENS[40:88])
    assert np.array_equal(found["v"][2:, 40:88], alone["v"][2:])
    for name in ("k", "v"):
        assert np.array_equal(found[name][:2], exact[name][:2])
        assert np.array_equal(found[name][:, :40], exact[name][:, :40])
    assert not np.array_equal(found["k"][2:, 40:88], alone["k"][2:])  # they are rotated


def test_the_largest_deviations_come_first(rig, exact):
    distances = []
    for share in (0.0, 0.25, 0.5, 1.0):
        _, found = rig.prefill(blend=blend(share))
        wrong = (found["v"] != exact["v"]).any(axis=(0, 2))
        distances.append(int(wrong.sum()))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0 == distances[-1]


def test_a_prompt_without_two_pieces_is_computed_as_usual(rig, exact):
    figures, found = rig.prefill(blend=blend(0.0, (40,)))
    assert (figures.num_blended_tokens, figures.num_recomputed_tokens) == (0, 0)
    assert is_equal(found, exact)


def test_many_blended_prompts_fit_a_pool_that_has_room_for_one(model):
    with Rig(model, num_blocks=-(-len(TOKENS) // BLOCK_SIZE)) as rig:
        prompts = [TOKENS, TOKENS[::-1], TOKENS[60:] + TOKENS[:60], TOKENS]
        jobs = [rig.submit(tokens, blend=blend()) for tokens in prompts]
        plain = [rig.submit(tokens) for tokens in prompts]
        found = []
        for job, blocks in jobs + plain:
            rig.result(job)
            found.append(rows_of(rig.decode_cache, blocks, len(TOKENS)))
    assert is_equal(found[0], found[3])
    assert is_equal(found[4], found[7])


def test_other_tenants_pieces_are_computed_anew(rig):
    _, mine = rig.prefill(blend=blend(), cache_salt=b"mine")
    figures, yours = rig.prefill(blend=blend(), cache_salt=b"yours")
    assert figures.num_cached_tokens == 0
    assert is_equal(yours, mine)


def test_cancelled_jobs_leave_nothing(model):
    rig = Rig(model)
    jobs = [rig.submit(tokens, blend=blend())[0] for tokens in (TOKENS, TOKENS[::-1], TOKENS[1:])]
    rig.loop.step()  # one at a time, in this thread: the first job's pieces are scheduled
    for job in jobs[:2]:
        rig.loop.submit(CancelJob(job.job_id))
    with rig:
        figures = rig.result(jobs[2])
    assert figures.num_blended_tokens > 0
    assert not {job.job_id for job in jobs[:2]} & rig.ended.keys()


def test_the_decode_node_hears_of_progress_while_pieces_are_computed(model):
    rig = Rig(model)
    job, _ = rig.submit(TOKENS, blend=blend())
    rig.loop.step()
    wait_for(lambda: rig.inbox.last_frame_at(job.call.transfer_id) is not None)
    transfer = rig.inbox._find(job.call.transfer_id)
    assert transfer.first_frame_at is None, "no KV can be sent yet"
    for _ in range(3):
        last = transfer.last_frame_at
        rig.step_until(lambda last=last: transfer.last_frame_at != last or transfer.first_frame_at)
    with rig:
        rig.result(job)


def test_parts_of_the_work_are_steps_of_their_own_and_expected_by_what_they_compute(model, monkeypatch):
    rig = Rig(model, max_rows_per_step=200)
    progress, steps = rig.loop.progress, []
    begin, expect = progress.begin, progress.expect
    monkeypatch.setattr(progress, "begin", lambda: (steps.append([]), begin()))
    monkeypatch.setattr(progress, "expect", lambda num_rows: (steps[-1].append(num_rows), expect(num_rows)))
    job, _ = rig.submit(TOKENS, blend=blend(0.0))
    with rig:
        rig.result(job)
    first_layers = -(-(sum(LENGTHS[:3]) + 64) // 2)  # all tokens up to the last reused one, in 2 of 4 layers
    expected = [NUM_REUSED, first_layers, len(TOKENS) - NUM_REUSED]
    assert [rows for rows in steps if rows] == [[num_rows] for num_rows in expected]


def test_other_prompts_are_computed_between_parts_of_the_work(model):
    rig = Rig(model)
    job, _ = rig.submit(TOKENS, blend=blend())
    rig.loop.step()
    rig.step_until(lambda: rig.loop._tasks[job.job_id].sequence.kv is not None)
    other, _ = rig.submit(TOKENS[:20])
    rig.loop.step()
    rig.step_until(lambda: rig.loop._tasks[other.job_id].compute_ended_at is not None)
    assert rig.loop._tasks[job.job_id].blend.computed is None
    with rig:
        rig.result(job)


def test_blended_prompts_that_wait_hold_no_slots_and_go_by_priority(model):
    rig = Rig(model, max_pushes=5)
    jobs = [rig.submit(TOKENS, blend=blend(), priority=priority)[0] for priority in (0, 0, 1, 0)]
    plain, _ = rig.submit(TOKENS[:20])
    rig.loop._take_commands()
    assert [rig.loop._tasks[job.job_id].has_slot for job in (*jobs, plain)] == [True, False, False, False, True]
    rig.step_until(lambda: rig.loop._tasks[jobs[0].job_id].blend.computed is not None)
    rig.loop.step()
    assert rig.loop._blending.task is rig.loop._tasks[jobs[2].job_id]
    with rig:
        for job in (*jobs, plain):
            rig.result(job)
