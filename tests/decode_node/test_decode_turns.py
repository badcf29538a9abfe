"""A decode loop that shares its processors: its turns, and what it does during the turns of others."""

from __future__ import annotations

import pytest

from outrider.drafting.book import StepDrafts
from outrider.engine.scheduler import StepPlan
from outrider.engine.step_progress import StepProgress
from outrider.profile import Part
from outrider.session import Granted, SampleTokens
from tests.decode_node.conftest import SHORT_PROMPT, Node
from tests.support.fake_clock import FakeClock
from tests.support.fake_drafts import NoDrafts
from tests.support.scripted_turns import ScriptedTurns, slow_down

LONG_PROMPT = tuple(range(10, 40))


@pytest.fixture
def turns():
    return ScriptedTurns()


@pytest.fixture
def node(turns):
    return Node(cpu_turns=turns)


def test_each_step_is_a_turn_and_nothing_else_is(node, turns):
    group = node.open(prompt=SHORT_PROMPT)
    runner = node.engine.runner
    forward = runner.forward
    turn_of_steps = []  # 0: in none
    runner.forward = lambda rows: (turn_of_steps.append(turns.num_taken if turns.is_held else 0), forward(rows))[1]
    emitting_in_turn = []
    emit = node.loop._emit
    node.loop._emit = lambda *told: (emitting_in_turn.append(turns.is_held), emit(*told))
    node.run()
    assert node.tokens(group) == node.model.generate(SHORT_PROMPT, 5)
    assert turn_of_steps == [1, 2, 3, 4, 5]
    assert turns.num_taken == 5
    assert not turns.is_held
    assert not any(emitting_in_turn)  # the work after a step needs no turn


def test_an_idle_node_takes_no_turn(node, turns):
    node.iterate()
    assert turns.num_taken == 0


def test_a_grant_does_not_wait_for_a_turn(node, turns):
    node.open(prompt=SHORT_PROMPT)
    turns.num_refusals = 3
    waiting = []
    turns.on_refusal = lambda: waiting or waiting.append(node.open(prompt=LONG_PROMPT))
    granted_before_the_step = []

    def emit(events, stats):
        node._emit(events, stats)
        if stats is None and waiting and node.find(Granted, waiting[0]):
            granted_before_the_step.append(turns.num_taken == 0)

    node.loop._emit = emit
    node.iterate()
    assert granted_before_the_step[0]


def test_what_arrives_while_others_compute_is_in_the_next_step(node, turns):
    first = node.open(prompt=SHORT_PROMPT)
    second = node.open(prompt=LONG_PROMPT)
    turns.num_refusals = 1

    def arrive():
        turns.on_refusal = lambda: None
        node.push(second, LONG_PROMPT)

    turns.on_refusal = arrive
    node.iterate()
    assert [len(node.find(SampleTokens, group)) for group in (first, second)] == [1, 1]


def test_a_turn_that_nothing_is_left_for_is_given_back(node, turns):
    group = node.open(prompt=SHORT_PROMPT)
    turns.num_refusals = 1
    turns.on_refusal = lambda: node.cancel(group)
    node.iterate()
    assert not turns.is_held
    assert node.find(SampleTokens, group) == []


def test_waiting_for_blocks_keeps_nobody_from_computing(node, turns):
    """There is work, but nothing can be planned, since transfers in progress hold the blocks."""
    node.open(prompt=SHORT_PROMPT)
    node.engine.scheduler.assign_rows = lambda *_: StepPlan()
    held = []
    node.loop._inbox.wait = lambda _seconds: held.append(turns.is_held)
    node.iterate()
    assert held == [False, False]  # waits for a command, then for blocks


class UnsentDrafts(NoDrafts):
    has_unsent = False

    def commit(self, updates, tables=None, *, min_reach=0.0, wakes=True):
        self.has_unsent = not wakes

    def wake(self):
        self.has_unsent = False

    def begin_step(self, verified):
        self.has_unsent = False


def test_draft_nodes_get_what_was_committed_at_once_where_the_next_step_waits(turns):
    drafts = UnsentDrafts()
    node = Node(cpu_turns=turns, drafts=drafts, num_speculative_tokens=3)
    node.loop._drafts._loop_clock = lambda: 0  # the streams share the target's processors
    node.open(prompt=SHORT_PROMPT, sampling={"max_tokens": 20})
    unsent = []
    turns.on_refusal = lambda: unsent.append(drafts.has_unsent)
    node.iterate()
    assert drafts.has_unsent, "the next step takes it along"
    turns.num_refusals = 2  # the first without a wait
    node.iterate()
    assert unsent == [True, False]
    assert drafts.has_unsent
    turns.num_refusals = 0
    node.engine.scheduler.assign_rows = lambda *_: StepPlan()
    node.loop._inbox.wait = lambda _seconds: unsent.append(drafts.has_unsent)
    node.iterate()
    assert unsent == [True, False, False]


def test_streams_with_processors_of_their_own_send_what_was_committed_before_the_next_forward(turns):
    """On a GPU, a read of features waits for all forwards that were queued before it."""
    drafts = UnsentDrafts()
    node = Node(cpu_turns=turns, drafts=drafts, num_speculative_tokens=3)
    node.open(prompt=SHORT_PROMPT, sampling={"max_tokens": 20})
    node.iterate()
    assert not drafts.has_unsent


def test_time_without_the_processors_is_counted_as_that_and_nothing_else_is(node, turns):
    now = 0

    def pass_time():
        nonlocal now
        now += 7

    node.open(prompt=SHORT_PROMPT)
    node.loop._handle_commands(wait=False)
    node.engine.clock._now = lambda: now
    node.engine.clock.restart()
    turns.num_refusals, turns.on_refusal = 3, pass_time
    assert node.loop._take_turn()
    spent = node.engine.clock.take()
    assert spent.pop(Part.CPU_TURN) == 3 * 7
    assert not any(spent.values())


def test_drafts_are_chosen_by_what_a_step_costs_without_the_wait(node, turns):
    clock, seconds = FakeClock(), []
    node.loop.progress = StepProgress(clock)
    node.loop._drafts.observe_step = lambda **observed: seconds.append(observed["seconds"])
    forward = node.engine.runner.forward
    node.engine.runner.forward = lambda rows: (clock.advance(0.25), forward(rows))[1]
    turns.num_refusals, turns.on_refusal = 2, lambda: clock.advance(5.0)
    node.open(prompt=SHORT_PROMPT)
    node.run()
    assert seconds == [0.25] * 5


@pytest.mark.parametrize("is_wanted", [False, True])
def test_drafts_are_not_waited_for_in_a_turn_that_others_wait_for(is_wanted):
    waits = []

    class SlowDrafts(NoDrafts):
        def take(self, sequence_ids, *, wait_seconds):
            waits.append(wait_seconds)
            return StepDrafts()

    turns = ScriptedTurns(is_over=is_wanted)
    node = Node(num_speculative_tokens=3, cpu_turns=turns, drafts=SlowDrafts(), max_wait_seconds=0.5)
    node.open(prompt=SHORT_PROMPT)
    node.iterate()
    waits.clear()
    node.loop._drafts._last_step_seconds = 1.0
    node.iterate()
    assert waits == [0.0 if is_wanted else 0.2]


def test_a_node_that_stops_while_others_compute_ends(node, turns):
    node.open(prompt=SHORT_PROMPT)
    turns.num_refusals, turns.on_refusal = 10**9, node.loop.stop
    node.loop.run()
    assert turns.num_taken == 0
    assert not turns.is_held


def test_a_node_that_fails_keeps_nobody_waiting(node, turns):
    node.open(prompt=SHORT_PROMPT)

    def fail(rows):
        raise ZeroDivisionError

    node.engine.runner.forward = fail
    with pytest.raises(ZeroDivisionError):
        node.loop.run()
    assert turns.num_taken == 1
    assert not turns.is_held


@pytest.mark.parametrize("place", ["open", "gather", "plan", "forward", "sample", "commit", "emit"])
def test_a_thread_that_hangs_anywhere_in_a_step_shows_a_step_that_grows_old(node, place):
    clock = FakeClock()
    node.loop.progress = progress = StepProgress(clock)
    engine = node.engine
    owner, name = {
        "open": (node.groups, "open"),
        "gather": (node.loop._drafts, "gather"),
        "plan": (engine.scheduler, "reserve"),
        "forward": (engine.runner, "forward"),
        "sample": (engine.sampler, "sample"),
        "commit": (engine.sampler, "commit"),
        "emit": (node.loop, "_emit"),
    }[place]
    ages = slow_down(owner, name, progress, clock)
    node.open(prompt=SHORT_PROMPT)
    node.iterate()
    assert ages
    assert set(ages) == {3.0}
    assert (progress.current_step.expected_seconds, progress.age_seconds()) == (0.0, 0.0)


def test_a_thread_that_waits_for_its_turn_or_for_a_command_is_not_late(node, turns):
    clock = FakeClock()
    node.loop.progress = progress = StepProgress(clock)
    current_step = []
    turns.num_refusals = 3
    turns.on_refusal = lambda: (clock.advance(5.0), current_step.append(progress.current_step))
    node.open(prompt=SHORT_PROMPT)
    node.loop._inbox.wait = lambda _seconds: (clock.advance(5.0), current_step.append(progress.current_step))
    node.iterate()
    for_a_command, at_once, *for_its_turn = current_step
    assert at_once.started is not None  # the first request for a turn does not wait
    assert len(for_its_turn) == 2
    assert all((waiting.expected_seconds, waiting.started) == (0.0, None) for waiting in (for_a_command, *for_its_turn))
