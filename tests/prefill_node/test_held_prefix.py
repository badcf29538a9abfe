"""Prompts whose beginning the decode node already holds: it is read, and the rest is computed."""

from __future__ import annotations

import pytest

from outrider.errors import AbortedError
from outrider.prefill import PrefillFigures
from prefill_node.jobs import CancelJob
from tests.support.waiting import PATIENCE_SECONDS

PROMPT = list(range(100, 250))
NUM_HELD = 101


def counts_of(figures):
    assert isinstance(figures, PrefillFigures)
    return figures.num_cached_tokens, figures.num_read_tokens, figures.num_computed_tokens


def test_only_what_the_decode_node_lacks_is_computed(rig):
    figures, blocks = rig.prefill(PROMPT, held=NUM_HELD, may_read_held=True)
    assert counts_of(figures) == (0, NUM_HELD, len(PROMPT) - NUM_HELD)
    assert rig.chunks[0][0][0] == NUM_HELD
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT
    assert min(start for _, _, start, _ in rig.decode.regions) == NUM_HELD


def test_frames_of_what_is_read_fit_into_messages_even_if_larger_ones_are_pushed(rig, monkeypatch):
    for module in ("prefill_node.push", "outrider.kv_transfer.inbox"):
        monkeypatch.setattr(f"{module}.MAX_FRAME_BYTES", 64)
    figures, _ = rig.prefill(PROMPT, held=NUM_HELD, may_read_held=True)
    assert counts_of(figures) == (0, NUM_HELD, len(PROMPT) - NUM_HELD)


def test_what_was_read_is_not_found_again(rig):
    """The prefix cache keeps only KV that the node has computed itself."""
    rig.prefill(PROMPT, held=NUM_HELD, may_read_held=True)
    assert counts_of(rig.prefill(PROMPT)[0]) == (0, 0, len(PROMPT))


def test_what_the_node_has_itself_is_not_read(rig):
    rig.prefill(PROMPT[:30])
    figures, _ = rig.prefill(PROMPT, held=NUM_HELD, may_read_held=True)
    assert counts_of(figures) == (28, NUM_HELD - 28, len(PROMPT) - NUM_HELD)


@pytest.mark.parametrize(("held", "may_read_held"), [(NUM_HELD, False), (20, True)], ids=["numerics differ", "short"])
def test_it_is_computed_where(rig, held, may_read_held):
    figures, blocks = rig.prefill(PROMPT, held=held, may_read_held=may_read_held)
    assert counts_of(figures) == (0, 0, len(PROMPT))
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT


@pytest.mark.parametrize("fault", ["not held", "altered", "not writable"])
def test_everything_is_computed_when_the_read_fails(rig, monkeypatch, fault):
    read = rig.decode.inbox.read

    def altered(transfer_id, region):
        header, payload = read(transfer_id, region)
        return header, memoryview(bytes(len(payload)))

    def refuse(*_arguments, **_options):
        raise RuntimeError("the cache refuses")

    owner, name, faulty = {
        "not held": (rig.decode.inbox, "read", lambda *_: None),
        "altered": (rig.decode.inbox, "read", altered),
        "not writable": (rig.engine.kv_cache, "write", refuse),
    }[fault]
    monkeypatch.setattr(owner, name, faulty)
    figures, blocks = rig.prefill(PROMPT, held=NUM_HELD, may_read_held=True)
    assert counts_of(figures) == (0, 0, len(PROMPT))
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT


def test_without_room_for_the_whole_prompt_it_waits_and_computes(make_rig):
    rig = make_rig(num_blocks=40)
    rig.decode.gate.clear()
    first, _ = rig.submit(list(range(500, 540)))
    rig.start()
    assert rig.decode.is_writing.wait(PATIENCE_SECONDS)
    second, blocks = rig.submit(PROMPT, held=NUM_HELD, may_read_held=True)
    rig.decode.gate.set()
    rig.result(first)
    assert sum(counts_of(rig.result(second))) == len(PROMPT)
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT


def test_a_prompt_that_was_read_does_not_wait_behind_one_that_waits_for_its_blocks(make_rig):
    rig = make_rig(num_blocks=40)
    rig.decode.read_gate.clear()
    rig.start()
    first, _ = rig.submit(PROMPT, held=NUM_HELD, may_read_held=True)
    assert rig.decode.is_reading.wait(PATIENCE_SECONDS)
    second, _ = rig.submit(list(range(500, 540)), priority=1)
    rig.decode.read_gate.set()
    assert counts_of(rig.result(first)) == (0, NUM_HELD, len(PROMPT) - NUM_HELD)
    assert counts_of(rig.result(second)) == (0, 0, 40)


def test_a_job_that_is_cancelled_while_it_reads_keeps_its_blocks_until_nothing_is_written_into_them(rig):
    rig.decode.read_gate.clear()
    job, _ = rig.submit(PROMPT, held=NUM_HELD, may_read_held=True)
    assert rig.decode.is_reading.wait(PATIENCE_SECONDS)
    num_free = rig.engine.pool.num_free_blocks
    rig.loop.submit(CancelJob(job.job_id))
    other, _ = rig.submit(list(range(500, 510)))
    assert isinstance(rig.result(other), PrefillFigures)
    assert rig.engine.pool.num_free_blocks == num_free
    rig.decode.read_gate.set()


def test_a_decode_node_that_gives_the_transfer_up_meanwhile_ends_the_job(rig):
    rig.decode.read_gate.clear()
    job, _ = rig.submit(PROMPT, held=NUM_HELD, may_read_held=True)
    assert rig.decode.is_reading.wait(PATIENCE_SECONDS)
    rig.decode.inbox.close(job.call.transfer_id, timeout_seconds=0.0)
    rig.decode.read_gate.set()
    assert isinstance(rig.result(job), AbortedError)
