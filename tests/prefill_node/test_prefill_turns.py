"""A prefill loop that shares its processors: it gives its turn back between layers, and results are the same."""

from __future__ import annotations

import collections
import itertools
import threading

import pytest

from outrider.engine.step_progress import StepProgress
from outrider.profile import Part
from prefill_node.jobs import Stop
from prefill_node.push import KvPush
from tests.support.fake_clock import FakeClock
from tests.support.scripted_turns import ScriptedTurns, slow_down

NUM_LAYERS = 2  # of the scripted cache
PROMPT = list(range(100, 120))  # three chunks


@pytest.mark.parametrize(
    ("is_over", "layers_in_a_turn"), [(True, 1), (False, NUM_LAYERS)], ids=["others wait", "nobody waits"]
)
def test_every_layer_is_in_a_turn_that_ends_with_the_forward_or_between_layers(make_rig, is_over, layers_in_a_turn):
    turns = ScriptedTurns(is_over=is_over)
    rig = make_rig(cpu_turns=turns)
    layers = collections.Counter()  # number of layers by turn; 0: outside of turns
    rig.before_layer = lambda layer: layers.update([turns.num_taken if turns.is_held else 0])
    rig.start()
    _, blocks = rig.prefill(PROMPT)
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT
    rig.wait_until_idle()
    num_turns = 3 * NUM_LAYERS // layers_in_a_turn
    assert layers == dict.fromkeys(range(1, num_turns + 1), layers_in_a_turn)
    assert turns.num_taken == num_turns
    assert not turns.is_held


def test_each_layer_is_leased_for_as_long_as_it_is_expected_to_take(make_rig):
    turns = ScriptedTurns(is_over=True)
    rig = make_rig(cpu_turns=turns)
    at_layers = []
    rig.before_layer = lambda layer: at_layers.append(
        (turns.kept_for[-1], rig.loop.progress.current_step.expected_seconds / NUM_LAYERS)
    )
    rig.start()
    rig.prefill(PROMPT)
    rig.wait_until_idle()
    assert len(at_layers) == 3 * NUM_LAYERS
    assert all(leased == expected > 0.0 for leased, expected in at_layers)


def test_time_without_the_processors_is_counted_as_that_and_nothing_else_is(make_rig):
    now, spent = 0, []

    def pass_time(nanoseconds):
        nonlocal now
        now += nanoseconds

    turns = ScriptedTurns(num_refusals=1, is_over=True)
    turns.on_refusal = lambda: pass_time(1000)
    rig = make_rig(cpu_turns=turns)
    rig.before_layer = lambda layer: pass_time(1)
    rig.engine.clock._now = lambda: now
    rig.engine.clock.restart()
    tell = rig.loop._emit
    rig.loop._emit = lambda ended, stats: (stats and spent.append(stats.nanoseconds), tell(ended, stats))
    rig.start()
    rig.prefill(PROMPT)
    rig.wait_until_idle()
    assert [parts[Part.CPU_TURN] for parts in spent] == [2 * 1000] * 3  # waited before and within the forward pass
    # The parts of a step add up to its time.
    assert [sum(parts.values()) for parts in spent] == [2 * 1000 + NUM_LAYERS] * 3


def test_a_long_wait_within_a_chunk_is_no_death(make_rig):
    turns = ScriptedTurns(num_refusals=1, is_over=True)
    rig = make_rig(cpu_turns=turns)
    current_step = []
    rig.before_layer = lambda layer: current_step.append(rig.loop.progress.current_step)
    turns.on_refusal = lambda: current_step.append(rig.loop.progress.current_step)
    rig.start()
    rig.prefill(PROMPT)
    rig.wait_until_idle()
    waiting, computing = current_step[0::2], current_step[1::2]
    assert len(waiting) == len(computing) == 3 * NUM_LAYERS
    assert all(snapshot.expected_seconds == 0.0 and snapshot.started is None for snapshot in waiting)
    assert all(snapshot.expected_seconds > 0.0 for snapshot in computing)
    assert len({snapshot.mark for snapshot in computing}) == len(computing)  # the mark changes


@pytest.mark.parametrize("place", ["command", "plan", "forward", "answer"])
def test_a_thread_that_hangs_anywhere_in_a_step_shows_a_step_that_grows_old(make_rig, place):
    rig, clock = make_rig(), FakeClock()
    rig.loop.progress = progress = StepProgress(clock)
    owner, name = {
        "command": (rig.loop, "_add"),
        "plan": (rig.loop._scheduler, "plan"),
        "forward": (rig, "before_layer"),
        "answer": (rig.loop, "_emit"),
    }[place]
    ages = slow_down(owner, name, progress, clock)
    rig.start()
    rig.prefill(PROMPT)
    rig.wait_until_idle()
    assert ages
    assert set(ages) == {3.0}


def test_a_node_that_stops_waits_for_nobody(make_rig):
    turns = ScriptedTurns(num_refusals=10**9)
    refused = threading.Event()
    turns.on_refusal = refused.set
    rig = make_rig(cpu_turns=turns).start()
    rig.submit(PROMPT)
    assert refused.wait(30)
    rig.stop()


def test_a_node_that_fails_keeps_nobody_waiting(make_rig):
    turns = ScriptedTurns()
    rig = make_rig(cpu_turns=turns)

    def fail(layer):
        raise ZeroDivisionError

    rig.before_layer = fail
    rig.submit(PROMPT)
    with pytest.raises(ZeroDivisionError):
        rig.loop.step()
    assert turns.num_taken == 1
    assert not turns.is_held
    rig.before_layer = lambda layer: None
    rig.start().wait_until_idle()  # ends the push that has begun


class Waited(ScriptedTurns):
    """Turns for which others always wait, but which never last for `TURN_SECONDS`."""

    def __init__(self):
        super().__init__()
        self.given_after = []  # number of layers computed in each turn
        self.num_layers = 0

    def is_over(self, seconds):
        assert self.is_held
        return seconds == 0.0

    def give(self):
        if self.is_held:
            self.given_after.append(self.num_layers)
        super().give()
        self.num_layers = 0


def test_a_turn_outlasts_a_prompts_end_until_a_decode_node_has_its_kv(make_rig):
    """There are two prompts of one chunk each. The first one's KV arrives during the second one's first layer."""
    turns = Waited()
    rig = make_rig(cpu_turns=turns)
    arrived = threading.Event()
    push_ended = rig.loop._push_ended
    rig.loop._push_ended = lambda *outcome: (push_ended(*outcome), arrived.set())
    layers = []

    def before_layer(layer):
        layers.append(layer)
        turns.num_layers += 1
        if len(layers) == NUM_LAYERS + 1:
            assert arrived.wait(10.0)

    rig.before_layer = before_layer
    jobs = [rig.submit(PROMPT[:8])[0], rig.submit(PROMPT[8:16])[0]]
    rig.start()
    for job in jobs:
        rig.result(job)
    rig.wait_until_idle()
    assert turns.given_after == [NUM_LAYERS + 1, NUM_LAYERS - 1]
    assert not turns.is_held


def test_a_turn_ends_with_a_chunk_that_ends_no_prompt_and_with_the_last_prompt(make_rig):
    turns = Waited()
    rig = make_rig(cpu_turns=turns)
    rig.before_layer = lambda _layer: setattr(turns, "num_layers", turns.num_layers + 1)
    rig.start()
    rig.prefill(PROMPT)  # three chunks
    rig.wait_until_idle()
    assert turns.given_after == [NUM_LAYERS] * 3


@pytest.mark.parametrize("place", ["_finish", "_report_chunk", "_take_commands", "_answer", "_plan"])
def test_a_failure_beside_the_forward_keeps_nobody_waiting(make_rig, place):
    turns = Waited()
    rig = make_rig(cpu_turns=turns)
    rig.submit(PROMPT[:8])
    rig.submit(PROMPT[8:16])
    whole = getattr(rig.loop, place)

    def fail(*given):
        if turns.is_held:
            raise ZeroDivisionError
        return whole(*given)

    setattr(rig.loop, place, fail)
    with pytest.raises(ZeroDivisionError):
        rig.loop.run()
    assert not turns.is_held
    setattr(rig.loop, place, whole)
    rig.start().wait_until_idle()


def test_a_stop_does_not_wait_for_pushes_in_its_turn(make_rig, monkeypatch):
    turns = Waited()
    rig = make_rig(cpu_turns=turns)
    held, join = [], KvPush.join
    monkeypatch.setattr(KvPush, "join", lambda push, seconds: (held.append(turns.is_held), join(push, seconds)))
    stop = itertools.chain([lambda: rig.loop.submit(Stop())], itertools.repeat(lambda: None))
    rig.before_layer = lambda _layer: next(stop)()
    rig.submit(PROMPT[:8])
    rig.submit(PROMPT[8:16])
    rig.loop.run()
    assert held
    assert not any(held)


def test_jobs_that_wait_for_blocks_leave_the_turn_to_others(make_rig):
    turns = Waited()
    rig = make_rig(cpu_turns=turns, num_blocks=4)  # enough for one prompt, whose push pins them
    rig.decode.gate.clear()
    held, wait, has_waited = [], rig.loop._wait_for_command, threading.Event()

    def waiting():
        held.append(turns.is_held)
        if rig.chunks:
            has_waited.set()
        wait()

    rig.loop._wait_for_command = waiting
    jobs = [rig.submit(PROMPT[:12])[0], rig.submit(PROMPT[4:16])[0]]
    rig.start()
    assert has_waited.wait(10.0)
    num_forwards = len(rig.chunks)
    rig.decode.gate.set()
    for job in jobs:
        rig.result(job)
    rig.wait_until_idle()
    assert not any(held)
    assert num_forwards < len(rig.chunks)


def test_a_turn_that_has_lasted_ends_with_its_chunk(make_rig):
    """Others have waited for `TURN_SECONDS`, so they do not wait for a prompt's KV as well."""
    turns = ScriptedTurns(is_over=True)
    rig = make_rig(cpu_turns=turns)
    jobs = [rig.submit(PROMPT[:8])[0], rig.submit(PROMPT[8:16])[0]]
    rig.start()
    for job in jobs:
        rig.result(job)
    rig.wait_until_idle()
    assert turns.num_taken == 2 * NUM_LAYERS
