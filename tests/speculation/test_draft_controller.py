"""What the controller verifies, in simulated batches whose costs and acceptance are known."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.engine.scheduler import StepReservation
from outrider.speculation.acceptance_record import PRIOR_ACCEPTANCE, AcceptanceRecord
from outrider.speculation.draft_controller import PROBE_STEPS, DraftController
from outrider.speculation.draft_source import MAX_PRIORS, MODEL_ITSELF, RARE_TRIALS, TRIAL_STEPS
from outrider.speculation.draft_tree import DRAFT_NODE, ROOT, DraftTree
from outrider.speculation.step_cost import StepCostModel
from outrider.speculation.token_distribution import certain
from tests.speculation.simulated_batch import (
    CURVES,
    KINDS,
    MAX_DRAFT_TOKENS,
    SimulatedBatch,
    controlled,
    fixed_rate,
)

ALL = [case for case in itertools.product(KINDS, CURVES, (1, 4, 16, 32)) if not case[1].startswith("measured")]
FEW = [  # all kinds, curves and numbers of sequences; best fixed lengths of 0, short and long
    *(("chat", "linear", 4), ("chat", "stairs", 16), ("chat", "steep", 1), ("extract", "linear", 32)),
    *(("extract", "flat", 16), ("code", "flat then steep", 4), ("code", "linear", 16), ("even", "stairs", 4)),
    *(("even", "flat", 1), ("hopeless", "linear", 16), ("hopeless", "flat then steep", 4)),
]
WARM_UP_STEPS = 60


def share_of_plain_and_best(kind, curve, num_sequences, **disturbance):
    """Returns the controller's rate divided by that of plain decoding, and by that of the best fixed draft length."""
    num_steps = max(240, 2000 // num_sequences)
    own = controlled(SimulatedBatch(kind, curve, num_sequences, **disturbance))
    own.rate(WARM_UP_STEPS)
    rates = [
        fixed_rate(SimulatedBatch(kind, curve, num_sequences), num_draft, num_steps=num_steps)
        for num_draft in range(MAX_DRAFT_TOKENS + 1)
    ]
    rate = own.rate(num_steps)
    return rate / rates[0], rate / max(rates)


def test_it_is_hardly_slower_than_plain_decoding_or_the_best_fixed_length(is_full):
    missed = {}
    for case in ALL if is_full else FEW:
        of_plain, of_best = share_of_plain_and_best(*case)
        if of_plain < 0.98 or of_best < 0.95:
            missed[case] = (of_plain, of_best)
    assert not missed


@pytest.mark.parametrize("disturbance", [{"noise": 0.3}, {"stalls": 0.03}])
def test_on_a_busy_machine_it_is_hardly_slower_either(disturbance):
    for case in [("hopeless", "linear", 4), ("chat", "linear", 4), ("code", "flat", 1)]:
        of_plain, of_best = share_of_plain_and_best(*case, **disturbance)
        assert of_plain > 0.97
        assert of_best > 0.93


def test_where_texts_change_it_is_faster_than_any_fixed_length():
    assert share_of_plain_and_best("extract", "linear", 1)[1] > 1.03


@pytest.mark.parametrize("case", [("even", "linear", 4), ("hopeless", "linear", 4)])
def test_negative_control_acceptance_of_the_wrong_sign_misses_the_bounds(monkeypatch, case):
    right = AcceptanceRecord.observe
    monkeypatch.setattr(
        AcceptanceRecord,
        "observe",
        lambda record, num_decided, num, rescued: right(record, num_decided, num_decided - num, rescued),
    )
    of_plain, of_best = share_of_plain_and_best(*case)
    assert of_plain < 0.98 or of_best < 0.95


def test_negative_control_a_cost_of_the_wrong_sign_misses_the_bounds(monkeypatch):
    monkeypatch.setattr(
        StepCostModel, "seconds", lambda *_, num_more=0: [1.0 / (1.0 + row) for row in range(num_more + 1)]
    )  # as if more rows made a step faster
    assert share_of_plain_and_best("hopeless", "linear", 16)[0] < 0.98


def draft_of(num_tokens, source=DRAFT_NODE):
    return DraftTree(0, token_ids=(1,) * num_tokens, source=source)


def room_for(num_sequences, *, max_rows=100, num_prompts=0):
    return StepReservation(range(num_sequences), range(num_prompts), max_draft_rows=max_rows, num_rows=num_sequences)


def choose(controller, drafts, room, *, limit=99, **options):
    """Returns the part of each draft that is verified."""
    ranked = {sequence_id: controller.rank(sequence_id, draft, limit) for sequence_id, draft in drafts}
    num_rows = controller.choose(ranked, room, **options)
    return {sequence_id: ranked[sequence_id].tree.cut(num) for sequence_id, num in num_rows.items()}


def step_of(controller, drafts, num_accepted, *, row_seconds=0.1):
    """Makes one step, in which the first `num_accepted` tokens of each draft are accepted."""
    chosen = choose(controller, drafts, room_for(len(drafts)))
    num_rows = len(drafts)
    for sequence_id, draft in chosen.items():
        controller.observe_verdict(sequence_id, draft, range(min(num_accepted, len(draft))))
        num_rows += len(draft)
    controller.observe_step(
        1.0 + row_seconds * num_rows, num_rows=num_rows, num_sequences=len(drafts), num_prompt_rows=0
    )
    return {sequence_id: len(draft) for sequence_id, draft in chosen.items()}


def test_a_new_sequence_begins_with_long_drafts():
    controller = DraftController(5)
    assert controller.num_wanted(1, 8, DRAFT_NODE) == 5
    assert controller.num_wanted(1, 2, DRAFT_NODE) == 2
    assert DraftController(0).num_wanted(1, 8, DRAFT_NODE) == 0
    assert choose(DraftController(0), [(1, draft_of(3))], room_for(1)) == {}


def test_drafts_that_are_always_wrong_stop_and_are_tried_again_with_one_token():
    own = controlled(SimulatedBatch("hopeless", "linear", 16, length=10_000))
    own.batch._texts.update({key: [0, [False] * 20_000] for key in own.batch.sequence_ids})
    own.rate(800)
    late = [drafted[200:] for drafted in own.batch.drafted.values()]
    assert set(itertools.chain.from_iterable(late)) <= {0, 1}
    trials = [[step for step, num in enumerate(each) if num] for each in late]
    assert min(map(len, trials)) >= 2
    assert all(after - before >= PROBE_STEPS for each in trials for before, after in itertools.pairwise(each))


def test_all_drafts_are_verified_at_any_price_where_that_is_asked_for():
    controller = DraftController(4, verifies_all=True)
    for _ in range(50):
        assert all(controller.num_wanted(sequence_id, 8, DRAFT_NODE) == 4 for sequence_id in (1, 2))
        verified = step_of(controller, [(1, draft_of(4)), (2, draft_of(2))], 0, row_seconds=10.0)
        assert verified == {1: 4, 2: 2}
    assert controller.num_wanted(3, 0, DRAFT_NODE) == 0


@pytest.mark.parametrize("num_waiting", [0, 50])
def test_a_trial_comes_in_bounded_time_also_where_it_costs_more_than_can_be_saved_up(num_waiting):
    controller, clock, num_trials = DraftController(4), CURVES["steep"], 0
    for _ in range(60):
        controller.observe_verdict(1, draft_of(4), ())
    for _ in range(2000):
        chosen = choose(controller, [(1, draft_of(4))], room_for(1), limit=4, num_waiting=num_waiting)
        for draft in chosen.values():
            controller.observe_verdict(1, draft, ())
        num_trials += bool(chosen)
        num_rows = 1 + sum(map(len, chosen.values()))
        controller.observe_step(clock(num_rows), num_rows=num_rows, num_sequences=1, num_prompt_rows=0)
    assert 2 < num_trials < 60


def test_drafts_that_begin_to_be_right_are_verified_again():
    own = controlled(SimulatedBatch("hopeless", "linear", 1, length=10_000))
    texts = own.batch._texts
    texts[0] = [0, [False] * 300 + [True] * 20_000]
    own.rate(450)
    assert sum(own.batch.drafted[0][250:300]) <= 12
    assert sum(own.batch.drafted[0][-20:]) > 80


def test_rows_go_to_the_sequences_whose_drafts_are_accepted():
    controller = DraftController(4)
    for _ in range(40):
        chosen = choose(controller, [(1, draft_of(4)), (2, draft_of(4))], room_for(2))
        for sequence_id, draft in chosen.items():
            controller.observe_verdict(sequence_id, draft, range(len(draft) if sequence_id == 2 else 0))
        num_rows = 2 + sum(map(len, chosen.values()))
        controller.observe_step(1.0 + 0.2 * num_rows, num_rows=num_rows, num_sequences=2, num_prompt_rows=0)
    chosen = choose(controller, [(1, draft_of(4)), (2, draft_of(4))], room_for(2, max_rows=3))
    assert {key: len(draft) for key, draft in chosen.items()} == {2: 3}, "the younger one, and what there is room for"


@pytest.mark.parametrize("max_rows", [0, 1, 7])
def test_the_row_budget_holds_in_every_step(max_rows):
    own = controlled(SimulatedBatch("code", "flat", 4), max_rows=max_rows)
    for _ in range(100):
        own.step()
        assert own.batch.num_rows <= 4 + max_rows
    assert max_rows == 0 or own.batch.num_rows > 4


def test_prompts_that_wait_are_part_of_the_price():
    num_rows = {}
    for num_waiting in (0, 16):
        own = controlled(SimulatedBatch("code", "linear", 2), num_waiting=num_waiting)
        own.rate(200)
        num_rows[num_waiting] = sum(sum(drafted) for drafted in own.batch.drafted.values())
    assert num_rows[16] < 0.3 * num_rows[0]
    free = controlled(SimulatedBatch("code", "flat", 2), num_waiting=2)
    free.rate(100)
    assert max(max(drafted) for drafted in free.batch.drafted.values()) >= 6, "rows that cost nothing stay"


def test_prompts_in_the_same_step_count_as_waiting():
    controller = DraftController(4)
    drafts = [(1, draft_of(4))]
    for _ in range(30):
        step_of(controller, drafts, 4, row_seconds=0.5)
    alone = choose(controller, drafts, room_for(1))
    beside = choose(controller, drafts, room_for(1, num_prompts=8))
    assert len(alone[1]) == 4
    assert 1 not in beside


def test_a_bad_proposer_does_not_stop_a_good_one():
    controller = DraftController(4)
    bad, good = draft_of(4, "ngram"), draft_of(4)
    for step in range(120):
        is_good = step % 3 == 0
        step_of(controller, [(1, good if is_good else bad)], 4 if is_good else 0, row_seconds=0.5)
    assert controller.num_wanted(1, 4, DRAFT_NODE) == 4
    assert controller.num_wanted(1, 4, "ngram") <= 1
    assert len(choose(controller, [(1, good)], room_for(1))[1]) == 4


@pytest.mark.parametrize("has_another", [True, False])
def test_a_draft_node_that_adds_nothing_to_what_others_have_is_asked_now_and_then(has_another):
    controller, same = DraftController(4), draft_of(4, "ngram")
    asked = []
    for _ in range(120):
        asked.append(controller.num_wanted(1, 4, DRAFT_NODE) > 0)
        if asked[-1]:
            found = [draft_of(4), same] if has_another else [draft_of(4)]
            controller.observe_marginal_gain(DRAFT_NODE, {1: [controller.rank(1, each, 4) for each in found]})
        step_of(controller, [(1, draft_of(4))], 4)
        controller.observe_verdict(1, same, range(4))
    assert sum(asked[-PROBE_STEPS:]) == (TRIAL_STEPS if has_another else PROBE_STEPS)
    num_before = 0  # consecutive steps in which the draft node was asked
    for _ in range(PROBE_STEPS):  # now only the draft node has drafts, two steps after it is asked
        if controller.num_wanted(1, 4, DRAFT_NODE):
            found = [controller.rank(1, draft_of(4), 4)] if num_before >= 2 else []
            controller.observe_marginal_gain(DRAFT_NODE, {1: found})
            num_before += 1
        else:
            num_before = 0
        step_of(controller, [(1, draft_of(4))], 4)
    assert controller.num_wanted(1, 4, DRAFT_NODE) == 4


def test_a_draft_node_that_adds_nothing_to_any_sequence_is_rarely_tried_with_new_ones():
    controller = DraftController(4)

    def num_asked(sequence_id, *, adds=False):
        number = 0
        for _ in range(RARE_TRIALS * PROBE_STEPS):
            if controller.num_wanted(sequence_id, 4, DRAFT_NODE):
                number += 1
                found = [controller.rank(sequence_id, draft_of(4), 4)] if adds else []
                controller.observe_marginal_gain(DRAFT_NODE, {sequence_id: found})
            step_of(controller, [(sequence_id, draft_of(4))], 4)
        controller.forget(sequence_id)
        return number

    assert num_asked(0) > TRIAL_STEPS * RARE_TRIALS
    for sequence_id in range(1, 40):
        num_asked(sequence_id)
    assert num_asked(40) == TRIAL_STEPS
    assert num_asked(41, adds=True) > PROBE_STEPS  # asked again once a trial has gained something
    for sequence_id in range(42, 48):
        num_asked(sequence_id, adds=True)
    assert num_asked(48) > TRIAL_STEPS


def test_what_is_known_of_a_proposer_helps_new_sequences():
    controller = DraftController(4)
    for sequence_id in range(40):
        for _ in range(8):
            step_of(controller, [(sequence_id, draft_of(4))], 0, row_seconds=0.5)
        controller.forget(sequence_id)
    assert sum(step_of(controller, [(99, draft_of(4))], 0, row_seconds=0.5).values()) <= 1
    assert 99 in controller._sources[DRAFT_NODE].records
    controller.forget(99)
    controller.forget(99)
    assert not controller._sources[DRAFT_NODE].records


def test_a_tree_is_cut_to_its_likeliest_tokens():
    controller = DraftController(4)
    for num_rows in (1, 2, 3, 4) * 5:  # rows cost next to nothing
        controller.observe_step(1.0 + 0.01 * num_rows, num_rows=num_rows, num_sequences=1, num_prompt_rows=0)
    tree = DraftTree(0, token_ids=(10, 11, 12, 13, 14), parents=(ROOT, ROOT, 0, 0, 2))
    chosen = choose(controller, [(1, tree)], room_for(1, max_rows=3))[1]
    assert chosen.token_ids == (10, 12, 14)
    controller.observe_verdict(1, chosen, (0, 1))
    for _ in range(20):
        controller.observe_verdict(1, tree, (1,))  # the sibling was right
    assert set(choose(controller, [(1, tree)], room_for(1, max_rows=2))[1].token_ids) == {10, 11}


def drawn(length, source=DRAFT_NODE):
    """Returns a drawn draft with distributions, as for rejection sampling."""
    token_ids = tuple(range(length))
    return DraftTree(0, None, token_ids, source, distributions=tuple(map(certain, token_ids)))


def test_nothing_depends_on_how_long_a_drawn_draft_has_become():
    """The length may depend on what was drawn, e.g. if it ends with a stop token: see tests/statistical."""
    decided = []
    for length in (1, 2, 5):
        controller, clock = DraftController(5), CURVES["stairs"]
        controller.choose_calls("head", {1: 5, 2: 5}, {}, {1: 0, 2: 0})
        for num_rows in (2, 4, 7, 12) * 20:
            controller.observe_step(clock(num_rows), num_rows=num_rows, num_sequences=2, num_prompt_rows=0)
        for _ in range(20):
            controller.observe_verdict(1, drawn(5, "head"), range(2))
            controller.observe_verdict(1, draft_of(5, source="lookup"), range(3))
        draft, lookup = drawn(length, "head"), draft_of(2, source="lookup")
        for _ in range(20):
            one, other = controller.rank(1, draft, 5), controller.rank(1, lookup, 5)
            asked = controller.choose_calls("head", {1: 5}, {1: other}, {1: 1})
            # The call's duration depends on the draft's length, so this step must not use the duration.
            controller.observe_calls("head", {1: 5}, {1: one}, seconds=0.002 * length, num_read=1)
            controller.observe_marginal_gain("head", {1: [one, other]})
            better = max(one, other, key=lambda each: each.value).tree.source
            chosen = choose(controller, [(1, draft), (2, draft_of(5))], room_for(2, max_rows=4), limit=5)
            controller.observe_step(clock(6), num_rows=6, num_sequences=2, num_prompt_rows=0)
            decided.append((asked, better, 1 in chosen, len(chosen.get(2, ()))))
    assert decided[:20] == decided[20:40] == decided[40:]


def test_of_two_drafts_the_better_one_is_that_whose_tokens_can_be_verified():
    """A draft node's draft may be longer than a step verifies, because later steps use the rest."""
    controller, rng = DraftController(5, row_price=0.02), random.Random(1)
    for source, acceptance in (("head", 0.85), (DRAFT_NODE, 0.8)):
        for _ in range(300):
            num_accepted = next((place for place in range(5) if rng.random() > acceptance), 5)
            controller.observe_verdict(1, draft_of(5, source=source), range(num_accepted))

    def with_siblings(depth, source):
        parents = (*range(ROOT, depth - 1), *(place // 3 - 1 for place in range(8)))
        return DraftTree(0, None, tuple(range(len(parents))), source, parents=parents)

    near, far = (controller.rank(1, with_siblings(*each), 9) for each in ((5, "head"), (13, DRAFT_NODE)))
    assert near.value > far.value


def test_near_the_end_of_an_answer_the_better_draft_is_that_with_the_better_first_tokens():
    controller = DraftController(5, row_price=0.02)
    for num_accepted in (2, 2, 2, 0) * 50:
        controller.observe_verdict(1, draft_of(5, source="head"), range(2 * num_accepted))
        controller.observe_verdict(1, draft_of(1, source="lookup"), range(1))
    for limit, better in ((5, "head"), (1, "lookup")):
        ranked = [controller.rank(1, draft_of(*each), limit) for each in ((5, "head"), (1, "lookup"))]
        assert max(ranked, key=lambda each: each.value).tree.source == better


def test_no_more_is_verified_than_a_request_allows():
    controller = DraftController(4, verifies_all=True)
    drafts = {
        key: controller.rank(key, draft_of(length), limit) for key, length, limit in ((1, 4, 2), (2, 4, -1), (3, 9, 9))
    }
    assert controller.choose(drafts, room_for(3)) == {1: 2, 3: 4}


def test_steps_that_compute_prompts_say_nothing_about_drafts():
    controller = DraftController(5)
    for num_rows in (1, 3, 5) * 20:
        controller.observe_step(1.0 + 0.1 * num_rows, num_rows=num_rows, num_sequences=1, num_prompt_rows=0)
    before = controller.cost.seconds(1, 1, num_more=4)
    controller.observe_step(60.0, num_rows=512, num_sequences=1, num_prompt_rows=511)
    assert controller.cost.seconds(1, 1, num_more=4) == pytest.approx(before)


def test_acceptance_is_kept_for_a_limited_number_of_adapters():
    """Adapters come and go. Those that were used last are kept, and so is the model itself."""
    controller = DraftController(4)
    source = controller.source(DRAFT_NODE)
    for sequence_id in range(3 * MAX_PRIORS):
        for adapter in (MODEL_ITSELF, "often", f"{sequence_id:064}"):
            if adapter != MODEL_ITSELF:
                controller.set_adapter(sequence_id, adapter)
            controller.observe_verdict(sequence_id, draft_of(4), range(4))
            controller.forget(sequence_id)
    assert len(source.priors) == MAX_PRIORS
    assert not source.records
    assert not controller._adapters
    for adapter in (MODEL_ITSELF, "often"):
        assert source.priors_of(adapter).overall.mean > PRIOR_ACCEPTANCE + 0.1
    assert source.priors_of(f"{0:064}").overall.mean == PRIOR_ACCEPTANCE
    assert source.priors_of(f"{sequence_id:064}").overall.mean > PRIOR_ACCEPTANCE
