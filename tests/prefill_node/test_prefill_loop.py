from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec
from outrider.errors import AbortedError, PeerLostError
from outrider.prefill import PrefillFigures
from prefill_node.jobs import CancelJob, Stop
from prefill_node.push import LayerGroups, cut_frames
from tests.support.fake_kv_cache import FEATURES
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.waiting import wait_for

OTHER_FEATURES = PlaneSpec("feature-other", 1, 1, 1, "float32")


def prompt(length, *, first=100):
    return list(range(first, first + length))


def test_a_prompt_arrives_whole_on_the_decode_node(rig):
    tokens = prompt(37)
    result, blocks = rig.prefill(tokens)
    assert rig.decode.cache.context(blocks, 37) == tokens
    assert (result.num_cached_tokens, result.num_computed_tokens) == (0, 37)
    assert result.connector == "in_memory"
    assert result.kv_bytes == 37 * (2 * 2 + 1) * 4  # tokens × (planes × layers + features) × float32
    assert result.compute_seconds > 0
    assert result.transfer_seconds > 0
    assert 0 <= result.exposed_seconds <= result.transfer_seconds


def test_long_prompts_are_computed_in_chunks(rig):
    rig.prefill(prompt(20))
    assert rig.chunks == [[(0, 8)], [(8, 8)], [(16, 4)]]


def test_the_higher_priority_goes_first(make_rig):
    rig = make_rig(max_running=1)
    low, _ = rig.submit(prompt(8, first=100))
    high, _ = rig.submit(prompt(8, first=500), priority=3)
    rig.start()
    rig.result(low)
    rig.result(high)
    assert rig.computed[:2] == [500, 100]


def test_what_the_node_has_cached_is_pushed_without_being_computed(rig):
    tokens = prompt(30)
    rig.prefill(tokens)
    rig.chunks.clear()
    result, blocks = rig.prefill(tokens)
    assert (result.num_cached_tokens, result.num_computed_tokens) == (28, 2)
    assert rig.chunks == [[(28, 2)]]
    assert rig.decode.cache.context(blocks, 30) == tokens


def test_what_one_tenant_has_cached_is_computed_for_another(rig):
    tokens = prompt(30)
    rig.prefill(tokens, cache_salt=b"alice")
    cached = [rig.prefill(tokens, cache_salt=salt)[0].num_cached_tokens for salt in (b"bob", b"alice")]
    assert cached == [0, 28]


def test_a_prompt_that_is_cached_whole_is_pushed_at_once(rig):
    tokens = prompt(32)
    rig.prefill(tokens)
    rig.chunks.clear()
    result, blocks = rig.prefill(tokens)
    assert (result.num_cached_tokens, result.num_computed_tokens) == (32, 0)
    assert result.compute_seconds == 0
    assert rig.chunks == []
    assert rig.decode.cache.context(blocks, 32) == tokens


def test_many_prompts_cached_whole_do_not_stall_the_loop(make_rig):
    rig = make_rig(max_running=2).start()
    tokens = prompt(8)
    rig.prefill(tokens)
    jobs = [rig.submit(tokens)[0] for _ in range(9)]
    assert all(rig.result(job).num_cached_tokens == 8 for job in jobs)


@pytest.mark.parametrize("held", [4, 8, 10, 27, 28, 29])
def test_of_what_is_computed_or_cached_only_what_is_not_held_is_pushed(rig, held):
    for num_cached in (0, 28):
        rig.decode.regions.clear()
        result, _ = rig.prefill(prompt(30), held=held)
        assert (result.num_cached_tokens, result.num_computed_tokens) == (num_cached, 30 - num_cached)
        assert result.kv_bytes == (30 - held) * 20
        assert min(start for _, _, start, _ in rig.decode.regions) == held


def test_a_prompt_that_is_held_whole_only_commits(rig):
    result, _ = rig.prefill(prompt(12), held=12)
    assert result.kv_bytes == 0
    assert result.transfer_seconds == 0


def test_the_first_layers_arrive_while_later_ones_are_computed(make_rig):
    rig = make_rig(frame_bytes=32)  # the bytes of a layer of a chunk of eight tokens
    arrived = []

    def before_layer(layer):
        if layer == 1:
            wait_for(lambda: rig.decode.regions)
            arrived.extend(rig.decode.regions)

    rig.before_layer = before_layer
    rig.start()
    rig.prefill(prompt(8))
    assert {layers for _, layers, _, _ in arrived} == {range(1)}


def test_blocks_of_a_push_stay_pinned_until_it_ends(make_rig):
    rig = make_rig(num_blocks=8).start()
    rig.decode.gate.clear()
    first, first_blocks = rig.submit(prompt(32, first=1))  # the whole pool
    wait_for(lambda: rig.loop.prompt_tokens.num_outstanding == 0)
    second, second_blocks = rig.submit(prompt(32, first=500))
    assert rig.engine.pool.num_free_blocks == 0
    rig.decode.gate.set()
    rig.result(first)
    rig.result(second)
    assert rig.decode.cache.context(first_blocks, 32) == prompt(32, first=1)
    assert rig.decode.cache.context(second_blocks, 32) == prompt(32, first=500)


def test_cancelling_a_waiting_job_forgets_it(make_rig):
    rig = make_rig(max_running=1)
    first, _ = rig.submit(prompt(8))
    second, _ = rig.submit(prompt(8, first=500))
    rig.loop.submit(CancelJob(second.job_id))
    rig.start()
    rig.result(first)
    rig.wait_until_idle()
    assert second.job_id not in rig.ended
    assert rig.loop.prompt_tokens.num_outstanding == 0


def test_cancelling_a_job_in_computation_stops_it_and_frees_everything(make_rig):
    rig = make_rig()
    job, _ = rig.submit(prompt(64))
    rig.before_layer = lambda layer: rig.loop.submit(CancelJob(job.job_id)) if len(rig.chunks) == 2 else None
    rig.start()
    wait_for(lambda: rig.decode.failed.get(job.call.transfer_id) == "cancelled by the sender")
    rig.wait_until_idle()
    assert len(rig.chunks) == 2
    assert job.job_id not in rig.ended


def test_a_decode_node_that_closes_the_transfer_stops_the_job(make_rig):
    rig = make_rig()
    job, _ = rig.submit(prompt(80))
    rig.before_layer = lambda layer: rig.decode.inbox.close(job.call.transfer_id)
    rig.start()
    assert isinstance(rig.result(job), AbortedError)
    rig.wait_until_idle()
    assert rig.decode.completed == {}


def test_a_refused_frame_ends_the_job_before_the_rest_is_computed(make_rig):
    rig = make_rig()
    job, _ = rig.submit(prompt(80))  # ten chunks
    inbox, accept, has_failed = rig.decode.inbox, rig.decode.inbox.accept, threading.Event()
    inbox._on_failed = lambda transfer_id, reason: has_failed.set()

    def alter_the_second_chunk(header, payload):
        return accept(header, memoryview(bytes(len(payload))) if len(rig.chunks) > 1 else payload)

    inbox.accept = alter_the_second_chunk
    rig.before_layer = lambda layer: len(rig.chunks) < 3 or has_failed.wait(30)
    rig.start()
    result = rig.result(job)
    assert isinstance(result, AbortedError)
    assert result.message.endswith("refused a frame: CORRUPT")
    rig.wait_until_idle()
    assert len(rig.chunks) <= 3
    assert rig.decode.completed == {}


def test_a_failed_push_leaves_a_prefix_cache_that_makes_the_retry_cheap(make_rig):
    rig = make_rig().start()
    job, _ = rig.submit(prompt(24), transfer_id=b"x" * 16)
    assert isinstance(rig.result(job), AbortedError)
    assert rig.decode.completed == {}
    result, blocks = rig.prefill(prompt(24))
    assert result.num_cached_tokens >= 8  # computed before the loop learns that the push failed
    assert result.num_computed_tokens == 24 - result.num_cached_tokens
    assert rig.decode.cache.context(blocks, 24) == prompt(24)


def test_stopping_answers_every_job_without_waiting_for_its_push(make_rig):
    rig = make_rig().start()
    rig.decode.gate.clear()
    jobs = [rig.submit(prompt(16, first=100 * (n + 1)))[0] for n in range(3)]
    rig.loop.submit(Stop())
    for error in map(rig.result, jobs):
        assert isinstance(error, PeerLostError)
        assert error.reason == "DRAINING"


def test_a_storm_of_prompts_and_cancels_leaks_no_block(make_rig):
    rig = make_rig(num_blocks=24, max_running=4, max_rows_per_step=16).start()
    kept = []
    for n in range(60):
        length = 5 + (n * 7) % 40
        job, blocks = rig.submit(prompt(length, first=10 * (n % 5)))
        if n % 3 == 1:
            rig.loop.submit(CancelJob(job.job_id))
        else:
            kept.append((job, blocks))
    for job, blocks in kept:
        assert isinstance(rig.result(job), PrefillFigures)
        assert rig.decode.cache.context(blocks, len(job.call.token_ids)) == list(job.call.token_ids)


class SlowConnector(InMemoryConnector):
    """A connector that connects when the test allows it."""

    def __init__(self):
        super().__init__({})
        self.gate = threading.Event()
        self.connecting = threading.Semaphore(0)

    def connect(self, address, spec):
        self.connecting.release()
        assert self.gate.wait(60)
        return super().connect(address, spec)


def test_pushes_that_connect_hold_their_place_until_they_have_also_when_they_are_cancelled(make_rig):
    """The threads of such pushes live until the decode node answers."""
    connector = SlowConnector()
    rig = make_rig(max_pushes=2, connector=connector).start()
    for decode in (rig.decode, rig.other_decode):
        job, _ = rig.submit(prompt(8), to=decode)
        assert connector.connecting.acquire(timeout=30)
        rig.loop.submit(CancelJob(job.job_id))
    rig.submit(prompt(8), to=rig.other_decode)
    assert not connector.connecting.acquire(timeout=0.5)
    connector.gate.set()
    last, _ = rig.submit(prompt(8))
    assert isinstance(rig.result(last), PeerLostError), "nobody listens"


def test_features_follow_the_layers_of_their_chunk(rig):
    """The forward pass writes features at its end, after its last layer."""
    rig.prefill(prompt(20))
    planes = [(plane, start) for plane, _, start, _ in rig.decode.regions]
    for start in (0, 8, 16):
        assert max(planes.index((plane, start)) for plane in ("k", "v")) < planes.index((FEATURES.name, start))


@pytest.mark.parametrize(
    ("features", "problem"),
    [(None, "lacks KV from token 0 of 20 on"), (OTHER_FEATURES, "refused a frame")],
    ids=["none", "of another head"],
)
def test_without_the_features_that_the_decode_node_expects_nothing_is_committed(make_rig, features, problem):
    rig = make_rig(features=features).start()
    result, _ = rig.prefill(prompt(20))
    assert isinstance(result, AbortedError)
    assert problem in result.message
    assert not rig.decode.completed


def groups_of(groups, *, num_tokens):
    ends = [groups.ending_at(layer, num_tokens=num_tokens) for layer in range(groups.num_layers)]
    return [group for group in ends if group is not None]


def cache_of(planes):
    return SimpleNamespace(planes=planes, layer_groups=(LayerGroup(tuple(range(planes[0].num_layers))),))


def test_layers_are_grouped_until_they_fill_a_frame():
    features = PlaneSpec("feature-0", 1, 1, 4096, "float32")
    planes = (PlaneSpec("k", 30, 3, 64, "float32"), PlaneSpec("v", 30, 3, 64, "float32"), features)
    groups = LayerGroups.of(cache_of(planes), frame_bytes=2 << 20)
    assert groups_of(groups, num_tokens=512) == [range(first, first + 5) for first in range(0, 30, 5)]
    assert groups_of(LayerGroups(num_layers=5, tokens_per_frame=1), num_tokens=8) == [range(n, n + 1) for n in range(5)]
    assert groups_of(LayerGroups(num_layers=9, tokens_per_frame=16), num_tokens=8)[-1] == range(8, 9)


def test_a_short_prompt_leaves_in_few_frames():
    """The plane is that of Llama-3.1-8B: 32 layers, 8 heads of 128 in bfloat16. A chunk may have 4096 rows."""
    plane = PlaneSpec("k", 32, 8, 128, "bfloat16")
    groups = LayerGroups.of(cache_of((plane,)), frame_bytes=2 << 20)
    assert len(groups_of(groups, num_tokens=4096)) == 32
    assert len(groups_of(groups, num_tokens=200)) == 7
    assert groups_of(groups, num_tokens=10) == [range(32)]


@pytest.mark.parametrize(("max_frame_bytes", "joined"), [(64, {range(2)}), (63, {range(1), range(1, 2)})])
def test_layers_that_wait_for_the_push_leave_together_if_they_fit_into_a_frame(make_rig, max_frame_bytes, joined):
    rig = make_rig(frame_bytes=32, max_frame_bytes=max_frame_bytes).start()  # a layer of a chunk has 32 bytes
    rig.decode.gate.clear()
    job, _ = rig.submit(prompt(16))
    wait_for(lambda: len(rig.stats) == 2)
    rig.decode.gate.set()
    assert isinstance(rig.result(job), PrefillFigures)
    assert {layers for plane, layers, *_, stop in rig.decode.regions if (plane, stop) == ("k", 16)} == joined


def test_each_prompt_of_a_chunk_is_pushed_in_frames_of_its_own_rows(make_rig):
    rig = make_rig(max_rows_per_step=32, frame_bytes=64, max_frame_bytes=128)  # 64: the bytes of 16 tokens in a layer
    jobs = [rig.submit(prompt(length, first=100 * length))[0] for length in (3, 20)]
    rig.start()
    assert [isinstance(rig.result(job), PrefillFigures) for job in jobs] == [True, True]
    layers = {(stop, layers) for plane, layers, _, stop in rig.decode.regions if plane == "k"}
    assert layers == {(3, range(2)), (20, range(1)), (20, range(1, 2))}


def test_frames_cover_layers_and_tokens_once_and_never_exceed_their_size():
    plane = PlaneSpec("k", 7, 4, 4, "float32")
    for max_frame_bytes, heads in itertools.product((64, 200, 450, 1000, 1 << 20), (range(4), range(1), range(2, 4))):
        cells = []
        for region in cut_frames(plane, heads, range(1, 6), 3, 40, max_frame_bytes=max_frame_bytes):
            assert region.num_bytes(plane) <= max_frame_bytes
            assert region.heads == heads
            cells += [(layer, token) for layer in region.layers for token in region.tokens]
        assert sorted(cells) == [(layer, token) for layer in range(1, 6) for token in range(3, 40)]


def push_threads():
    return {thread for thread in threading.enumerate() if thread.name == "kv-push"}


def test_pushes_are_bounded_also_those_of_cancelled_jobs(make_rig):
    """A decode node that accepts nothing occupies a bounded number of threads."""
    rig, of_other_tests = make_rig(max_pushes=2), push_threads()
    rig.decode.gate.clear()
    stuck = [rig.submit(prompt(8, first=100 * (n + 1)))[0] for n in range(4)]
    rig.start()
    assert rig.decode.is_writing.wait(30)
    for job in reversed(stuck):
        rig.loop.submit(CancelJob(job.job_id))
    jobs = [rig.submit(prompt(8, first=1000 * (n + 1))) for n in range(4)]
    urgent, _ = rig.submit(prompt(8, first=9000), priority=1)
    wait_for(lambda: rig.loop.num_waiting == 5)
    assert len(push_threads() - of_other_tests) == 1, "one decode node has half of the places"
    rig.decode.gate.set()
    for job, _ in jobs:
        assert isinstance(rig.result(job), PrefillFigures)
    assert isinstance(rig.result(urgent), PrefillFigures)
    assert rig.computed.index(9000) < rig.computed.index(2000)


def test_a_decode_node_that_takes_nothing_leaves_pushes_to_the_others(make_rig):
    rig = make_rig(max_pushes=4)
    rig.decode.gate.clear()
    stuck = [rig.submit(prompt(8, first=100 * (n + 1)))[0] for n in range(8)]
    rig.start()
    assert rig.decode.is_writing.wait(30)
    for n in range(4):
        result, _ = rig.prefill(prompt(8, first=1000 * (n + 1)), to=rig.other_decode)
        assert isinstance(result, PrefillFigures)
    assert rig.ended.keys().isdisjoint(job.job_id for job in stuck)
    rig.decode.gate.set()
    for job in stuck:
        assert isinstance(rig.result(job), PrefillFigures)
