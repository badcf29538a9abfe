"""What a decode node's step does outside its forward pass, in instructions of the interpreter instead of seconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 2
MOST_WARM_UP_STEPS = 20

MOST_INSTRUCTIONS = 4500
"""Of a sequence and step: 4100 as this is written, 3400 among 64; 300 of them the benchmark's own. Some 10 ns each."""


@pytest.fixture(scope="module")
def step_cost():
    spec = importlib.util.spec_from_file_location("step_cost", ROOT / "benchmarks" / "step_cost.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Instructions:
    """Counts the interpreter's instructions inside a `with`. A loop in C counts as one."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _trace(self, frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.number += event == "opcode"
        return self._trace


def instructions_by_sequence(step_cost, *, num_sequences, context):
    """Of one sequence and step, the message loop's part included."""
    bench = step_cost.Bench(num_sequences, context, num_targets=2)
    for _ in range(MOST_WARM_UP_STEPS):
        bench.step()
        if bench.stats is not None and bench.stats.num_drafts >= 0.95 * num_sequences:
            break
    else:
        pytest.fail("drafts are not verified")
    with Instructions() as counted:
        for _ in range(NUM_STEPS):
            bench.step()
    return counted.number / NUM_STEPS / num_sequences


@pytest.mark.usefixtures("steps_take_a_set_time")
def test_a_steps_work_grows_with_the_batch_and_not_faster_nor_with_the_context(step_cost):
    small = instructions_by_sequence(step_cost, num_sequences=16, context=100)
    assert instructions_by_sequence(step_cost, num_sequences=64, context=100) < 1.3 * small
    assert instructions_by_sequence(step_cost, num_sequences=16, context=1600) < 1.3 * small
    assert small < MOST_INSTRUCTIONS
