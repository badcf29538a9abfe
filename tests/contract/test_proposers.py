"""The promises of every proposer."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import pytest

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest
from outrider.speculation.proposers.factory import LOOKUP_NAMES, PROPOSER_NAMES, ProposerSettings, make_proposer
from tests.support.head_files import make_head
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.tiny_model import make_tiny_model

PATTERN = [5, 9, 14, 20, 27, 35]
TEXT = PATTERN * 30
VOCAB_SIZE = 320
START = SequenceStart(
    options=RequestOptions(sampling=SamplingParams(seed=3, max_tokens=500, temperature=0.0)), sample=0, prompt_length=20
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("draft"), vocab_size=VOCAB_SIZE)


class FedProposer:
    """A head's proposer that gets features with each request, as from a target. Here they depend only on the ids."""

    def __init__(self, proposer):
        self._proposer = proposer
        shape = (VOCAB_SIZE, proposer.info.features.width)
        self._by_id = np.random.default_rng(5).standard_normal(shape, dtype=np.float32)

    def __getattr__(self, name):
        return getattr(self._proposer, name)

    def propose(self, requests):
        return self._proposer.propose([each._replace(features=self._features_of(each)) for each in requests])

    def _features_of(self, request):
        return KnownFeatures(self._by_id[np.asarray(request.token_ids[:-1], dtype=np.int64)])


@dataclass
class KnownFeatures:
    rows: np.ndarray

    def __len__(self):
        return len(self.rows)

    def read(self, start, end):
        return self.rows[start:end]


@pytest.fixture(params=[*PROPOSER_NAMES, "scripted"])
def proposer(request, one_thread, tmp_path):
    if request.param == "scripted":
        return ScriptedProposer([TEXT])
    settings = ProposerSettings()
    if request.param == "head":
        target = request.getfixturevalue("tiny_model")
        head = make_head("eagle3", tmp_path / "head", target)
        model = ModelConfig(id=str(target), head=str(head), dtype="float32")
        return FedProposer(make_proposer("head", ProposerSettings(model=model)))
    if request.param == "draft_model":
        settings = ProposerSettings(
            model=ModelConfig(id=str(request.getfixturevalue("tiny_model"))),
            kv_cache=KVCacheConfig(num_blocks=300),
        )
    return make_proposer(request.param, settings)


def propose_until_done(proposer, *requests):
    """Calls the proposer until it is done, as the draft loop does, and returns each sequence's proposal."""
    found = {}
    for _ in range(100):
        asked = [request for request in requests if request.sequence_id not in found]
        if not asked:
            return found
        for request, proposal in zip(asked, proposer.propose(asked), strict=True):
            assert proposal.sequence_id == request.sequence_id
            if proposal.progress is Progress.DONE:
                found[proposal.sequence_id] = proposal
    raise AssertionError("never done")


def test_it_proposes_at_most_what_is_wanted_from_the_prefix_it_was_given(proposer):
    for num_wanted in (1, 4):
        found = propose_until_done(proposer, ProposalRequest(1, TEXT[:50], num_wanted, START))
        assert found[1].tree.length == 50
        assert 0 < len(found[1].tree.token_ids) <= num_wanted
        assert all(0 <= token_id < VOCAB_SIZE for token_id in found[1].tree.token_ids)


def test_it_answers_every_request_of_a_ragged_batch_in_order(proposer):
    requests = [ProposalRequest(key, TEXT[: 20 + 13 * key], 1 + key % 3, START) for key in range(6)]
    assert [proposal.sequence_id for proposal in proposer.propose(requests)] == list(range(6))
    found = propose_until_done(proposer, *requests)
    assert all(len(found[request.sequence_id].tree.token_ids) <= request.num_wanted for request in requests)


def test_what_is_proposed_for_a_sequence_does_not_depend_on_the_batch(proposer):
    requests = [ProposalRequest(key, TEXT[: 24 + 7 * key], 4, START) for key in range(5)]
    together = propose_until_done(proposer, *requests)
    for request in requests:
        alone = ProposalRequest(100 + request.sequence_id, request.token_ids, 4, START)
        assert propose_until_done(proposer, alone)[100 + request.sequence_id].tree.token_ids == (
            together[request.sequence_id].tree.token_ids
        )


def test_a_sequence_that_grew_gives_what_a_new_one_would(proposer):
    for length in (30, 31, 36, 60):
        grown = propose_until_done(proposer, ProposalRequest(1, TEXT[:length], 4, START))[1]
    fresh = propose_until_done(proposer, ProposalRequest(2, TEXT[:60], 4, START))[2]
    assert grown.tree.token_ids == fresh.tree.token_ids


def test_a_sequence_that_turned_out_otherwise_than_proposed_gives_what_a_new_one_would(proposer):
    propose_until_done(proposer, ProposalRequest(1, TEXT[:30], 5, START))
    other = [*TEXT[:30], 7, 7, *TEXT[:12]]
    grown = propose_until_done(proposer, ProposalRequest(1, other, 4, START))[1]
    fresh = propose_until_done(proposer, ProposalRequest(2, other, 4, START))[2]
    assert grown.tree.token_ids == fresh.tree.token_ids


def test_keeping_up_proposes_nothing(proposer):
    found = propose_until_done(proposer, ProposalRequest(1, TEXT[:50], 0, START))
    assert found[1].tree.token_ids == ()


def test_a_request_is_never_changed(proposer):
    token_ids = list(TEXT[:50])
    propose_until_done(proposer, ProposalRequest(1, token_ids, 4, START))
    assert token_ids == TEXT[:50]


def test_a_forgotten_sequence_may_be_begun_again_and_an_unknown_one_forgotten(proposer):
    first = propose_until_done(proposer, ProposalRequest(1, TEXT[:50], 4, START))[1]
    proposer.forget(1)
    proposer.forget(999)
    assert propose_until_done(proposer, ProposalRequest(1, TEXT[:50], 4, START))[1] == first


def test_no_requests_are_no_proposals(proposer):
    assert proposer.propose([]) == []


def test_it_says_who_it_is(proposer):
    info = proposer.info
    assert info.name
    assert info.num_extra_tokens >= 0
    has_model = info.name.startswith(("draft_model:", "eagle3:"))
    assert len(info.vocabulary_fingerprint) == (64 if has_model else 0)


@pytest.mark.parametrize("name", LOOKUP_NAMES)
def test_no_call_of_a_lookup_takes_more_than_1_ms_however_much_there_is_to_read(name):
    """All sequences of a decode node wait for it. The time is the thread's own, the least of five."""
    chance = random.Random(1)
    text = [chance.randrange(50_000) for _ in range(20_000)]
    seconds: list[float] = []
    for _ in range(5):
        lookup = make_proposer(name)
        started = time.thread_time()
        (proposal,) = lookup.propose([ProposalRequest(1, text, 4, START)])
        seconds.append(time.thread_time() - started)
        assert proposal.progress is Progress.CATCHING_UP
    assert min(seconds) < 0.001
