"""Rolling updates of the Helm chart's pods, run as processes on this machine. Clients do not notice them."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import pytest

from outrider.client import Client
from tests.deploy.chart import Manifests
from tests.deploy.load import ANSWER_SECONDS, Load, ask_chat
from tests.deploy.mounted_secrets import Certificates, MountedSecret, token_line
from tests.deploy.pods import End, Machine
from tests.faults.requests import Request
from tests.support.loop_thread import LoopThread
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode
from tests.support.store_server import StoreServer

REQUESTS = (("greedy", 0), ("drafts", 1), ("n = 3", 2))
PACE = 0.2
PATIENCE = 120
"""Seconds within which no process declares another one lost, however busy the machine is."""


@pytest.fixture
def fake_nodes():
    """A decode node that generates 50 tokens a second, and a prefill node, on an event loop in a thread."""
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
    """Replaces the second of two routers. Some answers end on it during its drain, others continue on the first one."""
    patient = {"router": {"liveness_timeout_seconds": PATIENCE}}
    router = {"preStopSeconds": 1, "drainSeconds": 1, "extraSettings": patient}
    manifests = Manifests({"router": router, "draft_node": {"enabled": False}})
    with Machine(manifests, tmp_path, pace=0.02, elsewhere=fake_nodes, spare_seconds=PATIENCE) as machine:
        routers = machine.start("router")
        for pod in routers:
            pod.wait_ready()
        with contextlib.ExitStack() as stack:
            questions = {}
            for max_tokens in (20, 75):  # answers take 0.4 and 1.5 s
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


# ---------------------------------------------------------------- whole clusters

NUM_LONG = 1500
"""Number of tokens of a prompt that takes a while to compute."""


def settings_of(model):
    return {
        "model": {"id": str(model), "num_threads": 1},
        "kv_cache": {"memory": "24MiB", "prefix_cache": False},  # so every prompt is computed
    }


PATIENT = {
    "router": {
        "preStopSeconds": 1,
        "extraSettings": {"router": {"liveness_timeout_seconds": PATIENCE, "store_timeout_seconds": 30}},
    },
    "decode_node": {
        "replicas": 1,
        "extraSettings": {"decode_node": {"session_timeout_seconds": PATIENCE, "draft_rows": "all"}},
    },
}


@pytest.fixture
def one_thread_each(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(machine):
    """Starts nodes and routers, waits until they are ready, and returns the routers' addresses."""
    for component in ("prefill-node", "decode-node", "draft-node"):
        machine.start(component)
    routers = machine.start("router")
    for pod in machine.pods:
        pod.wait_ready()
    return [f"{pod.address}:50051" for pod in routers]


def questions_of(client):
    long = {"num_prompt_tokens": NUM_LONG, "max_tokens": 50}
    return {(kind, number): partial(ask, client, kind, number) for kind, number in REQUESTS} | {
        "long prompt": partial(ask, client, "greedy", 3, **long)
    }


def ask(client, kind, number, **options):
    return Request(client, kind, number, **options).join(timeout_seconds=ANSWER_SECONDS)


def assert_nobody_noticed(machine, load):
    assert load.faults == []
    assert [(name, end) for name, end in machine.ends if end.status != 0 or end.was_killed] == []
    assert {name for name, _ in machine.ends} == machine.manifests.workloads().keys()
    assert sum(pod.num_restarts_due for pod in machine.pods) == 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_store", [True, False])
def test_a_rolling_update_of_every_role_under_load_loses_nothing(tiny_model, tmp_path, one_thread_each, has_store):
    with StoreServer(tmp_path) as store:
        url, openai = store.url if has_store else "", {"enabled": True, "preStopSeconds": 1}
        values = {"settings": settings_of(tiny_model), "store": {"url": url}, "openai": openai, **PATIENT}
        with Machine(Manifests(values), tmp_path, pace=PACE) as machine:
            addresses = start(machine)
            # The gateway does not look names up in our file, so it gets addresses.
            machine.overrides["openai"] = {"OUTRIDER_GATEWAY__ROUTER_TARGETS": ",".join(addresses)}
            for pod in machine.start("openai"):
                pod.wait_ready()
            with Client(addresses) as client:
                model = client.model().name
                chats = {("chat", seed): partial(chat, machine, model, seed) for seed in (1, 2)}
                load = Load(questions_of(client) | chats)
                with load.running():
                    for component in ("draft-node", "prefill-node", "decode-node", "router", "openai"):
                        machine.roll(component)
                        load.wait_for_more()
            assert_nobody_noticed(machine, load)


def chat(machine, model, seed):
    return ask_chat(random.choice(machine.ready_addresses("openai")), model, seed=seed, max_tokens=300)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_with_tls_and_tokens_too_and_certificates_that_are_renewed_meanwhile(tiny_model, tmp_path, one_thread_each):
    token = "a-token-of-a-test"
    values = {
        "settings": settings_of(tiny_model),
        "tls": {"enabled": True, "secretName": "certificates"},
        "tokens": {"secretName": "tokens"},
        **PATIENT,
    }
    tokens = MountedSecret(tmp_path / "tokens")
    tokens.set({"tokens": token_line("alice", token)})
    mounts = {"/run/tls": tmp_path / "tls", "/run/tokens": tokens.folder}
    with Machine(Manifests(values), tmp_path, pace=PACE, mounts=mounts) as machine:
        certificates = Certificates(tmp_path / "tls", machine.addresses)
        addresses = start(machine)
        with Client(addresses, tls=certificates.client_tls, token=token) as client:
            load = Load(questions_of(client))
            with load.running():
                for component in ("draft-node", "prefill-node", "decode-node", "router"):
                    certificates.renew()
                    machine.roll(component)
                    load.wait_for_more()
        assert_nobody_noticed(machine, load)
        assert not any("renewed TLS files were rejected" in pod.log() for pod in machine.pods)
