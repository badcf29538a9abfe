"""SIGTERM, node by node: running requests end or get an error, and the process ends with status 0 in time."""

from __future__ import annotations

import contextlib
import signal

import grpc
import pytest

from outrider.client import Client
from outrider.errors import PeerLostError
from outrider.faults import FAULTS_VARIABLE
from tests.faults.requests import Request
from tests.support.fault_points import FaultPoints
from tests.support.processes import NOT_SERVING, SERVING, WAIT_SECONDS, RoleProcess, watch_health

STEP = "decode.step"
LONG_DRAIN = "server.drain_seconds=600"
"""A drain that outlasts every timeout here."""
ANSWER_SECONDS = 300.0
"""Seconds that a long answer may take on a busy machine."""

pytestmark = pytest.mark.timeout(480)


class Roles:
    """One process of each role, without a supervisor that would restart it."""

    def __init__(self, stack: contextlib.ExitStack, model, *settings: str, decode_environ: dict[str, str]) -> None:
        def start(role: str, *more: str, **environ: str) -> RoleProcess:
            return stack.enter_context(RoleProcess(role, *settings, *more, **environ))

        engine = (f"model.id={model}", "model.num_threads=1", "kv_cache.memory=6MiB")
        self.prefill = start("prefill_node", LONG_DRAIN, *engine)
        self.draft = start("draft_node", LONG_DRAIN)
        drafts = f"decode_node.draft_targets={address_of(self.draft)}"
        self.decode = start("decode_node", drafts, *engine, **decode_environ)
        self.router = start(
            "router",
            "server.port=0",
            f"router.prefill_targets={address_of(self.prefill)}",
            f"router.decode_targets={address_of(self.decode)}",
            f"router.draft_targets={address_of(self.draft)}",
        )
        self.client = stack.enter_context(Client(self.router.serving()))


def address_of(process: RoleProcess) -> str:
    return process.announcement("address")["address"]


@pytest.fixture
def start_roles(tiny_model):
    with contextlib.ExitStack() as stack:
        yield lambda *settings, **environ: Roles(stack, tiny_model, *settings, **environ)


def begun(client: Client, *, max_tokens: int) -> Request:
    """Starts a request, and waits for its first token."""
    request = Request(client, "greedy", 3, max_tokens=max_tokens)
    request.wait_for_tokens(1, timeout_seconds=WAIT_SECONDS)
    return request


def test_a_draft_node_ends_at_once_and_a_decode_node_when_what_it_runs_has_ended(start_roles, tmp_path):
    points = FaultPoints(tmp_path, [STEP])
    roles = start_roles(
        "server.drain_seconds=240", "router.liveness_timeout_seconds=240", decode_environ=points.environ
    )
    request = begun(roles.client, max_tokens=400)
    points.arm(STEP)  # holds the request until the nodes have their signals
    status, _ = roles.draft.end()
    assert status == 0
    with grpc.insecure_channel(roles.decode.log()[0]["address"]) as channel:
        health = watch_health(channel, "outrider.v1.DecodeService")
        assert next(health) == SERVING
        roles.decode.process.send_signal(signal.SIGTERM)
        assert next(health) == NOT_SERVING
        assert not request.is_done
        points.release(STEP)
        request.join(timeout_seconds=ANSWER_SECONDS)
    assert request.num_tokens == 400
    status, log = roles.decode.wait()
    assert status == 0
    for role in ("decode", "draft"):
        roles.router.wait_for_log("node left", lambda line, role=role: line["node"].startswith(role))
    assert not [line for line in log if line["level"] in ("warning", "error") and "draft" not in line["event"]]


def test_what_still_runs_at_the_last_decode_nodes_deadline_is_told_and_an_idle_prefill_node_ends_at_once(start_roles):
    roles = start_roles(
        "server.drain_seconds=0.2",
        "router.no_node_timeout_seconds=1",
        decode_environ={FAULTS_VARIABLE: f"{STEP}:*=delay:10"},  # 15 s
    )
    request = begun(roles.client, max_tokens=1500)
    status, log = roles.decode.end()
    assert status == 0
    assert "drain deadline passed" in [line["event"] for line in log]
    request.wait_for_end(timeout_seconds=ANSWER_SECONDS)
    assert isinstance(request.error, PeerLostError)
    assert request.error.reason == "NO_NODE"
    assert request.error.retry_after_seconds > 0
    assert 0 < request.num_tokens < 1500
    status, _ = roles.prefill.end()
    assert status == 0
    for role in ("decode", "prefill"):
        roles.router.wait_for_log("node left", lambda line, role=role: line["node"].startswith(role))
    assert not [line for line in roles.router.log() if line["event"] == "node lost"]
