"""A device that queues forward passes: the node's reports cover only what has been computed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from outrider.prefill import PrefillFigures
from prefill_node.jobs import CancelJob
from tests.prefill_node.conftest import job_of
from tests.support.waiting import PATIENCE_SECONDS, wait_for

PROMPT = list(range(100, 140))  # five chunks


@pytest.fixture
def rig(make_rig):
    return make_rig(on_device=True)


@pytest.fixture
def computing(rig):
    """The rig, with a device that computes each forward pass soon after its launch."""
    is_over = threading.Event()

    def compute():
        while not is_over.is_set():
            if rig.device.num_launched > rig.device.num_computed:
                rig.device.compute()
            time.sleep(0.001)

    thread = threading.Thread(target=compute)
    thread.start()
    yield rig.start()
    rig.stop()
    is_over.set()
    thread.join(PATIENCE_SECONDS)


def compute_all(rig, num_passes):
    for _ in range(num_passes):
        rig.device.compute()


def test_prompts_arrive_whole(computing):
    for first in (100, 200, 100):
        tokens = list(range(first, first + 37))
        result, blocks = computing.prefill(tokens)
        assert computing.decode.cache.context(blocks, 37) == tokens
    assert (result.num_cached_tokens, result.num_computed_tokens) == (36, 1)


def test_a_chunk_whose_logits_are_wanted_is_read_before_another_is_launched(computing, monkeypatch):
    device, seen = computing.device, []

    def scored_rows(plan, logits):
        if len(logits):
            seen.append((device.num_launched - device.num_computed, len(logits)))
            (scored,) = (item for item in plan.scheduled if item.scored_token_ids)
            scored.sequence.score(scored.sequence.num_computed, [None] * len(scored.scored_token_ids))
        return logits, []

    monkeypatch.setattr("prefill_node.prefill_loop.split_scored_rows", scored_rows)
    others = [computing.submit(list(range(first, first + 40)))[0] for first in (200, 300)]
    transfer_id, _ = computing.decode.expect(PROMPT)
    side = computing.decode
    job = job_of(9, PROMPT, transfer_id=transfer_id, address=side.address, incarnation=side.incarnation)
    options = replace(job.call.options, prompt_logprobs=0)
    computing.loop.submit(replace(job, call=replace(job.call, options=options, scored_token_ids=tuple(PROMPT[1:]))))
    assert [isinstance(computing.result(each), PrefillFigures) for each in (*others, job)] == [True] * 3
    assert sum(num_logits for _, num_logits in seen) == 39
    assert {num_running for num_running, _ in seen} == {0}


def test_the_host_runs_one_chunk_ahead_of_the_device(rig):
    rig.submit(PROMPT)
    rig.start()
    for num_computed in range(4):
        rig.device.wait_for_launches(num_computed + 2)
        time.sleep(0.02)
        assert rig.device.num_launched == min(num_computed + 2, 5)
        rig.device.compute()
    rig.device.compute()


def test_tokens_are_outstanding_until_the_device_has_computed_them(rig):
    rig.submit(PROMPT)
    rig.start()
    for num_computed in range(5):
        rig.device.wait_for_launches(min(num_computed + 2, 5))
        assert rig.loop.prompt_tokens.num_outstanding == 40 - 8 * num_computed
        assert len(rig.stats) == num_computed
        rig.device.compute()
        wait_for(lambda: len(rig.stats) > num_computed)  # noqa: B023 called in this round
    wait_for(lambda: rig.loop.prompt_tokens.num_outstanding == 0)


def test_times_are_the_device_s(rig):
    job, _ = rig.submit(PROMPT)
    rig.start()
    computed_at = []
    for _ in range(5):
        time.sleep(0.02)
        rig.device.compute()
        computed_at.append(time.monotonic() - job.arrived_at)
    chunks = rig.result(job).chunks
    assert [chunk.amount for chunk in chunks] == [8] * 5
    for number, chunk in enumerate(chunks):  # a busy machine may notice a chunk's end late
        assert rig.stats[number].seconds == pytest.approx(chunk.end_seconds - chunk.start_seconds, abs=1e-3)
        assert chunk.end_seconds >= computed_at[number] - 0.005
        if number:
            assert chunk.start_seconds == pytest.approx(chunks[number - 1].end_seconds)
    passed = chunks[-1].end_seconds - chunks[0].start_seconds  # the thread may begin after the first sleep
    assert passed >= 4 * 0.015
    assert rig.result(job).compute_seconds == pytest.approx(passed, abs=1e-3)


def test_a_cancelled_job_costs_the_chunks_that_the_device_has(rig):
    job, _ = rig.submit(PROMPT)
    rig.start()
    rig.device.wait_for_launches(2)
    rig.loop.submit(CancelJob(job.job_id))
    compute_all(rig, 2)
    wait_for(lambda: rig.decode.failed.get(job.call.transfer_id) == "cancelled by the sender")
    assert rig.device.num_launched == 2


def test_a_higher_priority_waits_for_the_chunks_that_the_device_has(rig):
    rig.submit(PROMPT)
    rig.start()
    rig.device.wait_for_launches(2)
    urgent, _ = rig.submit(list(range(500, 508)), priority=3)
    rig.device.compute()
    rig.device.wait_for_launches(3)
    assert rig.computed == [100, 108, 500]
    compute_all(rig, 5)
    assert isinstance(rig.result(urgent), PrefillFigures)


def test_a_device_that_hangs_is_a_step_that_grows_old(rig):
    rig.submit(PROMPT)
    rig.start()
    compute_all(rig, 2)
    wait_for(lambda: rig.loop.progress.num_steps == 3)  # the loop waits for the third step
    mark, age = rig.loop.progress.current_step.mark, rig.loop.progress.age_seconds()
    time.sleep(0.05)
    assert rig.loop.progress.current_step.mark == mark
    assert rig.loop.progress.age_seconds() >= age + 0.04
    assert rig.loop.progress.current_step.expected_seconds > 0
    compute_all(rig, 3)
