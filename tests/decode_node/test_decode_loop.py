"""The decode loop on a tiny model, without processes: what it commits, and what it frees."""

from __future__ import annotations

import random
import time

import pytest

from outrider.profile import Capture, ProfileOptions, StartProfile, StepKind
from outrider.request import LogprobsRequest, VerificationMethod
from outrider.session import Granted, SampleDone, SampleStart, SampleTokens
from outrider.speculation.draft_tree import DraftTree
from tests.decode_node.tiny_node import PROMPT, generate
from tests.speculation.draft_trees import SHAPES, path_to
from tests.support.fake_drafts import TextDrafts

pytestmark = pytest.mark.usefixtures("fixed_step_times")


PARAMETERS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 10},
]


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_tokens_do_not_depend_on_the_drafter(make_node, sampling):
    plain = generate(make_node(), sampling=sampling)
    assert len(plain) == 40
    shuffled = random.Random(1)

    def oracle(token_ids, num_wanted):
        done = len(token_ids) - len(PROMPT)
        return plain[done : done + num_wanted]

    def half_right(token_ids, num_wanted):
        right = oracle(token_ids, num_wanted)
        return [token if shuffled.random() < 0.7 else shuffled.randrange(299) for token in right]

    def wrong(token_ids, num_wanted):
        return [(token + 1) % 299 for token in oracle(token_ids, num_wanted)]

    def bush(token_ids, num_wanted):
        """Returns a tree of a random shape with one right path."""
        parents = shuffled.choice(list(SHAPES.values()))[:num_wanted]
        right = dict(zip(path_to(parents, shuffled.randrange(len(parents))), oracle(token_ids, num_wanted)))  # noqa: B905
        wrong_ids = iter(shuffled.sample(range(299), 20))
        return DraftTree(
            len(token_ids), token_ids=tuple(right.get(i, next(wrong_ids)) for i in range(len(parents))), parents=parents
        )

    for propose in (oracle, half_right, wrong, bush):
        node = make_node(drafts=TextDrafts(propose))
        assert generate(node, sampling=sampling) == plain
        assert node.num_drafted > 0
        node.assert_nothing_is_held()
    assert node.num_accepted > 0  # of branches


def test_tokens_do_not_depend_on_the_batch_around(make_node):
    alone = generate(make_node(), sampling={"temperature": 1.0})
    node = make_node(local_lookup="ngram")
    others = [node.open(prompt=PROMPT[i:], sampling={"temperature": 1.0, "seed": i}) for i in range(8)]
    mine = node.open(sampling={"temperature": 1.0})
    node.run()
    assert node.tokens(mine) == alone
    assert all(len(node.tokens(other)) == 40 for other in others)
    node.assert_nothing_is_held()


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_samples_cut_at_different_lengths_go_on_on_another_node(make_node, sampling):
    """As after the loss of a node: each unfinished sample is opened with the tokens that it has."""
    undisturbed = make_node(local_lookup="ngram")
    group_id = undisturbed.open(sampling={**sampling, "n": 4}, logprobs=LogprobsRequest(num_top=1))
    undisturbed.run()
    whole = [undisturbed.tokens(group_id, sample) for sample in range(4)]
    cuts = {0: 33, 2: 7, 3: 0}
    for config in ({}, {"local_lookup": "ngram", "max_rows_per_step": 16}):
        other = make_node(**config)
        samples = tuple(SampleStart(sample, tuple(whole[sample][:cut])) for sample, cut in cuts.items())
        again = other.open(sampling={**sampling, "n": 4}, samples=samples, logprobs=LogprobsRequest(num_top=1))
        other.run()
        for sample, cut in cuts.items():
            assert other.tokens(again, sample) == whole[sample][cut:]
        assert other.tokens(again, 1) == []
        assert {done.sample for done in other.find(SampleDone, again)} == set(cuts)
        first = {event.sample: event.start_position for event in reversed(other.find(SampleTokens, again))}
        assert first == {sample: len(PROMPT) + cut for sample, cut in cuts.items()}
        other.assert_nothing_is_held()


def test_logprobs_come_with_each_token_whatever_is_drafted(make_node):
    plain = make_node()
    plain_id = plain.open(logprobs=LogprobsRequest(num_top=2))
    plain.run()
    drafted = make_node(local_lookup="ngram")
    drafted_id = drafted.open(logprobs=LogprobsRequest(num_top=2))
    drafted.run()

    def logprobs(node, group_id):
        return [value for event in node.find(SampleTokens, group_id) for value in event.logprobs]

    expected, found = logprobs(plain, plain_id), logprobs(drafted, drafted_id)
    assert [value.token_id for value in found] == drafted.tokens(drafted_id)
    assert [value.logprob for value in found] == pytest.approx([value.logprob for value in expected], abs=1e-3)
    assert all(len(value.top) == 2 for value in found)
    assert [value.rank for value in found] == [value.rank for value in expected]


def test_a_prompt_of_another_tenant_is_not_found_in_the_prefix_cache(make_node):
    node = make_node()
    prompt = tuple(range(20, 53))
    first = generate(node, prompt=prompt, cache_salt=b"alice")
    again = [node.open(prompt=prompt, cache_salt=salt) for salt in (b"bob", b"alice")]
    node.run()
    granted = [node.find(Granted, group)[0] for group in again]
    assert [(each.held_prefix_length, each.num_tokens_to_compute) for each in granted] == [(0, 33), (32, 1)]
    assert [node.tokens(group) for group in again] == [first, first]


@pytest.mark.parametrize("method", VerificationMethod)
def test_a_request_is_verified_by_its_method(make_node, method):
    node = make_node(drafts=TextDrafts(lambda tokens, n: [(tokens[-1] + 7) % 299] * n))
    flat = {"temperature": 5.0}  # so that any draft is likely enough for the lossy method
    found = generate(node, verification_method=method, sampling=flat)
    assert len(found) == 40
    plain = generate(make_node(), sampling=flat)
    assert (found == plain) == (method is VerificationMethod.COUPLED), "drafts change the tokens, or they must not"
    assert {each for stats in node.stats for each in stats.num_drafts_by_method} == {method}
    node.assert_nothing_is_held()


def test_negative_control_the_comparison_sees_a_wrong_acceptance(make_node, monkeypatch):
    """Accepting every draft unseen must change the tokens, or the tests above prove nothing."""
    plain = generate(make_node())
    node = make_node(drafts=TextDrafts(lambda tokens, n: [(tokens[-1] + 7) % 299] * n))
    monkeypatch.setattr("outrider.speculation.verify.coupled.accept", lambda draft, target: (*draft, target[-1]))
    assert generate(node) != plain


def test_a_profile_accounts_for_every_nanosecond_and_changes_no_token(make_node):
    plain = generate(make_node())
    node = make_node(drafts=TextDrafts(lambda token_ids, num_wanted: plain[len(token_ids) - len(PROMPT) :][:2]))
    captured = []
    before = time.perf_counter_ns()
    node.submit(StartProfile(Capture(ProfileOptions(num_steps=10), captured.append)))
    assert generate(node) == plain
    elapsed = time.perf_counter_ns() - before
    (profile,) = (each.profile for each in captured)
    first, *others = profile.steps
    assert first.kind is StepKind.PROMPT  # the prompt is short enough to compute
    assert StepKind.VERIFY in {step.kind for step in others} <= {StepKind.VERIFY, StepKind.DECODE}
    assert {step.num_rows for step in others} <= {1, 2, 3}  # only as many drafts as are worth verifying
    spent = sum(sum(step.nanoseconds.values()) for step in profile.steps)
    assert 0 < spent <= elapsed
    for step in profile.steps:
        assert {"schedule", "batch", "sampling", "commit"} <= set(step.nanoseconds)
        assert any(part.startswith("forward") for part in step.nanoseconds)
        assert min(step.nanoseconds.values()) >= 0
