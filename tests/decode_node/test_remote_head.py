"""The decode loop and draft nodes with a head, over loopback: the loop sends paged features and gets drafts."""

from __future__ import annotations

import threading

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

import outrider.heads.open
from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.drafting import drafted_sequence
from outrider.model_hub.config import ModelConfig
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer
from outrider.speculation.step_cost import StepCostModel
from tests.decode_node.tiny_node import PROMPT, TinyNode
from tests.support.echo_head import EchoHead, make_echo_folder, make_echo_model
from tests.support.loop_thread import LoopThread
from tests.support.waiting import PATIENCE_SECONDS, wait_for

HOT = {"temperature": 1.0, "max_tokens": 60}
NUM_BEFORE_FAULT = 15  # generated tokens


@pytest.fixture(scope="module")
def echo_path(tmp_path_factory):
    return make_echo_model(tmp_path_factory.mktemp("echo"))


class Cluster:
    """Draft nodes and a decode node for a target whose head is always right."""

    def __init__(self, model_path, folder, *, num_draft_nodes):
        self.loop_thread = LoopThread()
        self._settings = ProposerSettings(model=ModelConfig(id=str(model_path), head=str(folder), num_threads=1))
        self.servers = {}
        self.drafts = {}
        for _ in range(num_draft_nodes):
            self.loop_thread.run(self._add_draft_node())
        self.node = TinyNode(
            model_path, head=str(folder), local_head=False, draft_targets=tuple(self.servers), draft_trees=False
        )
        self.client = self.node.parts.drafts
        self.loop_thread.run(self.client.start())
        wait_for(
            lambda: len(self.client.links) == num_draft_nodes and all(each.is_connected for each in self.client.links)
        )

    async def _add_draft_node(self):
        service = DraftNode(
            DraftNodeConfig(), lambda: make_proposer("head", self._settings), registry=CollectorRegistry()
        )
        server = grpc.aio.server()
        service.add_to(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        await service.start(address)
        self.servers[address], self.drafts[address] = server, service

    def stop(self):
        self.loop_thread.run(self.client.stop())
        for address in self.servers:
            self.loop_thread.run(self.servers[address].stop(0))
            self.loop_thread.run(self.drafts[address].stop())
        self.loop_thread.stop()
        self.node.close()

    @property
    def used(self):
        """The address of the draft node that serves the sequence; empty if there is none."""
        return next((link.address for link in self.client.links if link.node.num_sequences), "")

    def is_answered(self):
        """Returns whether draft nodes have received and answered all updates."""
        with self.client._changed:
            return all(
                each.assignment is not None and each.assignment.pending is None and not each.is_dirty
                for each in self.client._book._sequences.values()
            )

    def generate(self, *, until=10**9, group=None, waits=True):
        """Runs steps of a group, by default a new one, until it has ended. `waits`: each step waits for drafts."""
        node = self.node
        group = group or node.open(sampling=HOT)
        node.iterate()
        while node.engine.scheduler.has_work and len(node.tokens(group)) < until:
            if waits:
                wait_for(self.is_answered)
            node.iterate()
        return group


@pytest.fixture
def make_cluster(echo_path, tmp_path, monkeypatch):
    monkeypatch.setattr(outrider.heads.open, "FORMS", (EchoHead,))
    monkeypatch.setattr(StepCostModel, "seconds", lambda *_, num_more=0: [1.0] * (num_more + 1))
    monkeypatch.setattr(EchoHead, "opened", [])
    clusters = []

    def make(num_draft_nodes=1):
        folder = tmp_path / "parrot"
        if not folder.exists():
            make_echo_folder(folder)
        clusters.append(Cluster(echo_path, folder, num_draft_nodes=num_draft_nodes))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.stop()


@pytest.fixture
def expected(echo_path):
    """The answer without drafts."""
    node = TinyNode(echo_path)
    group = node.open(sampling=HOT)
    node.run()
    node.close()
    return node.tokens(group)


def assert_fed_rightly(text):
    """Asserts that rows with features of the target are of this text, each with the feature of the token before."""
    known = {(place, *text[place : place + 2]) for place in range(len(text) - 1)}
    for head in EchoHead.opened:
        assert set(head.fed) <= known


def test_a_draft_node_with_a_head_drafts_and_tokens_are_those_without(make_cluster, expected):
    cluster = make_cluster()
    group = cluster.generate()
    assert cluster.node.tokens(group) == expected
    assert cluster.node.num_accepted == cluster.node.num_drafted > 20
    (head,) = EchoHead.opened
    assert len({place for place, *_ in head.fed}) > len(PROMPT) + 40
    assert_fed_rightly([*PROMPT, *expected])
    cluster.node.assert_nothing_is_held()


def test_a_draft_node_reads_the_features_of_a_prompt_that_no_update_has_room_for(make_cluster, expected, monkeypatch):
    cluster = make_cluster()
    limit = (len(PROMPT) - 2) * cluster.client._book._features.bytes_per_token
    monkeypatch.setattr(drafted_sequence, "MAX_FEATURE_BYTES_PER_UPDATE", limit)
    inbox, opened = cluster.node.parts.ingest.inbox, []
    monkeypatch.setattr(inbox, "read", lambda *part, read=inbox.read: opened.append(part) or read(*part))
    groups = [cluster.generate() for _ in range(2)]
    assert [cluster.node.tokens(group) for group in groups] == [expected] * 2
    assert cluster.node.num_accepted == cluster.node.num_drafted > 20
    assert len(opened) >= 2, "draft nodes have read what was offered"
    assert_fed_rightly([*PROMPT, *expected])
    cluster.node.assert_nothing_is_held()


def test_a_draft_node_that_is_lost_in_mid_answer_changes_no_token_and_another_one_goes_on(make_cluster, expected):
    cluster = make_cluster(num_draft_nodes=2)
    group = cluster.generate(until=NUM_BEFORE_FAULT)
    lost = cluster.used
    num_accepted = cluster.node.num_accepted
    cluster.loop_thread.run(cluster.servers[lost].stop(0))
    wait_for(lambda: cluster.used not in ("", lost))
    cluster.generate(group=group)
    assert cluster.node.tokens(group) == expected
    assert cluster.node.num_accepted > num_accepted + 10
    assert_fed_rightly([*PROMPT, *expected])


def test_a_draft_node_that_freezes_in_mid_answer_changes_no_token(make_cluster, expected):
    cluster = make_cluster()
    group = cluster.generate(until=NUM_BEFORE_FAULT)
    loop = cluster.drafts[cluster.used].draft_loop()
    step, thaw = loop.step, threading.Event()

    def freeze():
        assert thaw.wait(PATIENCE_SECONDS)
        return step()

    loop.step = freeze
    cluster.generate(group=group, waits=False)
    thaw.set()
    assert cluster.node.tokens(group) == expected
    second = cluster.generate()
    assert cluster.node.tokens(second) == expected
    assert_fed_rightly([*PROMPT, *expected])
