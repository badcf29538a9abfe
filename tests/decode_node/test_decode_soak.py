"""Everything at once on a scripted engine: pushes, cancels, drafts that lie, a pool that is too small."""

from __future__ import annotations

import random

import pytest

from decode_node.commands import SessionEnded
from outrider.errors import AbortedError
from outrider.session import Granted, KvFailed, Rejected, RejectReason, SampleDone, SampleTokens
from outrider.speculation.draft_tree import DraftTree
from tests.decode_node.conftest import Node
from tests.support.fake_drafts import TextDrafts
from tests.support.pool_integrity import check_pool


class HalfRightDrafts(TextDrafts):
    """Drafts of the model itself, some of them altered and some with branches."""

    def __init__(self, model, choice):
        super().__init__(self._guess)
        self.model, self.choice = model, choice

    def _guess(self, token_ids, num_wanted):
        if self.choice.random() < 0.2:
            return None
        draft = self.model.generate(token_ids, num_wanted)
        if self.choice.random() < 0.5:
            draft[self.choice.randrange(len(draft))] = self.choice.randrange(64)
        return self._with_branches(draft, len(token_ids), num_wanted) if self.choice.random() < 0.5 else draft

    def _with_branches(self, right, length, num_wanted):
        """Returns a tree of wrong tokens and a path that may be right, in any valid order."""
        token_ids, parents, last = [], [], -1
        while len(token_ids) < num_wanted:
            depth = 0 if last < 0 else self._depth(parents, last)
            if right and self.choice.random() < 0.6 and depth < len(right):
                token_ids.append(right[depth])
                parents.append(last)
                last = len(token_ids) - 1
            else:
                parents.append(self.choice.randrange(-1, len(token_ids)))
                token_ids.append(self.choice.randrange(64))
            if not DraftTree(0, token_ids=tuple(token_ids), parents=tuple(parents)).is_well_formed:
                token_ids.pop()
                parents.pop()
                last = min(last, len(token_ids) - 1)
        return DraftTree(length, token_ids=tuple(token_ids), parents=tuple(parents))

    def _depth(self, parents, index):
        return 1 if parents[index] < 0 else 1 + self._depth(parents, parents[index])


@pytest.mark.usefixtures("fixed_step_times")
def test_finished_samples_have_the_tokens_of_an_undisturbed_run_and_no_block_is_lost():
    nodes = [_soak(seed) for seed in range(8)]
    for seed in (9, 11, 13):
        nodes.append(_soak(seed, num_speculative_tokens=0))  # such steps are prepared ahead
    assert sum(node.num_preempted for node in nodes) > 0
    assert sum(isinstance(event, KvFailed) for node in nodes for event in node.events) > 10
    assert sum(isinstance(event, SampleDone) for node in nodes for event in node.events) > 50
    for is_asynchronous in (False, True):
        stats = [each for node in nodes if node.engine.runner.is_asynchronous is is_asynchronous for each in node.stats]
        assert sum(sum(each.num_accepted_by_source.values()) for each in stats) > 50


def _soak(seed, *, num_speculative_tokens=4):
    choice = random.Random(seed)
    # Every other node computes on a scripted device, in parallel with its host.
    node = Node(
        num_blocks=choice.choice((24, 32, 40)),
        num_speculative_tokens=num_speculative_tokens,
        is_asynchronous=seed % 2 == 1,
    )
    node.loop._drafts._client = HalfRightDrafts(node.model, choice)
    stems = [tuple(choice.randrange(64) for _ in range(24)) for _ in range(3)]
    opened = {}

    def say_something():
        if choice.random() < 0.4:
            stem = choice.choice(stems)
            prompt = stem[: choice.randrange(1, 25)] + tuple(choice.randrange(64) for _ in range(choice.randrange(8)))
            sampling = {"n": choice.choice((1, 1, 2, 4)), "max_tokens": choice.randrange(1, 50)}
            session = choice.choice((1, 1, 2))
            group_id = node.open(prompt=prompt, session=session, sampling=sampling, priority=choice.randrange(2))
            opened[group_id] = (prompt, sampling["n"], sampling["max_tokens"])
        if opened and choice.random() < 0.15:
            node.cancel(choice.choice(list(opened)), *choice.choice(((), (0,), (1,), (0, 1))))
        if choice.random() < 0.01:
            node.loop.submit(SessionEnded(2))

    for _ in range(120):
        node.groups._admission._mean_output_tokens = 1.0  # admission expects no growth, so sequences are preempted
        if node.engine.runner.is_asynchronous and choice.random() < 0.7:
            node.engine.runner.on_launch = say_something
        else:
            say_something()
        node.iterate()
        node.engine.runner.on_launch = lambda: None
        _push_some(node, opened, choice)
        check_pool(node.engine.pool, _tables(node))
    for _ in range(3):  # until the last reservations have timed out
        node.clock.advance(node.transfer_timeout_seconds)
        node.run()
    _check_tokens(node, opened)
    node.assert_nothing_is_held()
    return node


def _push_some(node, opened, choice):
    for group_id, (prompt, _, _) in opened.items():
        granted = node.find(Granted, group_id)
        transfer_id = granted[-1].transfer_id if granted else b""
        if transfer_id not in node.ingest.inbox._transfers:
            continue
        what = choice.random()
        if what < 0.4:
            spec = node.ingest.specs[transfer_id]
            until = None if what < 0.3 else choice.randrange(spec.start_token, spec.end_token) + 1
            try:
                node.push(group_id, prompt[:-1], transfer_id=transfer_id, until=until)
            except AbortedError:
                continue  # the group was cancelled, or some KV has already arrived
        elif what < 0.6:
            if what < 0.5:
                node.ingest.inbox.fail(transfer_id, "scripted failure")
            transfer_id = choice.choice((b"", choice.randbytes(16)))
            node.retarget(group_id, transfer_id, keeps_received=choice.random() < 0.5)


def _tables(node):
    groups = node.groups
    for group in groups._groups:
        if group.kv is not None:
            yield group.kv.block_ids
        for sample in group.samples.values():
            if sample.sequence.kv is not None:
                yield sample.sequence.kv.block_ids
    yield from (kv.block_ids for kv in groups._reservations._undrained.values())


def _check_tokens(node, opened):
    for group_id, (prompt, n, max_tokens) in opened.items():
        expected = node.model.generate(prompt, max_tokens)
        finished = {done.sample for done in node.find(SampleDone, group_id)}
        for sample in range(n):
            tokens = node.tokens(group_id, sample)
            assert tokens == (expected if sample in finished else expected[: len(tokens)])
        for event in node.find(SampleTokens, group_id):
            assert event.token_ids
        granted, rejected = node.find(Granted, group_id), node.find(Rejected, group_id)
        assert len(rejected) <= 1
        if granted and rejected:  # a running sequence took the group's blocks before any KV was written
            assert rejected[0].reason is RejectReason.NO_ROOM
            assert not any(node.tokens(group_id, sample) for sample in range(n))
            assert not finished
