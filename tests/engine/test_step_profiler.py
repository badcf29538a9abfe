from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.kv_cache.block_pool import BlockPool, WindowPool
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.model_spec import ModelSpec
from outrider.engine.step_clock import StepClock
from outrider.engine.step_profiler import StepProfiler
from outrider.engine.torch_trace import TorchTrace
from outrider.profile import Capture, ProfileOptions, StepKind


class Phases:
    def __init__(self):
        self.is_measuring = False

    def start(self):
        self.is_measuring = True

    def take(self):
        return {"attention": 30, "linear": 50} if self.is_measuring else {}

    def stop(self):
        self.is_measuring = False


class Trace:
    def __init__(self):
        self.num_steps = 0
        self.is_stopped = False

    def step_ended(self):
        self.num_steps += 1

    def stop(self):
        self.is_stopped = True

    def export(self):
        return b"trace"


PLANES = (
    *(PlaneSpec(name, 30, 3, 64, "bfloat16") for name in ("k", "v")),
    PlaneSpec("feature-0", 1, 1, 576, "bfloat16"),
)


class Profiled:
    def __init__(self, planes=PLANES):
        self.scheduled = [SimpleNamespace(sequence=SimpleNamespace(kv=None))]
        self.phases = Phases()
        self.traces = []
        self.captured = []
        self.event_loop = 0
        self.profiler = StepProfiler(
            StepClock(),
            self.phases,
            planes=planes,
            read_event_loop=lambda: self.event_loop,
            start_trace=self.start_trace,
        )

    def start_trace(self):
        self.traces.append(Trace())
        return self.traces[-1]

    def begin(self, **options):
        capture = Capture(ProfileOptions(**options), self.captured.append)
        self.profiler.begin(capture)
        return capture

    def step(self, *, kind=StepKind.DECODE):
        self.event_loop += 7
        self.profiler.step_ended({"schedule": 3, "forward": 100}, kind=kind, num_rows=5, scheduled=self.scheduled)


@pytest.fixture
def profiled():
    return Profiled()


def test_the_longest_sequence_is_measured_with_what_it_holds_of_sliding_windows():
    """The layers are those of Gemma 3 270M, which has three without a window."""
    spec = ModelSpec(
        architecture="Gemma3ForCausalLM", num_layers=18, num_heads=4, num_kv_heads=1, head_dim=256, vocab_size=262_144,
        max_model_len=32_768, dtype="bfloat16", windows=(*(512,) * 5, 0) * 3,
    )  # fmt: skip
    sizes = {"num_blocks": 1000, "block_size": 16, "hash_seed": b""}
    window = WindowPool(window=512, max_step_tokens=256, first_block=1000, **sizes)
    pool = BlockPool(**sizes, windows=[window])
    arriving, computed, short = SequenceKV(pool), SequenceKV(pool), SequenceKV(pool)
    arriving.reserve(8000, arriving=8000)
    arriving.advance(8000)
    while computed.num_tokens < 8000:
        computed.reserve(8000)
        computed.advance(min(computed.num_tokens + 256, 8000))
    profiled = Profiled(spec.planes)
    whole = 8000 * spec.bytes_per_token
    for kv, share in ((arriving, 0.23), (computed, 0.26)):
        profiled.scheduled = [SimpleNamespace(sequence=SimpleNamespace(kv=each)) for each in (short, kv)]
        profiled.begin(num_steps=1)
        profiled.step()
        profile = profiled.captured[-1].profile
        assert profile.num_longest_tokens == 8000
        assert 3 / 18 * whole < profile.longest_kv_bytes <= share * whole


def test_steps_are_accounted_with_the_forward_split_into_its_phases(profiled):
    profiled.begin(num_steps=2)
    profiled.step()
    profiled.step(kind=StepKind.VERIFY)
    (captured,) = profiled.captured
    profile = captured.profile
    assert (profile.kv_bytes_per_token, profile.feature_bytes_per_token) == (2 * 30 * 3 * 64 * 2, 576 * 2)
    assert [step.kind for step in captured.profile.steps] == [StepKind.DECODE, StepKind.VERIFY]
    assert captured.profile.steps[1].nanoseconds == {
        "schedule": 3, "forward.attention": 30, "forward.linear": 50, "forward.rest": 20,
    }  # fmt: skip
    assert [step.event_loop_nanoseconds for step in captured.profile.steps] == [7, 7]
    assert captured.export_trace is None
    assert not profiled.traces
    assert not profiled.phases.is_measuring


def test_traced_steps_come_after_the_accounted_and_are_not_among_them(profiled):
    profiled.begin(num_steps=2, num_traced_steps=3)
    for _ in range(5):
        assert not profiled.captured
        profiled.step()
    (captured,) = profiled.captured
    assert len(captured.profile.steps) == 2
    assert captured.profile.num_traced_steps == profiled.traces[0].num_steps == 3
    assert profiled.traces[0].is_stopped
    assert captured.export_trace() == b"trace"


def test_a_profile_that_ends_early_hands_over_what_there_is(profiled):
    capture = profiled.begin(num_steps=2, num_traced_steps=5)
    for _ in range(3):
        profiled.step()
    profiled.profiler.end(capture)
    (captured,) = profiled.captured
    assert (len(captured.profile.steps), captured.profile.num_traced_steps) == (2, 1)
    assert captured.export_trace() == b"trace"
    assert profiled.traces[0].is_stopped
    profiled.profiler.end(capture)
    profiled.step()
    assert len(profiled.captured) == 1


def test_the_end_of_one_profile_is_not_that_of_the_next(profiled):
    first = profiled.begin(num_steps=1)
    profiled.step()
    profiled.begin(num_steps=1)
    profiled.profiler.end(first)
    assert profiled.phases.is_measuring
    profiled.step()
    assert len(profiled.captured) == 2


def test_a_trace_names_its_steps_and_what_torch_did_in_them():
    trace = TorchTrace()
    for _ in range(2):
        torch.ones(4, 4) @ torch.ones(4, 4)
        trace.step_ended()
    trace.stop()
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.export()))["traceEvents"]]
    assert {"step 0", "step 1"} <= set(names)
    assert names.count("aten::matmul") == 2
