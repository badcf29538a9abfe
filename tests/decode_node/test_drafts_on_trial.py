"""Draft nodes on this node's processors hear of sequences only while they are asked."""

from __future__ import annotations

from decode_node.drafts import DraftWant, NoDrafts
from decode_node.drafts_on_trial import DraftsOnTrial
from outrider.engine.fakes import FakeClock
from outrider.request import SamplingParams
from outrider.speculation.draft_stream import SequenceStart

START = SequenceStart(params=SamplingParams(seed=1, max_tokens=50), sample=0, prompt_length=3)


class Trial:
    def __init__(self):
        self.is_asking = True
        self.steps = []

    def observe(self, **step):
        self.steps.append(step)


class Client(NoDrafts):
    def __init__(self):
        self.known = {}
        self.num_taken = 0

    def open(self, sequence_id, start, token_ids, **_):
        assert sequence_id not in self.known
        self.known[sequence_id] = list(token_ids)

    def update(self, updates):
        for sequence_id, token_ids, _ in updates:
            self.known[sequence_id] += token_ids

    def close(self, sequence_id):
        del self.known[sequence_id]

    def take(self, wants, *, wait_seconds):
        assert all(self.known[want.sequence_id] == list(want.token_ids) for want in wants)
        self.num_taken += 1
        return super().take(wants, wait_seconds=wait_seconds)


def test_sequences_are_withdrawn_and_announced_anew_with_what_was_committed_meanwhile():
    trial, client, clock = Trial(), Client(), FakeClock()
    drafts = DraftsOnTrial(client, trial=trial, clock=clock)
    text = [1, 2, 3]

    def step():
        drafts.take([DraftWant(7, text, 4)], wait_seconds=0.0)
        text.append(len(text) + 1)
        drafts.update([(7, text[-1:], 4)])
        clock.advance(0.02)
        drafts.observe_step(0.01)

    drafts.open(7, START, text)
    step()
    assert client.known == {7: [1, 2, 3, 4]}
    trial.is_asking = False
    step()
    assert client.known == {}
    drafts.open(8, START, [9])
    assert client.known == {}
    trial.is_asking = True
    step()
    assert client.known == {7: [1, 2, 3, 4, 5, 6]}
    assert client.num_taken == 2
    drafts.close(7)
    drafts.close(8)
    drafts.close(8)
    assert client.known == {}


def test_steps_are_measured_from_one_to_the_next_and_pauses_are_not():
    trial, clock = Trial(), FakeClock()
    drafts = DraftsOnTrial(Client(), trial=trial, clock=clock)
    for sequence_id in (1, 2):
        drafts.open(sequence_id, START, [5])
        for _ in range(3):
            clock.advance(0.03)
            drafts.update([(sequence_id, [6, 7], 4)])
            drafts.observe_step(0.01)
        drafts.close(sequence_id)
        clock.advance(100.0)
    assert len(trial.steps) == 4
    assert {(each["num_tokens"], each["num_sequences"], round(each["seconds"], 6)) for each in trial.steps} == {
        (2, 1, 0.03)
    }
