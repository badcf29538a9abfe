"""Draft trees through the whole decode loop: a draft model's siblings, the controller's choice, the verdict, the KV."""

from __future__ import annotations

import pytest

from benchmarks.three_lines.decode_side import LineNode, TimedProposer
from benchmarks.three_lines.simulation import SimulatedPair, Simulation
from decode_node.step import StepReport
from outrider.session import SampleTokens
from outrider.speculation.verify.by_request import RequestVerifier
from tests.support.pool_integrity import check_pool

PROMPTS = [[1, 2, 3], [4, 5, 6]]
PAIR = SimulatedPair(
    Simulation(step_seconds=0.0, token_seconds=0.0, acceptance=(0.4,), num_speculative_tokens=8, vocab_size=64)
)


@pytest.mark.usefixtures("steps_take_a_set_time", "one_thread")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_with_and_without_siblings(temperature, monkeypatch):
    texts, accepted, verified, told = [], [], [], []
    queue = RequestVerifier.queue
    monkeypatch.setattr(
        RequestVerifier, "queue", lambda self, logits, drafts: verified.extend(drafts) or queue(self, logits, drafts)
    )
    events = StepReport.events

    def tell(report):
        found = list(events(report))
        told.extend(event for _, event in found if isinstance(event, SampleTokens))
        return found

    monkeypatch.setattr(StepReport, "events", tell)
    for takes_trees in (False, True):
        engine = PAIR.engine()
        beside = TimedProposer(*PAIR.drafter_beside(engine, temperature=temperature))
        node = LineNode(PAIR, engine, beside=beside, takes_trees=takes_trees)
        texts.append(node.answer(PROMPTS, temperature=temperature, max_tokens=60))
        accepted.append(node.passed.counts.num_accepted_draft_tokens)
        assert any(draft.parents for draft in verified) == takes_trees
        check_pool(node._engine.pool, ())
    assert texts[0] == texts[1]
    for event in told:
        num_rejected = event.speculation.num_draft_tokens - event.speculation.num_accepted_draft_tokens
        assert len(event.rejected_draft_token_ids) == num_rejected
    assert any(event.rejected_draft_token_ids and event.speculation.num_accepted_draft_tokens for event in told)
    assert min(accepted) > 0
