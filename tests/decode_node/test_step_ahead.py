"""Steps of plain decoding that are prepared and launched before the previous step is committed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from decode_node import decode_loop
from outrider.profile import Capture, ProfileOptions, StartProfile
from outrider.request import FinishReason
from outrider.session import Granted, KvFailed, SampleDone, SequenceGroupFailed
from tests.decode_node.conftest import SHORT_PROMPT, Node
from tests.decode_node.tiny_node import PROMPT
from tests.support.fake_clock import FakeClock
from tests.support.fake_device import snapshot_of
from tests.support.fake_drafts import TextDrafts

PROMPTS = [(1, 2, 3), (4, 5), (9,)]
LONG_PROMPT = tuple(range(10, 40))


@pytest.fixture
def node():
    return Node(is_asynchronous=True)


@pytest.fixture
def early(monkeypatch):
    """A list of the numbers of sequences, one for each step launched before the previous one was committed."""
    found = []

    def launch_next(batch, step, *arguments):
        launched = original(batch, step, *arguments)
        found.extend([] if launched is None else [len(step.planned)])
        return launched

    original = decode_loop.launch_next
    monkeypatch.setattr(decode_loop, "launch_next", launch_next)
    return found


def passes_of(node, run):
    """Returns the rows of all forward passes of `run()`, in the order of their launch."""
    found, forward = [], node.engine.runner.forward
    node.engine.runner.forward = lambda rows: (found.append(snapshot_of(rows)), forward(rows))[1]
    run()
    return found


def test_the_passes_are_those_of_a_node_that_prepares_nothing(early, monkeypatch):
    """This holds at the ends of blocks, too, and if answers end at different lengths."""

    def passes():
        node = Node(is_asynchronous=True)
        groups = [
            node.open(prompt=prompt, sampling={"max_tokens": 12 + 9 * index}) for index, prompt in enumerate(PROMPTS)
        ]
        found = passes_of(node, node.run)
        assert [node.tokens(group) for group in groups] == [
            node.model.generate(prompt, 12 + 9 * index) for index, prompt in enumerate(PROMPTS)
        ]
        node.assert_nothing_is_held()
        return found

    prepared = passes()
    assert early == [3] * 10 + [2] * 8 + [1] * 8  # not the first step, nor steps after a sequence's end
    monkeypatch.setattr(decode_loop, "lay_out_next", lambda *_: None)
    assert passes() == prepared


def test_a_step_is_launched_before_the_one_before_it_is_committed(node):
    node.open(sampling={"max_tokens": 4})
    node.iterate()
    (sequence,) = node.engine.scheduler.running
    lengths = []
    node.engine.runner.on_launch = lambda: lengths.append(len(sequence.token_ids))
    node.run()
    # The second step, after the prompt, is planned normally; later ones are launched before the tokens before them are
    # committed.
    assert lengths == [4, 4, 5]


def test_a_stop_token_ends_an_answer_before_another_step_begins(node):
    text = node.model.generate(PROMPTS[0], 20)
    stop = next(token for index, token in enumerate(text) if index > 4 and token not in text[:index])
    group = node.open(sampling={"max_tokens": 20}, stop_token_ids=(stop,))
    other = node.open(prompt=PROMPTS[1], sampling={"max_tokens": 20})
    rows = sum(map(len, passes_of(node, node.run)))
    assert node.tokens(group) == text[: text.index(stop) + 1]
    assert node.find(SampleDone, group)[0].reason is FinishReason.STOP
    assert rows == text.index(stop) + 1 + 20
    assert node.tokens(other) == node.model.generate(PROMPTS[1], 20)
    node.assert_nothing_is_held()


def test_drafts_that_may_come_are_waited_for(early, make_node):
    node = make_node(drafts=TextDrafts(lambda _tokens, _num: None))
    node.engine.runner.is_asynchronous = True
    node.open()
    node.open(num_speculative_tokens=0)
    for _ in range(10):
        node.iterate()
    assert early == []


def test_a_cancel_is_handled_after_the_step_that_runs(node, early):
    first, second = (node.open(prompt=prompt, sampling={"max_tokens": 30}) for prompt in PROMPTS[:2])
    for _ in range(6):
        node.iterate()
    assert early == [2] * 5
    node.engine.runner.on_wait = lambda: node.cancel(first)
    node.iterate()
    node.engine.runner.on_wait = lambda: None
    assert early == [2] * 5
    node.run()
    assert len(node.tokens(first)) == 7
    assert set(early[5:]) == {1}
    assert not node.find(SampleDone, first)
    assert node.tokens(second) == node.model.generate(PROMPTS[1], 30)
    node.assert_nothing_is_held()


def test_what_the_pool_cannot_hold_is_not_reserved_ahead():
    node = Node(num_blocks=8, is_asynchronous=True)
    node.groups._admission._mean_output_tokens = 1.0  # admission expects no growth, so sequences are preempted
    groups = [node.open(prompt=prompt, sampling={"max_tokens": 20}) for prompt in PROMPTS]
    node.run()
    assert node.num_preempted > 0
    assert [node.tokens(group) for group in groups] == [node.model.generate(prompt, 20) for prompt in PROMPTS]
    node.assert_nothing_is_held()


def test_a_transfer_that_never_ends_is_given_up_while_answers_go_on(node, early):
    node.open(sampling={"max_tokens": 60})
    lost = node.open(prompt=LONG_PROMPT)
    for _ in range(5):
        node.iterate()
    assert early
    node.clock.advance(node.transfer_timeout_seconds + 1)
    num_early = len(early)
    node.iterate()
    assert len(early) == num_early + 1
    assert node.find(KvFailed, lost)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 10},
    ],
)
def test_a_real_models_answers_are_the_same(early, make_node, sampling):
    """Tokens are committed after the next forward pass has begun, whatever the batches and penalties are."""

    def answers(*, is_asynchronous):
        node = make_node(local_lookup="none", num_speculative_tokens=0)
        node.engine.runner.is_asynchronous = is_asynchronous
        groups = [node.open(prompt=PROMPT[index:], sampling={**sampling, "seed": index}) for index in range(4)]
        node.run()
        return [node.tokens(group, sample) for group in groups for sample in range(sampling.get("n", 1))]

    assert answers(is_asynchronous=True) == answers(is_asynchronous=False)
    assert len(early) > 20


def test_the_wait_for_the_device_belongs_to_sampling(node, early):
    """Phases have the same times as without a step ahead, since the next batch is prepared before the wait."""
    now = [0]
    node.engine.clock.__init__(lambda: now[0])
    node.engine.runner.on_wait = lambda: now.__setitem__(0, now[0] + 1000)
    node.open(sampling={"max_tokens": 6})
    node.run()
    assert len(early) == 4
    assert [stats.nanoseconds for stats in node.stats if stats.nanoseconds["batch"]] == []
    assert [stats.nanoseconds["sampling"] for stats in node.stats] == [1000] * 6


def test_the_seconds_of_steps_add_up_to_the_time_that_has_passed(node, early):
    """The seconds that a profile needs to begin a trace count for no step."""
    clock = node.loop.progress.clock = FakeClock()
    observed = []
    node.loop._drafts.observe_step = lambda *, seconds, **_: observed.append(seconds)
    commit = node.loop._commit
    node.loop._commit = lambda *verified: (clock.advance(1.0), commit(*verified))[1]
    node.engine.runner.on_wait = lambda: clock.advance(10.0)
    node.loop._profiler._start_trace = lambda: (
        clock.advance(500.0),
        SimpleNamespace(step_ended=int, stop=int, export=bytes),
    )[1]
    node.loop.submit(StartProfile(Capture(ProfileOptions(num_steps=3, num_traced_steps=2), on_done=lambda _: None)))
    node.open(sampling={"max_tokens": 6})
    node.run()
    assert len(early) == 4
    assert [stats.seconds for stats in node.stats] == observed == [11.0] * 6
    assert clock() == 500.0 + 6 * 11.0


def test_a_node_that_stops_waits_for_the_step_that_the_device_computes(node, early):
    group = node.open(sampling={"max_tokens": 40})
    commit = node.loop._commit
    node.loop._commit = lambda *verified: (early and node.loop.stop(), commit(*verified))[1]
    free_all = node.groups.free_all
    node.groups.free_all = lambda: (computing.append(node.engine.runner.is_computing), free_all())
    computing = []
    node.loop.run()
    assert computing == [False]
    assert node.tokens(group) == node.model.generate(SHORT_PROMPT, 3)
    node.assert_nothing_is_held()


def test_a_retarget_behind_a_cancel_comes_before_its_deadline_counts(node):
    running = node.open(sampling={"max_tokens": 60})
    waiting = node.open(prompt=LONG_PROMPT)
    node.iterate()
    node.ingest.inbox.fail(waiting[::-1], "scripted failure")
    node.iterate()
    assert node.find(KvFailed, waiting)

    def say():
        node.clock.advance(node.transfer_timeout_seconds)
        node.cancel(running)
        node.retarget(waiting, bytes(15) + b"2")

    say()
    node.iterate()
    node.run()
    assert not node.find(SequenceGroupFailed, waiting)
    assert len(node.find(Granted, waiting)) == 2
