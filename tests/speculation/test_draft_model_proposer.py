"""The draft model proposer on a tiny random model, compared with transformers' own forward."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
import torch

from outrider.engine.arrays import Array
from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.engine.sampler import Sampler, SampleRows
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import Constraint, ConstraintKind, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import MAX_SIBLINGS
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.model_forward import ModelForward
from outrider.speculation.token_distribution import TokenDistribution
from tests.draft_node.simulated_pair import ScriptedForward
from tests.speculation.asking import PROMPT, proposals_of, start_of
from tests.speculation.draft_trees import likeliest_path
from tests.support.fake_clock import FakeClock
from tests.support.pool_integrity import check_proposer
from tests.support.tiny_model import make_tiny_model

GREEDY = SamplingParams(seed=5, max_tokens=400, temperature=0.0)
HOT = SamplingParams(
    seed=5, max_tokens=400, temperature=0.9, top_p=0.9, top_k=50, presence_penalty=0.7, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(make_tiny_model(tmp_path_factory.mktemp("draft")))))


def proposer_of(model, *, num_blocks=400, max_catch_up_rows=512, clock=time.monotonic) -> DraftModelProposer:
    return DraftModelProposer(
        ModelForward.of(model, kv_cache=KVCacheConfig(num_blocks=num_blocks)),
        ProposerInfo(name="draft_model:tiny"),
        max_catch_up_rows=max_catch_up_rows,
        clock=clock,
    )


def clock_of(seconds):
    """Returns a clock that advances by `seconds` at each reading."""
    return itertools.count(0, seconds).__next__


class Reference:
    """Decodes token by token from full forward passes, with the same sampler."""

    def __init__(self, model) -> None:
        self._model = model
        self._sampler = Sampler(vocab_size=model.spec.vocab_size, known_token_ids=model.known_token_ids)

    def continuation(self, token_ids, params, num_tokens, *, sample=0) -> tuple[int, ...]:
        found: list[int] = []
        for _ in range(num_tokens):
            text = [*token_ids, *found]
            state = self._sampler.start(
                params, sample=sample, prompt_token_ids=PROMPT, generated_token_ids=text[len(PROMPT) :]
            )
            found += self._sampler.sample(self.logits(text), [SampleRows(state, len(text), ())]).token_ids
        return tuple(found)

    def probabilities(self, token_ids, params) -> torch.Tensor:
        """Returns the next token's distribution [num_ids]."""
        state = self._sampler.start(
            params, sample=0, prompt_token_ids=PROMPT, generated_token_ids=token_ids[len(PROMPT) :]
        )
        values = self._sampler.distribution(self.logits(token_ids), [SampleRows(state, len(token_ids), ())])
        return torch.as_tensor(values)[0].softmax(dim=0)

    def logits(self, token_ids) -> Array:
        """Returns the logits after the last token [1, vocab_size]."""
        cache = PagedKVCache(
            self._model.spec.planes,
            layer_groups=self._model.spec.layer_groups,
            num_blocks=20,
            block_size=16,
            kernels=self._model.cpu_kernels,
        )
        runner = make_runner(self._model, cache, make_attention_backend())
        rows = SequenceRows(token_ids, 0, list(range(20)), num_logits=1)
        return torch.as_tensor(runner.forward(build_input_batch([rows], 16)))


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("takes_trees", [False, True])
def test_a_draft_is_what_the_draft_model_itself_would_generate_and_siblings(model, params, takes_trees):
    start = start_of(params, takes_trees=takes_trees)
    (proposal,) = proposals_of(proposer_of(model), ProposalRequest(1, PROMPT, 6, start))
    assert proposal.tree.is_well_formed
    assert bool(proposal.tree.parents) is takes_trees
    assert likeliest_path(proposal.tree).token_ids == Reference(model).continuation(PROMPT, params, 6)
    assert len(proposal.tree) == 6 + (MAX_SIBLINGS if takes_trees else 0)


def test_siblings_are_what_a_constraint_allows_also_where_that_is_one_token(model):
    choice = Constraint(ConstraintKind.CHOICE, options=("the cat sat", "a dog"))
    compiled = model.constraints.prepare(choice)
    compiled.result(10)
    start = start_of(dataclasses.replace(HOT, constraint=choice), takes_trees=True)
    (proposal,) = proposals_of(proposer_of(model), ProposalRequest(1, PROMPT, 4, start))
    token_ids, parents = proposal.tree.token_ids, proposal.tree.parents or tuple(range(-1, 3))
    paths = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token_id])
        assert not model.constraints.start(choice, paths[-1]).failure
    assert len({tuple(path) for path in paths}) == len(token_ids) >= 4
    assert model.constraints.prepare(choice) is compiled


@pytest.mark.parametrize("num_agreeing", [0, 2, 5])
def test_after_a_partly_accepted_draft_it_goes_on_as_from_a_fresh_prefix(model, num_agreeing):
    proposer = proposer_of(model)
    (first,) = proposals_of(proposer, ProposalRequest(1, PROMPT, 5, start_of(HOT)))
    text = [*PROMPT, *first.tree.token_ids[:num_agreeing], 3]
    (second,) = proposals_of(proposer, ProposalRequest(1, text, 5, start_of(HOT)))
    assert second.tree.token_ids == Reference(model).continuation(text, HOT, 5)


def test_a_prompt_of_one_tenant_is_not_cached_for_another(model):
    proposer, prompt = proposer_of(model), PROMPT * 4
    proposals_of(proposer, ProposalRequest(1, prompt, 2, start_of(GREEDY, cache_salt=b"alice")))
    pool = proposer._forward.pool
    found = {
        salt: len(pool.match_prefix(prompt, max_tokens=len(prompt), hashes=pool.new_hashes(salt)))
        for salt in (b"alice", b"bob", b"")
    }
    assert found == {b"alice": len(prompt) // pool.block_size, b"bob": 0, b"": 0}


def test_each_sample_runs_its_own_race(model):
    proposer = proposer_of(model)
    proposals = proposals_of(proposer, *(ProposalRequest(i, PROMPT, 6, start_of(HOT, sample=i)) for i in range(3)))
    assert len({proposal.tree.token_ids for proposal in proposals}) == 3
    assert proposals[2].tree.token_ids == Reference(model).continuation(PROMPT, HOT, 6, sample=2)


def test_a_draft_ends_with_a_stop_token(model):
    expected = Reference(model).continuation(PROMPT, GREEDY, 6)
    start = start_of(GREEDY, stop_token_ids=(expected[2],))
    (proposal,) = proposals_of(proposer_of(model), ProposalRequest(1, PROMPT, 6, start))
    assert proposal.tree.token_ids == expected[: expected.index(expected[2]) + 1]


def test_catching_up_takes_the_shortest_first_within_its_budget(model):
    proposer = proposer_of(model, max_catch_up_rows=40)
    long = [(7 * i) % 300 for i in range(100)]
    requests = [ProposalRequest(1, long, 2, start_of(GREEDY)), ProposalRequest(2, PROMPT, 2, start_of(GREEDY))]
    outcomes = [[proposal.progress for proposal in proposer.propose(requests)] for _ in range(2)]
    behind, drafting, done = Progress.CATCHING_UP, Progress.DRAFTING, Progress.DONE
    assert outcomes == [[behind, drafting], [behind, done]]
    assert [len(proposal.tree) for proposal in proposals_of(proposer, *requests)] == [2, 2]


def test_a_long_prefix_is_computed_while_shorter_ones_keep_coming(model):
    proposer = proposer_of(model, max_catch_up_rows=40)
    long = ProposalRequest(0, [(7 * i) % 300 for i in range(200)], 2, start_of(GREEDY))
    for key in range(1, 40):
        short = [ProposalRequest(10 * key + n, [key, n, *PROMPT], 2, start_of(GREEDY)) for n in range(3)]
        if proposer.propose([long, *short])[0].progress is not Progress.CATCHING_UP:
            break
    assert key < 30


def test_what_needs_a_forward_waits_for_one_call_at_most_while_others_are_answered_without(model):
    proposer = proposer_of(model)
    ready, new = (ProposalRequest(key, [key, *PROMPT], 3, start_of(GREEDY)) for key in (1, 2))
    proposals_of(proposer, ready)
    calls = [proposer.propose([ready, new]) for _ in range(8)]
    assert all(proposal.progress is Progress.DONE for proposal, _ in calls)
    assert [len(proposal.tree) for _, proposal in calls] == [0] * 5 + [3] * 3, "three forwards, in every second call"


def test_when_blocks_run_out_idle_sequences_give_theirs_up(model):
    proposer = proposer_of(model, num_blocks=300)
    text = [(7 * i) % 300 for i in range(400)]
    for key in range(20):
        (proposal,) = proposals_of(proposer, ProposalRequest(key, [key, *text], 3, start_of(GREEDY)))
        assert len(proposal.tree.token_ids) == 3


def test_a_batch_that_does_not_fit_gets_fewer_drafts_and_every_block_is_accounted_for(model):
    # Forwards are fast. If they were slow, prefixes would be computed one by one, and finished ones would make room.
    proposer = proposer_of(model, num_blocks=256, max_catch_up_rows=100_000, clock=clock_of(1e-3))
    text = [(7 * i) % 300 for i in range(1000)]
    requests = [ProposalRequest(key, [key, *text], 3, start_of(GREEDY)) for key in range(6)]
    proposals = proposals_of(proposer, *requests)
    assert 0 < sum(bool(proposal.tree.token_ids) for proposal in proposals) < 6
    for key in range(6):
        proposer.forget(key)
    check_proposer(proposer)
    assert proposer._forward.pool.num_free_blocks == 256


def test_what_the_model_cannot_serve_gets_no_proposal(model):
    proposer = proposer_of(model)
    proposals = proposals_of(
        proposer,
        ProposalRequest(1, [5] * 2047, 3, start_of(GREEDY)),  # beyond the draft model's window
        ProposalRequest(2, [5, 5000], 3, start_of(GREEDY)),  # an id that the draft model does not have
        ProposalRequest(3, PROMPT, 3, start_of(GREEDY)),
    )
    assert [len(proposal.tree.token_ids) for proposal in proposals] == [0, 0, 3]


def test_a_second_sequence_with_the_same_prompt_finds_its_blocks(model):
    proposer = proposer_of(model, max_catch_up_rows=128)
    text = [(7 * i) % 300 for i in range(200)]
    request = ProposalRequest(1, text, 1, start_of(GREEDY))
    proposals_of(proposer, request)
    (proposal,) = proposer.propose([ProposalRequest(2, text, 1, start_of(GREEDY))])
    assert proposal.progress is Progress.DONE


def test_the_sampling_state_of_a_prompt_in_pieces_is_that_of_the_whole_prompt(model):
    proposer = proposer_of(model)
    proposals_of(proposer, ProposalRequest(1, PROMPT[:5], 0, start_of(HOT)))
    proposals_of(proposer, ProposalRequest(1, [*PROMPT, 3], 0, start_of(HOT)))
    counts = proposer._trees[1].sampling.penalties.counts
    assert counts is not None
    ids, num_generated = counts.with_assumed(())
    assert {token_id: count for token_id, count in zip(ids, num_generated, strict=True) if count} == {3: 1.0}


def branches_ahead(proposer, request):
    """Returns all branches of a look-ahead. A failed call is repeated, as IsolatedProposer does."""
    branches = []
    for _ in range(40):
        try:
            (ahead,) = proposer.propose([request._replace(looks_ahead=True)])
        except RuntimeError:
            continue
        branches += ahead.ahead
        if not ahead.has_more:
            break
    assert branches
    return branches


def assert_continued(branches, reference, params):
    """Checks that each branch is what the draft model would generate from a fresh prefix."""
    for branch in branches:
        assumed = [*PROMPT, *branch.assumed_token_ids]
        assert branch.tree.token_ids == reference.continuation(assumed, params, len(branch.tree.token_ids))


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_branches_on_forks_of_its_kv_are_what_it_would_generate_from_a_fresh_prefix(model, params):
    proposer, reference = proposer_of(model), Reference(model)
    request = ProposalRequest(1, PROMPT, 2, start_of(params), max_alternatives=9)
    proposals_of(proposer, request)
    branches = branches_ahead(proposer, request)
    assert {len(branch.assumed_token_ids) for branch in branches} == {0, 1, 2, 3}
    assert_continued(branches, reference, params)
    check_proposer(proposer)


class FailsBeforeCopies:
    """A forward that raises before it copies blocks, but never in two calls in a row."""

    def __init__(self, forward) -> None:
        self._forward = forward
        self.num_failures = 0
        self._has_worked = True

    def __getattr__(self, name):
        return getattr(self._forward, name)

    def decide(self, rows, block_copies):
        if block_copies and self._has_worked:
            self._has_worked = False
            self.num_failures += 1
            raise RuntimeError("no forward now")
        self._has_worked = True
        return self._forward.decide(rows, block_copies)


def test_a_block_that_a_failed_forward_did_not_copy_is_computed_again(model):
    proposer, reference = proposer_of(model), Reference(model)
    request = ProposalRequest(1, PROMPT, 2, start_of(GREEDY), max_alternatives=9)
    proposals_of(proposer, request)
    proposer._forward = forward = FailsBeforeCopies(proposer._forward)
    branches = branches_ahead(proposer, request)
    assert forward.num_failures > 1
    assert_continued(branches, reference, GREEDY)
    check_proposer(proposer)


@pytest.mark.parametrize("params", [HOT, dataclasses.replace(HOT, top_k=0, top_p=1.0)], ids=["filtered", "all"])
def test_for_rejection_a_draft_comes_with_what_it_was_drawn_from(model, params):
    reference, proposer = Reference(model), proposer_of(model)
    kept = dataclasses.replace(params, top_k=min(params.top_k or 32, 32))
    expected = reference.continuation(PROMPT, kept, 5)
    method = VerificationMethod.REJECTION
    start = start_of(params, takes_trees=True, verification_method=method, stop_token_ids=expected[2:3])
    request = ProposalRequest(1, PROMPT, 5, start)
    (proposal,) = proposals_of(proposer, request)
    assert proposal.tree.token_ids == expected, "also past a stop token: what was drawn does not say where it ends"
    assert len(proposal.tree.distributions) == 5
    assert not proposal.tree.parents, "runners-up were not drawn"
    for index, (token_id, distribution) in enumerate(
        zip(proposal.tree.token_ids, proposal.tree.distributions, strict=True)
    ):
        assert distribution.can_have_drawn(token_id)
        text = [*PROMPT, *proposal.tree.token_ids[:index]]
        probs = reference.probabilities(text, kept)
        assert len(distribution.token_ids) == int((probs > 0).sum()) <= 32
        assert distribution.probabilities == pytest.approx(probs[list(distribution.token_ids)].tolist(), abs=1e-6)
    for branch in branches_ahead(proposer, request._replace(max_alternatives=2)):
        assert all(map(TokenDistribution.can_have_drawn, branch.tree.distributions, branch.tree.token_ids))
        assert len(branch.tree.distributions) == len(branch.tree.token_ids)


def test_other_methods_and_greedy_drafts_send_no_distributions(model):
    for params, method in ((HOT, VerificationMethod.COUPLED), (GREEDY, VerificationMethod.REJECTION)):
        start = start_of(params, verification_method=method)
        (proposal,) = proposals_of(proposer_of(model), ProposalRequest(1, PROMPT, 3, start))
        assert proposal.tree.distributions == ()


def test_a_runner_up_is_the_winner_of_the_race_without_the_winner(model):
    proposer = proposer_of(model)
    proposals_of(proposer, ProposalRequest(1, PROMPT, 3, start_of(GREEDY), max_alternatives=1))
    main = proposer._trees[1].main
    logits = Reference(model).logits(PROMPT)[0]
    assert list(main.decided[0].token_ids) == np.argsort(-np.asarray(logits), kind="stable")[:4].tolist()


def test_what_is_verified_counts_unless_drafts_are_drawn_or_an_id_is_unknown(model):
    proposer = proposer_of(model)
    for method, verified, expected in (
        (VerificationMethod.COUPLED, (5,), (5,)),
        (VerificationMethod.COUPLED, (1 << 30,), None),
        (VerificationMethod.REJECTION, (5,), None),
    ):
        params = SamplingParams(seed=1, max_tokens=99, temperature=1.0)
        start = start_of(params, verification_method=method)
        proposer.propose([ProposalRequest(7, PROMPT, 2, start, verified=verified)])
        assert proposer._trees[7].verified == expected
        proposer.forget(7)


def test_an_answer_waits_for_no_longer_rollout_of_a_look_ahead_than_its_own():
    clock = FakeClock()
    forward = ScriptedForward(clock)
    forward.max_tokens = 8
    proposer = DraftModelProposer(forward, ProposerInfo(name="draft_model:scripted"), clock=clock)
    decide, limits = forward.decide, []
    forward.decide = lambda rows, copies: limits.append([row.max_tokens for row in rows]) or decide(rows, copies)
    ahead = ProposalRequest(
        1, [1, 2, 3, 4], 8, start_of(SamplingParams(seed=1, max_tokens=60), prompt_length=4), max_alternatives=31
    )
    proposer.propose([ahead])
    proposer.propose([ahead._replace(looks_ahead=True)])
    assert max(limits[-1]) > 1, "alone, it drafts whole branches"
    proposer.propose(
        [ahead._replace(looks_ahead=True), ahead._replace(sequence_id=2, token_ids=[5, 6, 7, 8], num_wanted=1)]
    )
    assert limits[-1]
    assert set(limits[-1]) == {1}
