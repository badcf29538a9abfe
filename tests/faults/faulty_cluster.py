"""A cluster of real processes whose connections go through proxies and whose fault points tests can arm."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from outrider.client import Client
from outrider.cluster.child import ChildState
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig, Supervision
from outrider.cluster.plan import Launch
from outrider.errors import NotFoundError, PeerLostError
from outrider.faults import FAULT_POINTS
from outrider.kv_transfer.arena import NAME_PREFIX
from tests.conftest import START_SECONDS, RunningCluster, first_status, is_idle
from tests.faults.network import Network, free_port
from tests.support.cluster_nodes import wait_for_node
from tests.support.fault_points import FaultPoints
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.store_server import PATIENT_STORE_SETTING

HOST = "127.0.0.1"
KV_HOST = "127.0.0.2"  # proxies listen here, on the same ports as the decode nodes' KV ingest
POLL_SECONDS = 0.002
SHARED_MEMORY = Path("/dev/shm")
KV_MEMORY = "2560KiB"  # a quarter of it is for features


class TooLateError(AssertionError):
    """The request ended before any process reached the fault point."""


class FaultyCluster(RunningCluster):
    """A context manager of two prefill nodes, one of which pushes by gRPC, two decode nodes, a draft node and a router.

    There is a drafter head, whose features are in each hand-off, and which proposes beside the draft node.
    With the URL of a `store` there are two routers that share it. `client` reaches routers through
    proxies. Killed processes are restarted at once.
    """

    def __init__(
        self, model: Path, directory: Path, *, settings: tuple[str, ...] = (), store: str = "", **launch: Any
    ) -> None:
        """`launch` are further fields of `Launch`."""
        self.network = Network()
        self.points = FaultPoints(directory, FAULT_POINTS)
        names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(2)] + ["draft-0"]
        ports = {name: self._listen(name) for name in names}
        kv_ports = {f"decode-{index}": free_port(HOST) for index in range(2)}
        for name, port in kv_ports.items():
            self.network.listen(
                name, lambda port=port: (HOST, port), source=self._process_at, address=KV_HOST, port=port
            )
        launched = Launch(
            **launch,
            overrides=(
                f"model.id={model}",
                f"model.head={_make_head(directory)}",
                "model.num_threads=1",
                f"kv_cache.memory={KV_MEMORY}",
                *(f"router.{role}_targets={_targets(ports, role)}" for role in ("prefill", "decode")),
                f"decode_node.draft_targets={_targets(ports, 'draft')}",
                *((f"router.store={store}", PATIENT_STORE_SETTING) if store else ()),
                *settings,
            ),
            node_overrides={
                "prefill-1": ("kv_transfer.connector=grpc",),
                **{
                    name: (f"kv_transfer.port={port}", f"server.advertise_address={KV_HOST}")
                    for name, port in kv_ports.items()
                },
            },
            environ={**os.environ, **self.points.environ},
            log_directory=directory / "logs",
        )
        self._router_names = ("router-0", "router-1") if store else ("router",)
        config = ClusterConfig(
            port=0,
            routers=len(self._router_names),
            prefill_nodes=2,
            decode_nodes=2,
        )
        self.cluster = Cluster(config, launched, supervision=Supervision(restart_seconds=0.1, stable_seconds=0.1))
        self._arenas: set[Path] = set()  # files in shared memory before the first fault

    def __enter__(self) -> Self:
        self.cluster.start()
        try:
            self.cluster.wait_serving(START_SECONDS)
            ports = [self._listen(name, source=lambda _port: "client") for name in self._router_names]
            self.client = Client([f"{HOST}:{port}" for port in ports])
            self._watchers = [Client(address) for address in self.cluster.router_address.split(",")]
            self.wait_until_all_serve()
        except BaseException:
            self.__exit__()
            raise
        self._arenas = _arenas()
        return self

    def __exit__(self, *_error: object) -> None:
        self.undo()
        self.cluster.stop()
        self.network.stop()

    # ------------------------------------------------------------ faults

    def wait_reached(self, point: str, *, until: Callable[[], bool], timeout_seconds: float) -> str:
        """Waits until a process is held at the fault point, and returns the process's name.

        Raises: AssertionError if none comes in time; TooLateError if `until()` is true, after which none will come.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not until():
            pid = self.points.waiting_pid(point)
            if pid is not None:
                return next(node.name for node in self.cluster.nodes if node.pid == pid)
            time.sleep(POLL_SECONDS)
        raise (TooLateError if until() else AssertionError)(f"nobody has come to {point}")

    def wait_serving(self, name: str) -> None:
        wait_for_node(self.cluster, name, lambda node: node.state is ChildState.SERVING)

    def kill(self, name: str) -> None:
        self.cluster.kill(name, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self.cluster.kill(name, signal.SIGSTOP)

    def thaw(self) -> None:
        for node in self.cluster.nodes:
            with contextlib.suppress(NotFoundError):  # the process does not run
                self.cluster.kill(node.name, signal.SIGCONT)

    def inflict(self, action: str, name: str, *, slow_seconds: float) -> None:
        """Applies kill, stop, close, slow or partition, until `undo`. `slow_seconds` is the delay of slow."""
        match action:
            case "kill":
                self.kill(name)
            case "stop":
                self.freeze(name)
            case "close":
                self.network.close_connections(name)
            case "slow":
                self.network.slow(name, slow_seconds)
            case "partition":
                self.network.partition(name)

    def undo(self) -> None:
        """Undoes every fault: releases, thaws and reconnects all processes."""
        self.points.disarm_all()
        self.network.heal()
        self.thaw()

    # ------------------------------------------------------------ checks after a fault

    def statuses(self):
        """Returns the cluster's status from each router."""
        return [first_status(watcher) for watcher in self._watchers]

    def wait_until_whole(self, *, timeout_seconds: float = 60.0) -> None:
        """Waits until every process serves, nothing is held anywhere, and no file is left in shared memory."""
        deadline = time.monotonic() + timeout_seconds
        while not self._is_whole() or not _arenas() <= self._arenas:
            assert time.monotonic() < deadline, (
                f"not whole again in {timeout_seconds} s: {self._last_status}, arenas {_arenas() - self._arenas}"
            )
            time.sleep(0.02)

    def _is_whole(self) -> bool:
        nodes = self.cluster.nodes
        if any(node.state is not ChildState.SERVING for node in nodes):
            self._last_status: object = [(node.name, node.state) for node in nodes]
            return False
        try:
            self._last_status = statuses = self.statuses()
        except PeerLostError as error:  # the router of this connection was killed
            self._last_status = error
            return False
        return all(
            {node.state.name for node in status.nodes} == {"SERVING"}
            and len(status.nodes) == len(nodes) - len(self._router_names)
            and is_idle(status)
            for status in statuses
        )

    def restarts(self) -> dict[str, int]:
        return {node.name: node.num_restarts for node in self.cluster.nodes}

    # ------------------------------------------------------------ the network

    def _listen(self, name: str, *, source: Callable[[int], str] | None = None) -> int:
        def upstream() -> tuple[str, int]:
            return HOST, int(self.cluster.node(name).address.rpartition(":")[2])

        return self.network.listen(name, upstream, source=source or self._process_at, address=HOST)

    def _process_at(self, port: int) -> str:
        """Returns the name of the process that has this port at its end of a connection, or "" if it is gone."""
        for node in self.cluster.nodes:
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(node.pid).net_connections("tcp") if node.pid else []
                if any(connection.laddr.port == port for connection in connections):
                    return node.name
        return ""


def _targets(ports: dict[str, int], role: str) -> str:
    return ",".join(f"{HOST}:{port}" for name, port in ports.items() if name.startswith(role))


def _make_head(directory: Path) -> Path:
    """Writes a head that native kernels can compute, so that restarted nodes need not import torch."""
    head, _ = make_random_eagle3(directory, max_model_len=2048, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    return head


def _arenas() -> set[Path]:
    """Returns the arenas that still have a file name. They lose it after the handshake."""
    return set(SHARED_MEMORY.glob(f"{NAME_PREFIX}*"))
