from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from outrider.client import Client
from outrider.cluster.child import Child, ChildState, EventKind
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig, Supervision
from outrider.cluster.plan import ChildSpec, Launch
from outrider.errors import NotFoundError, PeerLostError
from tests.support.cluster_nodes import wait_for_node
from tests.support.waiting import wait_for

ROLE_PROCESS = Path(__file__).with_name("role_process.py")
WAIT_SECONDS = 30.0


def role_command(role: str) -> list[str]:
    return [sys.executable, str(ROLE_PROCESS), role]


def ends_with(status: int) -> dict:
    return {"environ": {"ROLE_ENDS": "decode_node", "ROLE_STATUS": str(status)}}


def make_cluster(
    tmp_path: Path, *, environ=None, overrides=(), end_seconds=WAIT_SECONDS, supervision=None, **config
) -> Cluster:
    launch = Launch(
        command=role_command,
        locate_model=False,
        log_directory=tmp_path / "logs",
        environ={**os.environ, **(environ or {})},
        overrides=overrides,
    )
    supervision = supervision or Supervision(restart_seconds=0.1, end_seconds=end_seconds)
    return Cluster(ClusterConfig(**{"port": 0, **config}), launch, supervision=supervision)


def wait_until_gone(pids: list[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=WAIT_SECONDS)
    assert alive == []


def test_the_router_starts_when_all_nodes_listen_and_knows_them_all(tmp_path):
    cluster = make_cluster(tmp_path, decode_nodes=2)
    events = []
    cluster.on_event = events.append
    with cluster:
        with Client(cluster.router_address) as client:
            decode_targets = client.model().proposer.split(",")
        nodes = {node.name: node for node in cluster.nodes}
        status = cluster.status()
    assert decode_targets == [nodes["decode-0"].address, nodes["decode-1"].address]
    assert nodes["decode-0"].description["draft_targets"] == [nodes["draft-0"].address]
    order = [(event.kind, event.name) for event in events]
    router_start = order.index((EventKind.STARTING, "router"))
    assert all(order.index((EventKind.LISTENING, name)) < router_start for name in nodes if name != "router")
    assert status["router"] == nodes["router"].address
    assert {entry["role"] for entry in status["nodes"]} == {"router", "prefill_node", "decode_node", "draft_node"}
    assert all(entry["metrics_address"] for entry in status["nodes"])
    assert cluster.exit_statuses == dict.fromkeys(nodes, 0)
    wait_until_gone([node.pid for node in nodes.values()])


def test_several_routers_are_one_address_for_clients_which_do_without_one_of_them(tmp_path):
    with make_cluster(tmp_path, routers=2) as cluster:
        routers = [cluster.node(name) for name in ("router-0", "router-1")]
        assert cluster.router_address == cluster.status()["router"] == ",".join(router.address for router in routers)
        with Client(cluster.router_address) as client:
            assert client.target == routers[0].address
            cluster.kill("router-0")
            assert client.model().name == "echo"
            assert client.target == routers[1].address
            wait_for_node(cluster, "router-0", lambda node: node.num_restarts == 1 and node.state is ChildState.SERVING)
    assert cluster.exit_statuses == dict.fromkeys(cluster.exit_statuses, 0)


def test_several_routers_have_consecutive_ports_whatever_a_file_says(tmp_path):
    base = two_free_ports()
    with make_cluster(tmp_path, routers=2, port=base, overrides=("server.port=1",)) as cluster:
        assert cluster.router_address == f"127.0.0.1:{base},127.0.0.1:{base + 1}"


def two_free_ports():
    for base in random.sample(range(20_000, 30_000, 2), 5000):  # other tests here look for ports, too
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", base))
            second.bind(("127.0.0.1", base + 1))
            return base
    raise AssertionError("no two ports side by side are free")


def test_a_node_that_dies_comes_back_on_its_port_and_a_frozen_one_is_stopped(tmp_path):
    with make_cluster(tmp_path, prefill_nodes=0, draft_nodes=0, end_seconds=2.5) as cluster:
        before = cluster.node("decode-0")
        for num_deaths in (1, 2):
            cluster.kill("decode-0", signal.SIGKILL)
            cluster.wait_serving(WAIT_SECONDS)
            after = cluster.node("decode-0")
            assert after.num_restarts == num_deaths
        assert after.pid != before.pid
        assert after.address == before.address
        assert cluster.node("router").num_restarts == 0
        cluster.kill("decode-0", signal.SIGSTOP)
        assert cluster.stop()["decode-0"] == -signal.SIGKILL
        with pytest.raises(NotFoundError):
            cluster.kill("decode-0")


def test_nobody_else_gets_the_ports_of_a_node_that_died(tmp_path):
    with make_cluster(
        tmp_path, prefill_nodes=0, draft_nodes=0, supervision=Supervision(restart_seconds=30.0)
    ) as cluster:
        node = cluster.node("decode-0")
        for num_deaths in (1, 2):  # the second restart waits
            cluster.kill("decode-0")
            wait_for_node(cluster, "decode-0", lambda node, deaths=num_deaths: node.num_restarts == deaths)
            if num_deaths == 1:
                cluster.wait_serving(WAIT_SECONDS)
        for address in (node.address, node.metrics_address):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", int(address.rpartition(":")[2])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"environ": {"ROLE_FAILS": "decode_node"}}, "decode-0 ended with status 1: cannot start: weights.safetensors"),
        (
            {"overrides": ("decode_node.num_speculative_token=3",)},
            "the nearest is decode_node.num_speculative_tokens",
        ),
        (
            {"environ": {"ROLE_BREAKS": "decode_node"}},
            "^decode-0 ended with status 1: cannot start: AssertionError: angles of positions are within a window$",
        ),
        (ends_with(0), "^decode-0 ended with status 0 before it served$"),
        (ends_with(-signal.SIGKILL), "^decode-0 ended by SIGKILL before it served$"),
        (ends_with(3), "^decode-0 ended with status 3$"),
    ],
    ids=["no weights", "a wrong setting", "a bug", "status 0", "a signal", "without a word"],
)
def test_a_node_that_cannot_start_ends_the_start_with_its_last_words(tmp_path, wrong, message):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "decode-0.log").write_text('{"level": "error", "event": "of yesterday"}\n')
    cluster = make_cluster(tmp_path, prefill_nodes=0, draft_nodes=0, **wrong)
    cluster.start()
    with pytest.raises(PeerLostError, match=message):
        cluster.wait_serving(WAIT_SECONDS)
    cluster.stop()


def test_why_a_start_failed_is_known_when_the_disk_of_the_logs_is_full(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("decode-0", "router"):
        (tmp_path / "logs" / f"{name}.log").symlink_to("/dev/full")
    cluster = make_cluster(tmp_path, prefill_nodes=0, draft_nodes=0, environ={"ROLE_FAILS": "decode_node"})
    cluster.start()
    with pytest.raises(PeerLostError, match=r"^decode-0 ended with status 1: cannot start: weights"):
        cluster.wait_serving(WAIT_SECONDS)
    cluster.stop()


def test_a_node_comes_back_when_its_log_cannot_be_opened_any_more(tmp_path):
    with make_cluster(tmp_path, prefill_nodes=0, draft_nodes=0) as cluster:
        shutil.rmtree(tmp_path / "logs")
        (tmp_path / "logs").touch()  # no folder can be made there
        cluster.kill("decode-0")
        wait_for_node(cluster, "decode-0", lambda node: node.num_restarts == 1 and node.state is ChildState.SERVING)


def test_a_log_is_bounded_however_much_a_process_writes(tmp_path):
    most = 1 << 20
    supervision = Supervision(max_log_bytes=most)
    cluster = make_cluster(
        tmp_path, prefill_nodes=0, draft_nodes=0, supervision=supervision, environ={"ROLE_FLOODS": "decode_node"}
    )
    log, old = (tmp_path / "logs" / f"decode-0.log{end}" for end in ("", ".1"))
    largest = 0
    with cluster:
        wait_for(lambda: log.stat().st_size <= most)
        largest = log.stat().st_size + old.stat().st_size
        assert old.read_bytes().endswith(b"x\n")
    assert 0 < largest <= 2 * most
    assert '"event": "stopped"' in log.read_text()


def test_a_log_is_bounded_also_when_its_name_is_gone(tmp_path):
    child = Child(ChildSpec(name="decode-0", role="decode_node"), tmp_path / "logs" / "decode-0.log")
    child.spawn(["sh", "-c", "head -c 2000000 /dev/zero; exec sleep 60"], os.environ)
    written = Path(f"/proc/{child.pid}/fd/1")
    wait_for(lambda: written.stat().st_size == 2_000_000)
    shutil.rmtree(child.log_path.parent)
    with pytest.raises(FileNotFoundError):
        child.bound_log(1 << 20)
    assert written.stat().st_size == 0
    child.send_signal(signal.SIGKILL)
    wait_for(lambda: child.reap() is not None)


def test_a_node_that_another_refuses_is_told_by_its_name(tmp_path):
    cluster = make_cluster(tmp_path, draft_nodes=0, environ={"ROLE_REFUSES": "router"})
    events = []
    cluster.on_event = events.append
    with cluster:
        pass
    (refused,) = (event for event in events if event.kind is EventKind.REFUSED)
    assert (refused.name, refused.message) == ("prefill-0", "by router: its dtype is bfloat16")


@pytest.mark.parametrize(("decode_nodes", "routers"), [(1, 1), (2, 1), (2, 2)])
def test_a_start_ends_when_one_router_refuses_every_decode_node(tmp_path, decode_nodes, routers):
    environ = {"ROLE_REFUSES": "router", "ROLE_REFUSED": "decode_targets", "START_WHEN": str(tmp_path / "never")}
    nodes = {"draft_nodes": 0, "decode_nodes": decode_nodes, "routers": routers}
    cluster = make_cluster(tmp_path, **nodes, environ=environ, end_seconds=1.0)
    cluster.start()
    try:
        reason = "decode-0 is refused by router: its dtype" if decode_nodes == 1 else "does not serve"
        with pytest.raises(PeerLostError, match=reason):
            cluster.wait_serving(WAIT_SECONDS if decode_nodes == 1 else 3.0)
    finally:
        cluster.stop()


def test_folders_of_clusters_that_are_gone_are_removed_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yesterday = time.time() - 2 * 86_400
    names = ("7-1badcafe", "8-2badcafe", "9-turns-runni_ng", "10-4badcafe", "2026-11-26", "of-somebody")
    gone, new, running, written, *foreign = folders = [tmp_path / f"outrider-{name}" for name in names]
    for folder in folders:
        folder.mkdir()
        log = folder / "router.log"
        log.touch()
        for path in (folder, log) if folder not in (new, written) else (folder,) if folder is written else ():
            os.utime(path, (yesterday, yesterday))
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        launch = Launch(command=role_command, locate_model=False)
        with Cluster(ClusterConfig(port=0, prefill_nodes=1, draft_nodes=0), launch) as cluster:
            assert cluster.log_directory.parent == tmp_path
    finally:
        os.close(descriptor)
    assert sorted(path for path in tmp_path.glob("outrider-*")) == sorted([new, running, written, *foreign])
    assert not gone.exists()


def test_a_start_that_is_interrupted_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch = Launch(
        command=role_command, locate_model=False, environ={**os.environ, "START_WHEN": str(tmp_path / "never")}
    )
    cluster = Cluster(ClusterConfig(port=0, prefill_nodes=1, draft_nodes=0), launch)
    cluster.start()
    wait_for(lambda: cluster.node("decode-0").pid)
    cluster.stop()
    assert cluster.has_ended_well, cluster.exit_statuses
    assert list(tmp_path.glob("outrider-*")) == []


SUPERVISOR = """
import sys, time
sys.path.insert(0, {directory!r})
from pathlib import Path
import test_cluster
cluster = test_cluster.make_cluster(Path({tmp!r}), prefill_nodes=0, draft_nodes=0)
with cluster:
    cluster.write_status(Path({tmp!r}) / "status.json")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_no_process_outlives_a_supervisor_that_was_killed(tmp_path):
    script = SUPERVISOR.format(directory=str(ROLE_PROCESS.parent), tmp=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout.readline() == "ready\n"
        pids = [entry["pid"] for entry in json.loads((tmp_path / "status.json").read_text())["nodes"]]
        os.kill(pids[0], signal.SIGSTOP)
        supervisor.kill()
        supervisor.wait(WAIT_SECONDS)
    wait_until_gone(pids)


def test_a_node_that_dies_for_hours_is_still_restarted():
    supervision = Supervision(restart_seconds=1.0, max_restart_seconds=30.0)
    delays = [
        supervision.restart_delay(num_failures, has_served=True) for num_failures in (0, 1, 2, 5, 6, 7, 2000, 10**9)
    ]
    assert delays == [0.0, 1.0, 2.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert supervision.restart_delay(0, has_served=False) == 1.0
