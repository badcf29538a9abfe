"""The decode loop on a tiny model, without processes: what it commits, and what it frees."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from decode_node.__main__ import make_build
from decode_node.commands import DrainExpired, DrainStarted, GroupCancelled, GroupOpened, GroupRetargeted, SessionEnded
from decode_node.config import DecodeNodeConfig
from decode_node.drafts import NoDrafts
from decode_node.step_drafts import StepDrafts
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.tiny import make_tiny_model
from outrider.profile import Capture, ProfileOptions, StartProfile, StepKind
from outrider.request import FinishReason, LogprobsRequest, SamplingParams, VerificationMethod
from outrider.rpc.peer_security import PLAINTEXT
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    OpenSequenceGroup,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleDone,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.step_cost import StepCostModel
from tests.speculation.draft_trees import SHAPES, path_to

pytestmark = pytest.mark.usefixtures("steps_take_a_set_time")

PROMPT = (11, 12, 13, 14, 15, 11, 12, 13, 14, 15, 11, 12)
SESSION = 1


class ScriptedDrafts(NoDrafts):
    """A draft client whose proposals come from `propose(token_ids, num_wanted)`."""

    def __init__(self, propose):
        self.propose = propose

    def take(self, wants, *, wait_seconds):
        return StepDrafts({want.sequence_id: self._draft(want) for want in wants})

    def _draft(self, want):
        proposed = self.propose(list(want.token_ids), want.num_wanted)
        if isinstance(proposed, DraftTree):
            return proposed
        return DraftTree(len(want.token_ids), token_ids=tuple(proposed))


class Node:
    """A decode loop driven by hand."""

    def __init__(self, model_path, *, drafts=None, **config):
        self.events = []
        self.stats = []
        config = DecodeNodeConfig(**{"kv_cache": KVCacheConfig(num_blocks=256), "local_fallback": "none", **config})
        build = make_build(config, ModelConfig(id=str(model_path), num_threads=1), PLAINTEXT)
        self.parts = build(bytes(16), "decode", self._emit)
        self.parts.ingest.start()
        if drafts is not None:
            self.parts.loop._drafts._client = drafts
        self.ids = itertools.count(1)

    def _emit(self, events, stats):
        self.events += itertools.chain.from_iterable(events.values())
        if stats is not None:
            self.stats.append(stats)

    def submit(self, command):
        self.parts.loop.submit(command)

    def open(self, *, prompt=PROMPT, session=SESSION, **fields):
        group_id = next(self.ids).to_bytes(16, "big")
        sampling = fields.pop("sampling", {})
        samples = fields.pop("samples", None) or tuple(map(SampleStart, range(sampling.get("n", 1))))
        group = OpenSequenceGroup(
            sequence_group_id=group_id,
            transfer_id=group_id[::-1],
            request_id="r",
            prompt_token_ids=prompt,
            samples=samples,
            sampling=SamplingParams(**{"seed": 7, "max_tokens": 40, "temperature": 0.0, **sampling}),
            **fields,
        )
        self.submit(GroupOpened(session, group, "127.0.0.1"))
        return group_id

    def retarget(self, group_id, transfer_id):
        retarget = RetargetSequenceGroup(sequence_group_id=group_id, transfer_id=transfer_id)
        self.submit(GroupRetargeted(SESSION, retarget))

    def run(self, *, max_turns=2000):
        """Until nothing is left to do."""
        with torch.inference_mode():
            self.parts.loop.iterate()
            for _ in range(max_turns):
                if not self.parts.engine.scheduler.has_work:
                    return self
                self.parts.loop.iterate()
        raise AssertionError("the loop does not end")

    def tokens(self, group_id, sample=0):
        return [
            token
            for event in self.events
            if isinstance(event, SampleTokens) and (event.sequence_group_id, event.sample) == (group_id, sample)
            for token in event.token_ids
        ]

    def find(self, kind, group_id):
        return [event for event in self.events if isinstance(event, kind) and event.sequence_group_id == group_id]

    def assert_nothing_is_held(self):
        pool = self.parts.engine.pool
        pool.check_integrity(())
        assert pool.num_free_blocks == pool.num_blocks
        assert self.parts.desk.num_groups == 0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.fixture
def make_node(model_path):
    nodes = []

    def make(**config):
        nodes.append(Node(model_path, **config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.parts.ingest.stop()


def generate(node, **fields):
    group_id = node.open(**fields)
    node.run()
    return node.tokens(group_id)


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
        """A tree of any shape, one path of which is right."""
        parents = shuffled.choice(list(SHAPES.values()))[:num_wanted]
        right = dict(zip(path_to(parents, shuffled.randrange(len(parents))), oracle(token_ids, num_wanted)))  # noqa: B905
        wrong_ids = iter(shuffled.sample(range(299), 20))
        return DraftTree(
            len(token_ids), token_ids=tuple(right.get(i, next(wrong_ids)) for i in range(len(parents))), parents=parents
        )

    for propose in (oracle, half_right, wrong, bush):
        node = make_node(drafts=ScriptedDrafts(propose))
        assert generate(node, sampling=sampling) == plain
        assert sum(stats.num_draft_tokens for stats in node.stats) > 0
        node.assert_nothing_is_held()
    assert sum(stats.num_accepted_draft_tokens for stats in node.stats) > 0  # of branches


def test_an_oracle_saves_steps(make_node, monkeypatch):
    monkeypatch.setattr(StepCostModel, "seconds", lambda *_, num_more=0: [1.0] * (num_more + 1))  # rows are free
    plain = make_node()
    expected = generate(plain)
    node = make_node(drafts=ScriptedDrafts(lambda tokens, n: expected[len(tokens) - len(PROMPT) :][:n]))
    assert generate(node) == expected
    assert len(node.stats) < len(plain.stats) / 3
    accepted = sum(stats.num_accepted_draft_tokens for stats in node.stats)
    assert accepted == sum(stats.num_draft_tokens for stats in node.stats)


def test_the_local_fallback_changes_no_token(make_node):
    assert generate(make_node(local_fallback="ngram")) == generate(make_node())


def test_tokens_do_not_depend_on_the_batch_around(make_node):
    alone = generate(make_node(), sampling={"temperature": 1.0})
    node = make_node(local_fallback="ngram")
    others = [node.open(prompt=PROMPT[i:], sampling={"temperature": 1.0, "seed": i}) for i in range(8)]
    mine = node.open(sampling={"temperature": 1.0})
    node.run()
    assert node.tokens(mine) == alone
    assert all(len(node.tokens(other)) == 40 for other in others)
    node.assert_nothing_is_held()


def test_sample_0_of_n_is_what_one_sample_gives(make_node):
    alone = generate(make_node(), sampling={"temperature": 1.0})
    node = make_node()
    group_id = node.open(sampling={"temperature": 1.0, "n": 4})
    node.run()
    samples = [node.tokens(group_id, sample) for sample in range(4)]
    assert samples[0] == alone
    assert len({tuple(tokens) for tokens in samples}) == 4
    assert len(node.find(SampleDone, group_id)) == 4
    node.assert_nothing_is_held()


def test_generation_goes_on_from_tokens_that_were_brought(make_node):
    whole = generate(make_node(), sampling={"temperature": 1.0, "frequency_penalty": 0.7})
    rest = generate(
        make_node(),
        sampling={"temperature": 1.0, "frequency_penalty": 0.7},
        samples=(SampleStart(0, tuple(whole[:15])),),
    )
    assert rest == whole[15:]


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_samples_cut_at_different_lengths_go_on_on_another_node(make_node, sampling):
    """As after the loss of a node: each unfinished sample is opened with the tokens that it has."""
    undisturbed = make_node(local_fallback="ngram")
    group_id = undisturbed.open(sampling={**sampling, "n": 4}, logprobs=LogprobsRequest(num_top=1))
    undisturbed.run()
    whole = [undisturbed.tokens(group_id, sample) for sample in range(4)]
    cuts = {0: 33, 2: 7, 3: 0}
    for config in ({}, {"local_fallback": "ngram", "max_rows_per_step": 16}):
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


def test_a_stop_token_ends_the_sample_and_is_reported(make_node):
    plain = generate(make_node())
    stop = next(token for index, token in enumerate(plain) if index > 3 and token not in plain[:index])
    node = make_node(local_fallback="ngram")
    group_id = node.open(stop_token_ids=(stop,))
    node.run()
    (done,) = node.find(SampleDone, group_id)
    assert (done.reason, done.stop_token_id) == (FinishReason.STOP, stop)
    assert node.tokens(group_id) == plain[: plain.index(stop) + 1]


def test_logprobs_come_with_each_token_whatever_is_drafted(make_node):
    plain = make_node()
    plain_id = plain.open(logprobs=LogprobsRequest(num_top=2))
    plain.run()
    drafted = make_node(local_fallback="ngram")
    drafted_id = drafted.open(logprobs=LogprobsRequest(num_top=2))
    drafted.run()

    def logprobs(node, group_id):
        return [value for event in node.find(SampleTokens, group_id) for value in event.logprobs]

    expected, found = logprobs(plain, plain_id), logprobs(drafted, drafted_id)
    assert [value.token_id for value in found] == drafted.tokens(drafted_id)
    assert [value.logprob for value in found] == pytest.approx([value.logprob for value in expected], abs=1e-3)
    assert all(len(value.top) == 2 for value in found)
    assert [value.rank for value in found] == [value.rank for value in expected]


def test_preempted_sequences_give_the_same_tokens(make_node):
    roomy = make_node()
    prompts = [tuple((7 * i + j) % 250 + 10 for j in range(20)) for i in range(4)]
    sampling = {"temperature": 1.0, "max_tokens": 120}
    expected = [generate(roomy, prompt=prompt, sampling=sampling) for prompt in prompts]
    tight = make_node(local_fallback="ngram")
    pool = tight.parts.engine.pool
    groups = [tight.open(prompt=prompt, sampling=sampling) for prompt in prompts]
    with torch.inference_mode():
        tight.parts.loop.iterate()
    held = pool.allocate(pool.num_free_blocks - 12)  # four sequences of 140 tokens want 36
    tight.run()
    assert sum(stats.num_preempted for stats in tight.stats) > 0
    assert [tight.tokens(group) for group in groups] == expected
    tight.parts.engine.pool.release(held)
    tight.assert_nothing_is_held()


def test_a_repeated_prompt_is_found_in_the_prefix_cache(make_node):
    node = make_node()
    prompt = tuple(range(20, 53))
    first = generate(node, prompt=prompt)
    again = node.open(prompt=prompt)
    node.run()
    (granted,) = node.find(Granted, again)
    assert granted.held_prefix_length == 32
    assert granted.num_tokens_to_compute == 1
    assert node.tokens(again) == first


def test_a_prompt_of_another_tenant_is_not_found_in_the_prefix_cache(make_node):
    node = make_node()
    prompt = tuple(range(20, 53))
    first = generate(node, prompt=prompt, cache_salt=b"alice")
    again = [node.open(prompt=prompt, cache_salt=salt) for salt in (b"bob", b"alice")]
    node.run()
    assert [node.find(Granted, group)[0].held_prefix_length for group in again] == [0, 32]
    assert [node.tokens(group) for group in again] == [first, first]


def test_a_long_prompt_is_granted_a_transfer_and_cancelling_frees_it(make_node):
    node = make_node()
    group_id = node.open(prompt=tuple(range(10, 110)))
    with torch.inference_mode():
        node.parts.loop.iterate()
    (granted,) = node.find(Granted, group_id)
    assert granted.kv_address.startswith("127.0.0.1:")
    assert node.parts.engine.pool.num_free_blocks < 256
    node.submit(GroupCancelled(SESSION, CancelSequenceGroup(sequence_group_id=group_id)))
    node.run()
    node.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ()}, RejectReason.INVALID),
        ({"prompt": (1, 400)}, RejectReason.INVALID),
        ({"sampling": {"max_tokens": 0}}, RejectReason.INVALID),
        ({"sampling": {"max_tokens": 2048}}, RejectReason.TOO_LARGE),
        ({"sampling": {"n": 65}}, RejectReason.TOO_LARGE),
        ({"sampling": {"n": 2}, "samples": (SampleStart(2),)}, RejectReason.INVALID),
        ({"sampling": {"n": 2}, "samples": (SampleStart(1), SampleStart(0))}, RejectReason.INVALID),
        ({"sampling": {"n": 2}, "samples": (SampleStart(1), SampleStart(1))}, RejectReason.INVALID),
        ({"samples": (SampleStart(0, (400,)),)}, RejectReason.INVALID),
        ({"samples": (SampleStart(0, (1,) * 40),)}, RejectReason.INVALID),
    ],
)
def test_what_can_never_run_is_rejected(make_node, fields, reason):
    node = make_node()
    group_id = node.open(**fields)
    node.run()
    (rejected,) = node.find(Rejected, group_id)
    assert rejected.reason is reason
    node.assert_nothing_is_held()


def test_more_than_max_running_is_no_room_and_nothing_is_kept(make_node):
    node = make_node(max_running_sequences=2)
    groups = [node.open(sampling={"max_tokens": 5}) for _ in range(3)]
    node.run()
    (rejected,) = node.find(Rejected, groups[2])
    assert rejected.reason is RejectReason.NO_ROOM
    assert len(node.tokens(groups[1])) == 5
    node.assert_nothing_is_held()


def test_the_end_of_a_session_frees_its_groups_and_no_other(make_node):
    node = make_node()
    with torch.inference_mode():
        mine = node.open(session=1)
        other = node.open(session=2)
        node.parts.loop.iterate()
        node.submit(SessionEnded(1))
        node.run()
    assert len(node.tokens(other)) == 40
    assert len(node.tokens(mine)) < 5
    node.assert_nothing_is_held()


def test_a_drained_node_takes_nothing_new_and_gives_up_the_rest_at_the_deadline(make_node):
    node = make_node()
    running = node.open()
    with torch.inference_mode():
        node.parts.loop.iterate()
    node.submit(DrainStarted())
    refused = node.open()
    node.submit(DrainExpired())
    node.run()
    assert node.find(Rejected, refused)[0].reason is RejectReason.DRAINING
    assert node.find(SequenceGroupFailed, running)[0].code == 14
    node.assert_nothing_is_held()


def test_random_cancels_leave_the_pool_whole(make_node):
    node = make_node(local_fallback="ngram", max_running_sequences=16)
    choice = random.Random(3)
    live = []
    with torch.inference_mode():
        for _ in range(60):
            prompt = tuple(choice.randrange(3, 299) for _ in range(choice.choice((5, 30, 80))))
            live.append(node.open(prompt=prompt, sampling={"n": choice.choice((1, 1, 3)), "max_tokens": 30}))
            if choice.random() < 0.5:
                samples = () if choice.random() < 0.5 else (0,)
                cancel = CancelSequenceGroup(sequence_group_id=choice.choice(live), samples=samples)
                node.submit(GroupCancelled(SESSION, cancel))
            node.parts.loop.iterate()
        for group_id in live:
            node.submit(GroupCancelled(SESSION, CancelSequenceGroup(sequence_group_id=group_id)))
        node.run()
    node.assert_nothing_is_held()


def test_chunked_recomputation_gives_the_same_tokens(make_node):
    prompt = tuple(random.Random(5).randrange(3, 299) for _ in range(33))
    expected = generate(make_node(), prompt=prompt)
    assert generate(make_node(max_rows_per_step=16), prompt=prompt) == expected


@pytest.mark.parametrize("method", VerificationMethod)
def test_a_request_is_verified_by_its_method(make_node, method):
    node = make_node(drafts=ScriptedDrafts(lambda tokens, n: [(tokens[-1] + 7) % 299] * n))
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
    node = make_node(drafts=ScriptedDrafts(lambda tokens, n: [(tokens[-1] + 7) % 299] * n))
    monkeypatch.setattr("outrider.speculation.verify.coupled.accept", lambda draft, target: (*draft, target[-1]))
    assert generate(node) != plain


def test_speculation_counts_add_up(make_node):
    node = make_node(local_fallback="ngram")
    group_id = node.open()
    node.run()
    counts = [event.speculation for event in node.find(SampleTokens, group_id)]
    total = sum(counts[1:], counts[0])
    assert sum(total.acceptance_histogram) == total.num_spec_steps
    assert sum(i * n for i, n in enumerate(total.acceptance_histogram)) == total.num_accepted_draft_tokens
    assert total.num_wanting_steps >= total.num_spec_steps


def test_a_profile_accounts_for_every_nanosecond_and_changes_no_token(make_node):
    plain = generate(make_node())
    node = make_node(drafts=ScriptedDrafts(lambda token_ids, num_wanted: plain[len(token_ids) - len(PROMPT) :][:2]))
    captured = []
    before = time.perf_counter_ns()
    node.submit(StartProfile(Capture(ProfileOptions(num_steps=10), captured.append)))
    assert generate(node) == plain
    elapsed = time.perf_counter_ns() - before
    (profile,) = captured
    first, *others = profile.steps
    assert first.kind is StepKind.PROMPT  # short enough to be computed here
    assert StepKind.VERIFY in {step.kind for step in others} <= {StepKind.VERIFY, StepKind.DECODE}
    assert {step.num_rows for step in others} <= {1, 2, 3}  # as many as pay
    spent = sum(sum(step.nanoseconds.values()) for step in profile.steps)
    assert 0 < spent <= elapsed
    for step in profile.steps:
        assert {"schedule", "batch", "sampling", "commit"} <= set(step.nanoseconds)
        assert any(part.startswith("forward") for part in step.nanoseconds)
        assert min(step.nanoseconds.values()) >= 0


def test_the_parts_of_a_step_are_told_without_a_profile_too(make_node):
    node = make_node()
    generate(node)
    assert all({"forward", "sampling"} <= set(stats.nanoseconds) for stats in node.stats)
    assert all(
        stats.nanoseconds["forward"] + stats.nanoseconds["sampling"] <= stats.seconds * 1e9 for stats in node.stats
    )
