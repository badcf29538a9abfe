"""The supervisor of a local cluster: it starts, watches, restarts and stops its children."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from outrider.cluster.child import Child, ChildState, ClusterEvent, EventKind, NodeProcess
from outrider.cluster.config import DECODE, DRAFT, PREFILL, ClusterConfig, Supervision
from outrider.cluster.folders import PREFIX, hold, remove_stale_folders, shared_memory_directory
from outrider.cluster.plan import GATEWAY, ROUTER, Launch, child_command, plan_children
from outrider.errors import ConfigError, InternalError, NotFoundError, PeerLostError
from outrider.extras import require
from outrider.service.address import loopback, reserve_port

require("node")  # the children import this extra's packages
TICK_SECONDS = 0.05
START_SECONDS = 600.0
"""Default timeout of `wait_serving` in seconds. It is long, since a first start may download the model."""
SIGNAL_SECONDS = 0.5
"""Seconds of each join in `stop`. A signal that arrives just before the main thread joins is handled after the join."""
NODE_TERM_SHARE = 0.4
"""Nodes get SIGTERM when the routers have ended, or after this share of the time that routers and gateway may take."""


class Cluster:
    """A local cluster. As a context manager, it is serving inside the block and stopped after it.

    One thread spawns, watches and reaps all children, and outlives them, because the kernel ties the
    parent-death signal to the thread that spawned them. All methods may be called from any
    thread.
    """

    def __init__(
        self,
        config: ClusterConfig | None = None,
        launch: Launch | None = None,
        *,
        supervision: Supervision | None = None,
    ) -> None:
        self.config = ClusterConfig() if config is None else config
        self.launch = Launch() if launch is None else launch
        self._supervision = Supervision() if supervision is None else supervision
        self.on_event: Callable[[ClusterEvent], None] = lambda _: None
        """Callback for events, on the supervisor's thread; it must not block. Set it before `start`."""
        given = self.launch.log_directory
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.log_directory = Path(tempfile.gettempdir(), name) if given is None else given
        self._turns_directory: Path | None = None  # private: no other user can put a file there
        self._holds: list[int] = []  # file descriptors
        self._children = [
            Child(spec, self.log_directory / f"{spec.name}.log") for spec in plan_children(self.config, self.launch)
        ]
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._must_kill = False
        self.failure: str | None = None
        """Why the cluster could not start, or None."""
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ for the owner

    def start(self) -> None:
        """Starts the children; returns at once. Raises: ConfigError if there is no folder for logs."""
        assert self._thread is None, "a cluster starts once"
        is_chosen = self.launch.log_directory is not None  # the user chose it, so it may exist already
        remove_stale_folders()
        try:
            self.log_directory.mkdir(mode=0o700, parents=True, exist_ok=is_chosen)
            prefix = f"{PREFIX}{os.getpid()}-turns-"
            self._turns_directory = Path(tempfile.mkdtemp(prefix=prefix, dir=shared_memory_directory()))
            self._holds = [hold(self._turns_directory)]
            if not is_chosen:
                self._holds.append(hold(self.log_directory))
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be made: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="cluster-supervisor", daemon=True)
        self._thread.start()

    def wait_serving(self, timeout_seconds: float = START_SECONDS) -> None:
        """Waits until every process is serving. Raises: PeerLostError if one cannot start, or at the timeout."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self.failure is not None or self._stopping.is_set() or self._all_serve(), timeout_seconds
            )
            failure = self.failure
        if failure is not None:
            raise PeerLostError(failure, reason="START_FAILED")
        if not reached or not self._all_serve():
            missing = ", ".join(child.name for child in self._children if child.state is not ChildState.SERVING)
            raise PeerLostError(f"does not serve: {missing}; logs in {self.log_directory}", reason="START_FAILED")

    @property
    def router_address(self) -> str:
        """The target for clients. If there are several routers, their addresses are separated by commas.

        Raises: InternalError until every router listens.
        """
        addresses = [child.address for child in self._children if child.role == ROUTER]
        if not all(addresses):
            raise InternalError("the router does not listen yet")
        return ",".join(filter(None, addresses))

    @property
    def openai_url(self) -> str:
        """The `base_url` for OpenAI's clients. Raises: NotFoundError without `openai_port`."""
        return f"http://{self.node('openai').address}/v1"

    @property
    def nodes(self) -> tuple[NodeProcess, ...]:
        """The current state of every service process, including the router."""
        with self._changed:
            return tuple(child.snapshot() for child in self._children if not child.is_one_shot)

    def node(self, name: str) -> NodeProcess:
        """Returns a process by name: "router" ("router-0" if there are several), "decode-0". Raises: NotFoundError."""
        return self._child(name).snapshot()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one child. Raises: NotFoundError if it is not running."""
        with self._changed:
            child = self._child(name)
            if not child.send_signal(number):
                raise NotFoundError(f"{name} is not running")
            if number == signal.SIGKILL:
                child.state = ChildState.STOPPING  # the child no longer serves, though its death is noticed later

    def stop(self) -> dict[str, int]:
        """Stops everything within about 4.5 s; returns the exit statuses by name. Idempotent."""
        self._stopping.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(SIGNAL_SECONDS)
        return self.exit_statuses

    def kill_all(self) -> None:
        """Kills everything now; `stop` then returns soon. Takes no lock, so a signal handler may call it."""
        self._must_kill = True

    @property
    def exit_statuses(self) -> dict[str, int]:
        """The exit status of each child's last process that ended; if a signal ended it, minus the signal's number."""
        return {child.name: child.exit_status for child in self._children if child.exit_status is not None}

    @property
    def has_ended_well(self) -> bool:
        """Whether no process ended by itself, by SIGKILL or with an error.

        A process that was not serving yet may also have ended by SIGTERM, since it may still have been importing
        modules.
        """
        return all(
            child.exit_status in (None, 0) or (child.exit_status == -signal.SIGTERM and child.serving_since is None)
            for child in self._children
        )

    def status(self) -> dict[str, Any]:
        """Returns JSON values: {"router": router_address, "nodes": [{role, name, …, state, log}]}."""
        nodes = self.nodes
        return {
            "router": ",".join(node.address for node in nodes if node.role == ROUTER and node.address),
            "nodes": [
                {name: getattr(node, name) for name in ("role", "name", "address", "pid", "metrics_address")}
                | {"state": node.state.value, "log": str(node.log_path)}
                for node in nodes
            ],
        }

    def write_status(self, path: Path) -> None:
        """Writes the status atomically: a reader sees the old file or the new one."""
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.status(), indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_serving()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # ------------------------------------------------------------ the supervisor's thread

    def _run(self) -> None:
        try:
            while not (self._stopping.is_set() or self._must_kill or self.failure):
                self._step()
                self._stopping.wait(TICK_SECONDS)
        except Exception as error:
            with self._changed:
                self.failure = f"the supervisor failed: {error!r}"
                self._changed.notify_all()
            raise
        finally:
            self._stop_children()

    def _step(self) -> None:
        for child in self._children:
            self._listen(child)
            self._notice_death(child)
            with contextlib.suppress(OSError):
                child.bound_log(self._supervision.max_log_bytes)
            if self._is_due(child):
                self._spawn(child)

    def _listen(self, child: Child) -> None:
        for said in child.announcements():
            if "progress" in said:
                self._tell(
                    child, EventKind.PROGRESS, str(said["progress"]), done=int(said["done"]), total=int(said["total"])
                )
            elif said.get("serving"):
                child.description = said
                child.serving_since = time.monotonic()
                self._change_state(child, ChildState.SERVING, EventKind.SERVING, f"on {child.address}")
            elif "refused" in said:
                refused = next((other for other in self._children if other.address == said["address"]), child)
                why = f"by {child.name}: {said['refused']}"
                self._tell(refused, EventKind.REFUSED, why)
                if child.role == ROUTER and child.has_never_served:
                    refused.refused_by.add(child.name)
                if all(child.name in other.refused_by for other in self._children if other.role == DECODE):
                    self._fail(refused, f"{refused.name} is refused {why}")  # the router would wait for ever
            else:
                child.address = str(said["address"])
                child.metrics_address = said.get("metrics_address")
                child.drain_seconds = float(said.get("drain_seconds", 0.0))
                self._tell(child, EventKind.LISTENING, f"on {child.address}")

    def _notice_death(self, child: Child) -> None:
        with self._changed:
            status = child.reap()
        if status is None:
            return
        self._listen(child)
        if child.is_one_shot and status == 0:
            self._change_state(child, ChildState.ENDED, EventKind.ENDED, child.failure_reason())
            return
        why, words = describe_status(status), child.failure_reason()
        if child.has_never_served:
            early = "" if status > 0 else " before it served"
            self._fail(child, f"{child.name} ended {why}{early}{f': {words}' if words else ''}")
            return
        self._start_again_later(child, f"{why}: {words}" if words and status > 0 else why)

    def _start_again_later(self, child: Child, why: str) -> None:
        since = child.serving_since
        if since is not None and time.monotonic() - since >= self._supervision.stable_seconds:
            child.num_failures = 0
        delay = self._supervision.restart_delay(child.num_failures, has_served=since is not None)
        child.num_failures += 1
        child.num_restarts += 1
        child.start_at = time.monotonic() + delay
        self._change_state(
            child, ChildState.DOWN, EventKind.DIED, f"{why}; restarts {f'in {delay:g} s' if delay else 'now'}"
        )

    def _is_due(self, child: Child) -> bool:
        if child.state is ChildState.DOWN:
            return time.monotonic() >= child.start_at
        if child.state is not ChildState.PLANNED:
            return False
        before = [other for other in self._children if other is not child]
        if any(other.is_one_shot and other.state is not ChildState.ENDED for other in before):
            return False
        if child.role == GATEWAY:  # it asks routers for their model, and would retry only after a second
            return all(other.serving_since for other in before if other.role == ROUTER)
        if child.role == ROUTER:  # it can wait for nodes that are not serving yet
            nodes = [other for other in before if other.role not in (ROUTER, GATEWAY)]
            return all(other.is_one_shot or other.address for other in nodes)
        if child.role == DECODE:
            return all(other.address for other in before if other.role == DRAFT)
        return True

    def _spawn(self, child: Child) -> None:
        targets = {
            role: [other.address for other in self._children if other.role == role]
            for role in (DRAFT, PREFILL, DECODE, ROUTER)
        }
        assert self._turns_directory is not None, "start comes first"
        if not child.ports and not child.is_one_shot:
            child.ports = {name: self._reserve_port() for name in ("port", "metrics_port")}
        command = child_command(
            child.spec,
            self.config,
            self.launch,
            targets=targets,
            ports=child.ports,
            turns_file=self._turns_directory / "turns",
        )
        try:
            with self._changed:
                child.spawn(command, {**self.launch.environ, **self.launch.node_environ.get(child.name, {})})
        except OSError as error:
            if child.num_restarts:
                self._start_again_later(child, f"cannot be started: {error}")
            else:
                self._fail(child, f"{child.name} cannot be started: {error}")
            return
        self._change_state(child, ChildState.STARTING, EventKind.STARTING, f"pid {child.pid}")

    def _reserve_port(self) -> int:
        """Returns a free port. It stays reserved until the cluster ends, so that a child can be restarted on it."""
        with reserve_port("0.0.0.0" if loopback() == "127.0.0.1" else "::", 0) as reserved:  # noqa: S104 never listens
            port: int = reserved.getsockname()[1]
            self._holds.append(reserved.detach())
        return port

    def _stop_children(self) -> None:
        """Sends SIGTERM to routers and gateway, then to nodes; SIGKILL ends those that exceed their deadline."""
        running = [child for child in self._children if child.is_running]
        routers = [child for child in running if child.role == ROUTER]
        first = [*routers, *(child for child in running if child.role == GATEWAY)]
        rest = [child for child in running if child not in first]
        self._terminate(first)
        router_seconds = self._seconds_to_end(first)
        router_deadline = time.monotonic() + router_seconds
        nodes_from = time.monotonic() + router_seconds * NODE_TERM_SHARE
        while any(child.is_running for child in routers) and time.monotonic() < nodes_from:
            self._reap_stopped(first, router_deadline)
        self._terminate(rest)
        nodes_deadline = time.monotonic() + self._seconds_to_end(rest)
        while any(child.is_running for child in running):
            self._reap_stopped(first, router_deadline)
            self._reap_stopped(rest, nodes_deadline)
        for child in self._children:
            self._change_state(child, ChildState.ENDED)
        for descriptor in self._holds:
            os.close(descriptor)
        if self._turns_directory is not None:
            shutil.rmtree(self._turns_directory, ignore_errors=True)
        if self.launch.log_directory is None and self.failure is None and self.has_ended_well:
            shutil.rmtree(self.log_directory, ignore_errors=True)

    def _seconds_to_end(self, children: list[Child]) -> float:
        """Returns the seconds between SIGTERM and SIGKILL."""
        return max((child.drain_seconds + self._supervision.end_seconds for child in children), default=0.0)

    def _terminate(self, children: list[Child]) -> None:
        for child in children:
            self._change_state(child, ChildState.STOPPING, EventKind.STOPPING)
            with self._changed:
                child.send_signal(signal.SIGTERM)

    def _reap_stopped(self, children: list[Child], deadline: float) -> None:
        for child in children:
            with self._changed:
                if self._must_kill or time.monotonic() >= deadline:
                    child.send_signal(signal.SIGKILL)
                status = child.reap()
            if status is not None:
                self._tell(child, EventKind.ENDED, describe_status(status))
        time.sleep(TICK_SECONDS / 5)

    def _fail(self, child: Child, message: str) -> None:
        with self._changed:
            self.failure = message
            self._changed.notify_all()
        self._tell(child, EventKind.FAILED, message)

    def _change_state(self, child: Child, state: ChildState, kind: EventKind | None = None, message: str = "") -> None:
        """Changes the child's state. `kind`: the event to emit, if any."""
        with self._changed:
            child.state = state
            self._changed.notify_all()
        if kind is not None:
            self._tell(child, kind, message)

    def _tell(self, child: Child, kind: EventKind, message: str = "", *, done: int = 0, total: int = 0) -> None:
        with contextlib.suppress(Exception):  # a failing listener must not end the supervision
            self.on_event(ClusterEvent(kind=kind, name=child.name, message=message, done=done, total=total))

    def _all_serve(self) -> bool:
        return all(child.is_one_shot or child.state is ChildState.SERVING for child in self._children)

    def _child(self, name: str) -> Child:
        for child in self._children:
            if child.name == name:
                return child
        raise NotFoundError(f"no node {name}; there are {', '.join(child.name for child in self._children)}")


def describe_status(status: int) -> str:
    """Returns "with status 1" or "by SIGKILL"."""
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
