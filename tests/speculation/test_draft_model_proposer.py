"""The draft model proposer on a tiny random model, compared with transformers' own forward."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.sampler import Sampler, SampleRows
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.tiny import make_tiny_model
from outrider.request import SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.draft_model import DraftModelProposer

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19]
GREEDY = SamplingParams(seed=5, max_tokens=400, temperature=0.0)
HOT = SamplingParams(
    seed=5, max_tokens=400, temperature=0.9, top_p=0.9, top_k=50, presence_penalty=0.7, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(make_tiny_model(tmp_path_factory.mktemp("draft")))))


def proposer_of(model, *, num_blocks=400, catch_up_tokens_per_step=512) -> DraftModelProposer:
    return DraftModelProposer.of(
        model, kv_cache=KVCacheConfig(num_blocks=num_blocks), catch_up_tokens_per_step=catch_up_tokens_per_step
    )


def start_of(params: SamplingParams, *, stop_token_ids=(), sample=0) -> SequenceStart:
    return SequenceStart(params=params, sample=sample, prompt_length=len(PROMPT), stop_token_ids=stop_token_ids)


class Reference:
    """Decodes one token after the other from full forward passes, with the same sampler."""

    def __init__(self, model) -> None:
        self._model = model
        self._sampler = Sampler(vocab_size=model.spec.vocab_size, known_token_ids=model.known_token_ids)

    def continuation(self, token_ids, params, num_tokens, *, sample=0) -> tuple[int, ...]:
        from outrider.engine.attention import make_attention_backend
        from outrider.engine.input_batch import SequenceRows, build_input_batch
        from outrider.engine.kv_cache.paged_cache import PagedKVCache
        from outrider.engine.model_runner import ModelRunner

        found: list[int] = []
        for _ in range(num_tokens):
            text = [*token_ids, *found]
            cache = PagedKVCache(self._model.spec.planes, num_blocks=20, block_size=16)
            runner = ModelRunner(self._model, cache, make_attention_backend())
            rows = SequenceRows(text, 0, list(range(20)), num_logits=1)
            logits = runner.forward(build_input_batch([rows], 16))
            state = self._sampler.start(
                params, sample=sample, prompt_token_ids=PROMPT, generated_token_ids=text[len(PROMPT) :]
            )
            found += self._sampler.sample(logits, [SampleRows(state, len(text), ())]).token_ids
        return tuple(found)


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_a_draft_is_what_the_draft_model_itself_would_generate(model, params):
    (proposal,) = proposer_of(model).propose([ProposalRequest(1, PROMPT, 6, start_of(params))])
    assert proposal.tree.token_ids == Reference(model).continuation(PROMPT, params, 6)


@pytest.mark.parametrize("num_agreeing", [0, 2, 5])
def test_after_a_partly_accepted_draft_it_goes_on_as_from_a_fresh_prefix(model, num_agreeing):
    proposer = proposer_of(model)
    (first,) = proposer.propose([ProposalRequest(1, PROMPT, 5, start_of(HOT))])
    text = [*PROMPT, *first.tree.token_ids[:num_agreeing], 3]
    (second,) = proposer.propose([ProposalRequest(1, text, 5, start_of(HOT))])
    assert second.tree.token_ids == Reference(model).continuation(text, HOT, 5)
    proposer.check_integrity()


def test_each_sample_runs_its_own_race(model):
    proposer = proposer_of(model)
    proposals = proposer.propose([ProposalRequest(i, PROMPT, 6, start_of(HOT, sample=i)) for i in range(3)])
    assert len({proposal.tree.token_ids for proposal in proposals}) == 3
    assert proposals[2].tree.token_ids == Reference(model).continuation(PROMPT, HOT, 6, sample=2)


def test_a_draft_ends_with_a_stop_token(model):
    expected = Reference(model).continuation(PROMPT, GREEDY, 6)
    start = start_of(GREEDY, stop_token_ids=(expected[2],))
    (proposal,) = proposer_of(model).propose([ProposalRequest(1, PROMPT, 6, start)])
    assert proposal.tree.token_ids == expected[: expected.index(expected[2]) + 1]


def test_catching_up_takes_the_shortest_first_within_its_budget(model):
    proposer = proposer_of(model, catch_up_tokens_per_step=40)
    long = [(7 * i) % 300 for i in range(100)]
    requests = [ProposalRequest(1, long, 2, start_of(GREEDY)), ProposalRequest(2, PROMPT, 2, start_of(GREEDY))]
    outcomes = [[proposal.caught_up for proposal in proposer.propose(requests)] for _ in range(3)]
    assert outcomes == [[False, True], [False, True], [True, True]]
    proposer.check_integrity()


def test_when_blocks_run_out_idle_sequences_give_theirs_up(model):
    proposer = proposer_of(model, num_blocks=300)
    text = [(7 * i) % 300 for i in range(400)]
    for key in range(20):
        (proposal,) = proposer.propose([ProposalRequest(key, [key, *text], 3, start_of(GREEDY))])
        assert len(proposal.tree.token_ids) == 3
        proposer.check_integrity()


def test_a_batch_that_does_not_fit_gets_fewer_drafts_and_every_block_is_accounted_for(model):
    proposer = proposer_of(model, num_blocks=256, catch_up_tokens_per_step=100_000)
    text = [(7 * i) % 300 for i in range(1000)]
    requests = [ProposalRequest(key, [key, *text], 3, start_of(GREEDY)) for key in range(6)]
    proposals = proposer.propose(requests)
    assert all(proposal.caught_up for proposal in proposals)
    assert 0 < sum(bool(proposal.tree.token_ids) for proposal in proposals) < 6
    proposer.check_integrity()
    for key in range(6):
        proposer.forget(key)
    proposer.check_integrity()
    assert proposer._forward.pool.num_free_blocks == 256


def test_what_the_model_cannot_serve_gets_no_proposal(model):
    proposer = proposer_of(model)
    proposals = proposer.propose(
        [
            ProposalRequest(1, [5] * 2047, 3, start_of(GREEDY)),  # past its window
            ProposalRequest(2, [5, 5000], 3, start_of(GREEDY)),  # an id it does not have
            ProposalRequest(3, PROMPT, 3, start_of(GREEDY)),
        ]
    )
    assert [len(proposal.tree.token_ids) for proposal in proposals] == [0, 0, 3]


def test_a_second_sequence_with_the_same_prompt_finds_its_blocks(model):
    proposer = proposer_of(model, catch_up_tokens_per_step=128)
    text = [(7 * i) % 300 for i in range(200)]
    request = ProposalRequest(1, text, 1, start_of(GREEDY))
    while not proposer.propose([request])[0].caught_up:
        continue
    (proposal,) = proposer.propose([ProposalRequest(2, text, 1, start_of(GREEDY))])
    assert proposal.caught_up


def test_the_sampling_state_of_a_prompt_in_pieces_is_that_of_the_whole_prompt(model):
    proposer = proposer_of(model)
    proposer.propose([ProposalRequest(1, PROMPT[:5], 0, start_of(HOT))])
    proposer.propose([ProposalRequest(1, [*PROMPT, 3], 0, start_of(HOT))])
    counts = proposer._sequences[1].sampling.penalties.counts
    assert counts is not None
    ids, num_generated = counts.with_assumed(())
    assert {token_id: count for token_id, count in zip(ids, num_generated, strict=True) if count} == {3: 1.0}
