"""Which source drafts for each sequence, in simulated batches where acceptance and costs are known."""

from __future__ import annotations

import itertools

import pytest

from outrider.speculation.acceptance_record import AcceptanceRecord
from outrider.speculation.ask_cost import CallCost
from outrider.speculation.draft_controller import PROBE_STEPS
from outrider.speculation.draft_tree import DRAFT_NODE
from tests.speculation.simulated_batch import CURVES
from tests.speculation.simulated_sources import FREE, HEAD, LOOKUP, SimulatedText, SourcesBatch, State

WARM_UP_STEPS = 80
LOOKUPS = (LOOKUP, {})
ENDLESS = 20_000


def head(forward_ms=3.0):
    """Returns a head whose forward takes, by default, one tenth of a plain step of one sequence."""
    seconds = forward_ms / 1000.0
    return (HEAD, {"forward_seconds": seconds, "row_seconds": seconds / 15, "read_seconds": seconds / 30})


MEASURED_HEAD = (HEAD, {"forward_seconds": 0.0008, "row_seconds": 0.0})


def rate(case, *sources, num_draft=5):
    kind, curve, num_sequences = case
    batch = SourcesBatch(kind, curve, num_sequences, sources=sources, num_draft=num_draft)
    batch.rate(WARM_UP_STEPS)
    return batch.rate(max(200, 1600 // num_sequences))


def shares(case, *, forward_ms=3.0):
    """Returns the rate of both sources divided by that of plain decoding, and by that of the best single source."""
    own = rate(case, head(forward_ms), LOOKUPS)
    plain = rate(case, num_draft=0)
    return own / plain, own / max(plain, rate(case, LOOKUPS), rate(case, head(forward_ms)))


ALL = list(itertools.product(("chat", "copied", "mixed", "hot", "poor"), ("linear", "stairs", "steep"), (1, 4, 16)))
FEW = [
    ("chat", "linear", 1),
    ("mixed", "linear", 4),
    ("hot", "stairs", 1),
    ("poor", "linear", 4),
    ("hot", "linear", 16),
]


def test_two_sources_are_hardly_slower_than_plain_decoding_or_the_better_of_them(is_full):
    missed = {}
    for case in ALL if is_full else FEW:
        of_plain, of_best = shares(case)
        if of_plain < 0.975 or of_best < 0.95:
            missed[case] = (of_plain, of_best)
    assert not missed


@pytest.mark.parametrize(("num_sequences", "least"), [(1, 1.3), (4, 1.2), (16, 0.98)])
def test_with_measured_prices_a_good_head_gains_and_never_costs_much(num_sequences, least):
    case = ("depths", f"measured {num_sequences}", num_sequences)
    assert rate(case, MEASURED_HEAD, LOOKUPS) > least * rate(case, num_draft=0)


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
def test_with_measured_prices_a_poor_head_costs_next_to_nothing(num_sequences):
    case = ("poor", f"measured {num_sequences}", num_sequences)
    assert rate(case, MEASURED_HEAD, LOOKUPS) > 0.975 * rate(case, num_draft=0)


def test_a_head_is_asked_where_its_first_token_alone_does_not_pay_and_its_siblings_do():
    case, slow_head = ("drawn", "measured 1", 1), (HEAD, {"forward_seconds": 0.002, "row_seconds": 0.0})
    batch = SourcesBatch(*case, sources=[slow_head])
    batch.rate(WARM_UP_STEPS)
    num_before, num_steps = batch.proposers[HEAD].num_calls, 400
    assert batch.rate(num_steps) > 1.1 * rate(case, num_draft=0)
    assert batch.proposers[HEAD].num_calls - num_before > 0.95 * num_steps


def test_a_sequence_that_may_not_draft_costs_no_call():
    batch = SourcesBatch("chat", "linear", 2, sources=[head(), LOOKUPS], length=ENDLESS)
    batch.forbid_drafts(0)
    batch.rate(100)
    assert [sorted(proposer.asked) for proposer in batch.proposers.values()] == [[1], [1]]


def test_what_is_known_of_sequences_that_have_ended_is_forgotten():
    batch = SourcesBatch("chat", "linear", 4, sources=[head(), LOOKUPS], has_draft_node=True, length=30)
    batch.rate(300)
    sources = batch.gatherer._controller._sources
    assert set(sources) == {HEAD, LOOKUP, DRAFT_NODE}
    assert all(source.records.keys() <= set(batch.sequence_ids) for source in sources.values())


def test_where_a_text_is_copied_in_parts_two_sources_are_faster_than_each():
    assert shares(("mixed", "linear", 1))[1] > 1.07


@pytest.mark.parametrize("kind", ["chat", "hot"])
def test_sixteen_sequences_with_a_dear_head_are_left_plain(kind):
    batch = SourcesBatch(kind, "steep", 16, sources=[head(30.0)])
    batch.rate(WARM_UP_STEPS)
    assert batch.rate(200) > 0.98 * rate((kind, "steep", 16), num_draft=0)
    assert sum(map(len, batch.verified[-100:])) < 20


def test_each_sequence_of_a_batch_has_its_own_order():
    batch = SourcesBatch("hot+copied", "flat", 2, sources=[head(1.0), LOOKUPS], length=ENDLESS)
    batch.rate(300)
    late = [each for step in batch.verified[100:] for each in step]
    of_hot = [source for key, source, _ in late if key == 0]
    of_copied = [source for key, source, _ in late if key == 1]
    assert of_hot.count(HEAD) > 0.95 * len(of_hot) > 100
    assert of_copied.count(LOOKUP) > 0.85 * len(of_copied) > 100


def changing(batch, *states_and_lengths):
    """Replaces the text of the only sequence by one that passes through these states."""
    parts = [SimulatedText((state,), 1, length) for state, length in states_and_lengths]
    text = parts[0]
    for part in parts[1:]:
        text.grades += part.grades
        text.siblings += part.siblings
        for source in text.right:
            text.right[source] += part.right[source]
    batch.texts[0] = [text, 0]
    return batch


SURE = State(1e9, {8: 1.0}, {8: 0.97}, head=0.5)


def test_the_dearer_a_head_the_surer_it_must_be_to_draft_another_token():
    found = []
    for forward_ms in (1.0, 4.0):
        batch = SourcesBatch("chat", "linear", 1, sources=[head(forward_ms)])
        batch.rate(WARM_UP_STEPS)
        found.append(batch.gatherer._controller.min_reach(HEAD, 1))
    assert 0.0 < found[0] < found[1]


def test_a_head_is_not_asked_while_long_lookups_are_accepted_and_found_again_when_the_text_changes():
    batch = SourcesBatch("chat", "linear", 1, sources=[head(), LOOKUPS], length=ENDLESS)
    changing(batch, (SURE, 1500), (FREE, 1500))
    sizes = []
    while batch.texts[0][1] < 1500:
        batch.step()
        sizes.append(batch.proposers[HEAD].num_calls)
    settled = sizes[100:]
    assert settled[-1] - settled[0] <= len(settled) / PROBE_STEPS, "a trial now and then"
    batch.rate(150)
    before = batch.proposers[HEAD].num_calls
    batch.rate(100)
    assert batch.proposers[HEAD].num_calls - before > 80


@pytest.mark.parametrize(("num_sequences", "max_read"), [(1, 1 << 30), (1, 64), (4, 64)])
def test_a_head_is_asked_again_after_a_time_in_which_its_calls_were_slow(num_sequences, max_read):
    """A growing text has ever more unread tokens. A trial must not wait until credit covers it at the old price."""
    settings = {"forward_seconds": 0.0008, "row_seconds": 0.0, "read_seconds": 2e-5, "max_read": max_read}
    batch = SourcesBatch(
        "depths", f"measured {num_sequences}", num_sequences, sources=[(HEAD, settings), LOOKUPS], length=ENDLESS
    )
    batch.rate(WARM_UP_STEPS + 200)
    proposer = batch.proposers[HEAD]
    for factor, num_steps in ((10.0, 300), (0.1, 2000)):
        proposer.forward_seconds *= factor
        proposer.read_seconds *= factor
        batch.rate(num_steps)
    num_calls = proposer.num_calls
    batch.rate(200)
    assert proposer.num_calls - num_calls > 100, "as before"


def test_drafts_of_a_draft_node_compete_with_those_of_this_process():
    verified = {}
    for kind in ("hot", "chat"):
        batch = SourcesBatch(kind, "linear", 1, sources=[head()], has_draft_node=True, length=ENDLESS)
        batch.rate(300)
        verified[kind] = [source for step in batch.verified[100:] for _, source, _ in step]
        if kind == "hot":
            assert batch.proposers[HEAD].num_calls < 60, "the draft node's drafts are better and cost nothing"
    assert verified["hot"].count(DRAFT_NODE) > 0.9 * len(verified["hot"]) > 100
    assert verified["chat"].count(HEAD) > 0.9 * len(verified["chat"]) > 100


def test_negative_control_a_head_that_is_taken_to_cost_nothing_slows_sixteen_sequences(monkeypatch):
    monkeypatch.setattr(CallCost, "seconds", lambda *_: 0.0)
    batch = SourcesBatch("chat", "linear", 4, sources=[head(12.0)])
    batch.rate(WARM_UP_STEPS)
    assert batch.rate(200) < 0.95 * rate(("chat", "linear", 4), num_draft=0)


def test_negative_control_grades_that_count_as_one_are_slower(monkeypatch):
    with_grades = rate(("mixed", "linear", 1), head(), LOOKUPS)
    right = SimulatedText.draft

    def without_grade(text, *args):
        draft = right(text, *args)
        draft.grade = 0
        return draft

    monkeypatch.setattr(SimulatedText, "draft", without_grade)
    assert rate(("mixed", "linear", 1), head(), LOOKUPS) < 0.97 * with_grades


def test_negative_control_acceptance_of_the_wrong_sign_misses_the_bounds(monkeypatch):
    right = AcceptanceRecord.observe
    monkeypatch.setattr(
        AcceptanceRecord,
        "observe",
        lambda record, num_decided, num, rescued: right(record, num_decided, num_decided - num, rescued),
    )
    of_plain, of_best = shares(("mixed", "linear", 4))
    assert of_plain < 0.975 or of_best < 0.95


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_step_at_the_start_does_not_stop_drafts_for_long(seed):
    """The machine is busy, so some of the few steps that show what rows cost take five times as long."""
    batch = SourcesBatch(
        "hot", "measured 4", 4, sources=[LOOKUPS], has_draft_node=True, noise=0.7, stalls=0.2, length=24, seed=seed
    )
    assert batch.rate(400) > 1.25 * 4 / CURVES["measured 4"](4)


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("message_ms", [1, 4])
def test_a_draft_node_is_asked_only_if_it_gains_more_than_its_messages_cost(num_sequences, message_ms):
    """Its drafts gain 0.1 tokens, which pays for nothing, or 1.5 tokens, which pays for all messages."""
    curve = f"measured {num_sequences}"
    plain = num_sequences / CURVES[curve](num_sequences)
    for kind, pays in (("poor", False), ("hot", True)):
        draft_node = {"message_seconds": message_ms / 1000}
        batch = SourcesBatch(kind, curve, num_sequences, has_draft_node=True, draft_node=draft_node, length=1000)
        assert batch.rate(100) > 0.92 * plain
        batch.draft_node.num_asked = 0
        assert batch.rate(400) > (1.05 if pays else 0.97) * plain
        asked = batch.draft_node.num_asked / (400 * num_sequences)
        assert asked > 0.9 if pays else asked < 0.2


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_draft_node_does_not_slow_down_a_cheap_head_of_this_process_that_is_as_good(num_sequences):
    """While there are drafts of the draft node, the head is not asked, but it would have had drafts as well."""
    rates = []
    for has_draft_node in (False, True):
        batch = SourcesBatch(
            "equal",
            f"measured {num_sequences}",
            num_sequences,
            sources=[(HEAD, {"forward_seconds": 0.0002})],
            has_draft_node=has_draft_node,
            draft_node={"message_seconds": 0.003},
            length=300,
        )
        batch.rate(100)
        rates.append(batch.rate(600))
    assert rates[1] > 0.95 * rates[0]


def test_the_time_of_the_event_loop_before_an_answer_is_no_price_of_messages():
    """An idle event loop takes some milliseconds in each second, and begins the next request."""
    draft_node = {"message_seconds": 0.001, "idle_seconds": 1.0}
    batch = SourcesBatch("hot", "measured 1", 1, has_draft_node=True, draft_node=draft_node)
    batch.rate(200)
    assert batch.rate(400) > 1.5 / CURVES["measured 1"](1)


@pytest.mark.parametrize("seed", range(4))
def test_trials_find_a_draft_node_whose_drafts_pay_again(seed):
    """Its drafts come two steps after they are asked for, so a trial must last for longer."""
    draft_node = {"message_seconds": 0.001, "num_late": 2}
    batch = SourcesBatch("hot", "measured 4", 4, has_draft_node=True, draft_node=draft_node, length=ENDLESS, seed=seed)
    batch.rate(300)
    known = batch.gatherer._controller.source(DRAFT_NODE)
    for each in (known, *known.records.values()):
        each.marginal_gain = 0.0
    batch.rate(400)
    batch.draft_node.num_asked = 0
    batch.rate(50)
    assert batch.draft_node.num_asked > 0.8 * 50 * 4
