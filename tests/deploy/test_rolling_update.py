"""Rolling updates of the Helm chart's pods, as processes of this machine, while clients ask: nobody notices."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import pytest

from outrider.client import Client
from tests.deploy.chart import Manifests
from tests.deploy.load import ANSWER_SECONDS, Load, ask_chat
from tests.deploy.pods import End, Machine
from tests.faults.requests import Request
from tests.support.loop_thread import LoopThread
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode
from tests.support.store_server import StoreServer

REQUESTS = (("greedy", 0), ("drafts", 1), ("n = 3", 2))
PACE = 0.2
PATIENCE = 120
"""Seconds: however busy the machine is, no process takes another one for lost."""


@pytest.fixture
def fake_nodes():
    """A decode node of 50 tokens a second, and a prefill node, on an event loop in a thread."""
    loop = LoopThread()
    decode, prefill = FakeDecodeNode(), FakePrefillNode()
    decode.step_seconds = 0.02
    for node in (decode, prefill):
        loop.run(node.start())
    yield {"outrider-decode-node": [decode.address], "outrider-prefill-node": [prefill.address]}
    for node in (decode, prefill):
        loop.run(node.stop())
    loop.stop()


def test_a_router_is_replaced_under_load(fake_nodes, tmp_path):
    """The last of two, as by an update that stops there. Some answers end on it, others continue on its neighbour."""
    manifests = Manifests({"router": {"preStopSeconds": 1, "drainSeconds": 1}, "draft_node": {"enabled": False}})
    with Machine(manifests, tmp_path, pace=0.02, elsewhere=fake_nodes) as machine:
        routers = machine.start("router")
        for pod in routers:
            pod.wait_ready()
        with contextlib.ExitStack() as stack:
            questions = {}
            for max_tokens in (20, 25, 100):  # 0.4, 0.5 and 2 s
                client = stack.enter_context(Client([f"{pod.address}:50051" for pod in reversed(routers)]))
                questions[max_tokens] = partial(ask_tokens, client, seed=7, max_tokens=max_tokens)
            load = Load(questions)
            with load.running():
                machine.replace(routers[1])
    assert load.faults == []
    assert load.num_answers.keys() == questions.keys()
    assert machine.ends == [("router", End(status=0, was_killed=False))]
    assert [pod.name for pod in machine.pods] == ["outrider-router-0", "outrider-router-1"]
    assert sum(pod.num_restarts_due for pod in machine.pods) == 0


def ask_tokens(client, **sampling):
    with client.generate("a prompt", **sampling) as stream:
        for _ in stream:
            pass
        return stream.token_ids(), stream.text()


def values_of(model, *, store, openai):
    return {
        "settings": {"model": {"id": str(model), "num_threads": 1}, "kv_cache": {"memory": "24MiB"}},
        "store": {"url": store},
        "router": {
            "preStopSeconds": 1,
            "extraSettings": {"router": {"liveness_timeout_seconds": PATIENCE, "store_timeout_seconds": 30}},
        },
        "decode_node": {
            "replicas": 1,
            "extraSettings": {"decode_node": {"session_timeout_seconds": PATIENCE, "draft_rows": "all"}},
        },
        "openai": {"enabled": openai, "preStopSeconds": 1},
    }


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_store", [True, False])
def test_a_rolling_update_of_every_role_under_load_loses_nothing(tiny_model, tmp_path, monkeypatch, has_store):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with StoreServer(tmp_path) as store:
        manifests = Manifests(values_of(tiny_model, store=store.url if has_store else "", openai=True))
        with Machine(manifests, tmp_path, pace=PACE) as machine:
            for component in ("prefill-node", "decode-node", "draft-node"):
                machine.start(component)
            addresses = [f"{pod.address}:50051" for pod in machine.start("router")]
            # The gateway looks names up by itself, and not in our file.
            machine.overrides["openai"] = {"OUTRIDER_GATEWAY__ROUTER_TARGETS": ",".join(addresses)}
            machine.start("openai")
            for pod in machine.pods:
                pod.wait_ready()
            with Client(addresses) as client:
                load = Load(
                    {(kind, number): partial(ask, client, kind, number) for kind, number in REQUESTS}
                    | {("chat", seed): partial(chat, machine, client.model().name, seed) for seed in (1, 2)}
                )
                with load.running():
                    for component in ("draft-node", "prefill-node", "decode-node", "router", "openai"):
                        machine.roll(component)
                        load.wait_for_more()
        assert load.faults == []
        assert [(name, end) for name, end in machine.ends if end.status != 0 or end.was_killed] == []
        assert {name for name, _ in machine.ends} == manifests.workloads().keys()
        assert sum(pod.num_restarts_due for pod in machine.pods) == 0


def ask(client, kind, number):
    return Request(client, kind, number).join(timeout_seconds=ANSWER_SECONDS)


def chat(machine, model, seed):
    return ask_chat(random.choice(machine.ready_addresses("openai")), model, seed=seed, max_tokens=300)
