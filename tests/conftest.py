"""Fixtures that several folders share: clusters of real processes, and kinds of samplers."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outrider.client import Client
from outrider.cluster.config import ClusterConfig, Supervision
from outrider.cluster.plan import Launch
from outrider.model_hub.config import DEFAULT_MODEL_ID
from outrider.rpc.tls import SecurityConfig, TlsConfig
from tests.support import store_server as store_servers
from tests.support.fault_points import FaultPoints

if TYPE_CHECKING:
    from outrider.cluster.cluster import Cluster
    from tests.support.traces import Collector

STEP = "decode.step"
START_SECONDS = 300.0
SUPERVISION = Supervision(end_seconds=60.0, restart_seconds=0.1, stable_seconds=0.1)
"""Lets processes end by themselves even on a busy machine, and immediately restarts those that die."""


def pytest_configure():
    """Lets SIGINT, which tests send, take effect: shells ignore it in background jobs, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def is_full(request):
    """Returns whether whole matrices and long soaks run, as in `make test-all`."""
    return request.config.getoption("--full")


class RunningCluster:
    """A cluster and a client of it, with helpers for tests."""

    def __init__(
        self,
        cluster: Cluster,
        points: FaultPoints | None = None,
        collector: Collector | None = None,
        receipts: Path | None = None,
    ) -> None:
        self.cluster = cluster
        self.points = points
        self.collector = collector  # gets the spans of requests whose callers begin a trace
        self.receipts = receipts  # the folder of the router's receipts
        self.router_address = cluster.router_address
        self.client = Client(self.router_address)

    def status(self):
        return first_status(self.client)

    def wait_for(self, condition, *, timeout_seconds=60.0, what="the condition"):
        """Reads cluster statuses until `condition(status)` is true; returns the seconds that this took."""
        started = time.monotonic()
        with contextlib.closing(self.client.watch_cluster(interval_seconds=0.1)) as statuses:
            for status in statuses:
                if condition(status):
                    return time.monotonic() - started
                if time.monotonic() - started > timeout_seconds:
                    raise AssertionError(f"{what} did not come about in {timeout_seconds} s: {status}")
        raise AssertionError("the status stream ended")

    def wait_until_all_serve(self, *, timeout_seconds=90.0):
        names = {"SERVING"}
        return self.wait_for(
            lambda status: {node.state.name for node in status.nodes} == names,
            timeout_seconds=timeout_seconds,
            what="every node serving",
        )

    def wait_until_nothing_is_held(self, *, timeout_seconds=60.0):
        """Waits until there is no request and no sequence, and every block is free or only cached."""
        return self.wait_for(is_idle, timeout_seconds=timeout_seconds, what="an idle cluster with whole pools")

    @contextlib.contextmanager
    def held_steps(self):
        """Holds decode steps until the block ends, except those that `release_steps_until` lets pass."""
        self.points.arm(STEP)
        try:
            yield
        finally:
            self.points.release(STEP)

    def release_steps_until(self, is_done, *, timeout_seconds=60.0):
        """Lets held steps pass, one at a time, until `is_done()` is true."""
        ends = time.monotonic() + timeout_seconds
        while not is_done():
            assert time.monotonic() < ends, f"held steps brought nothing about in {timeout_seconds} s"
            self.points.let_pass(STEP)
            time.sleep(0.005)

    def generate(self, prompt, **options):
        """Returns (token ids, summary) of a whole stream of one sample."""
        with self.client.generate(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.token_ids(), stream.summary


def first_status(client):
    with contextlib.closing(client.watch_cluster(interval_seconds=0.1)) as statuses:
        return next(statuses)


def is_idle(status):
    return (
        status.num_requests_running == 0
        and status.num_requests_waiting == 0
        and all(
            node.load.num_running == 0
            and node.load.num_waiting == 0
            and node.load.kv_blocks_free == node.load.kv_blocks_total
            for node in status.nodes
        )
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A checkpoint with random weights, a real architecture and a real tokenizer. A step takes milliseconds."""
    tiny = pytest.importorskip("tests.support.tiny_model", reason="needs torch")
    path = tmp_path_factory.mktemp("tiny-model")
    tiny.make_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def start_cluster(tiny_model, tmp_path_factory):
    """start(config, *overrides) → Cluster, a context manager that stops it."""
    from outrider.cluster.cluster import Cluster  # needs the extra `node`

    numbers = itertools.count()

    def start(config=None, *overrides, model=None, environ=None):
        launch = Launch(
            overrides=(
                f"model.id={model or tiny_model}",
                # The steps of a tiny model are so short that drafts are rarely worth verifying.
                *(() if model else ("model.num_threads=1", "decode_node.draft_rows=all", "kv_cache.memory=24MiB")),
                *overrides,
            ),
            log_directory=tmp_path_factory.mktemp(f"cluster-{next(numbers)}"),
            environ={**os.environ, **(environ or {})},
        )
        return Cluster(config or ClusterConfig(port=0), launch, supervision=SUPERVISION)

    return start


@pytest.fixture(scope="session")
def running(start_cluster, tmp_path_factory):
    """One cluster of four processes with the tiny model, for all tests that leave it unchanged.

    The liveness timeouts are long, so that no process is declared lost on a busy machine. Requests are traced if their
    caller traces.
    """
    from tests.support.traces import Collector

    points = FaultPoints(tmp_path_factory.mktemp("points"), [STEP])
    patience = ("router.liveness_timeout_seconds=120", "decode_node.session_timeout_seconds=120")
    environ = {**points.environ, "OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with Collector() as collector:
        traces = f"telemetry.otlp_endpoint={collector.endpoint}"
        with start_cluster(None, *patience, traces, environ=environ) as cluster:
            cluster.wait_serving(START_SECONDS)
            yield RunningCluster(cluster, points, collector)
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses


@pytest.fixture(scope="session")
def cluster(running):
    return running.cluster


@pytest.fixture(scope="session")
def real(start_cluster, tmp_path_factory):
    """Four processes with the default model and the OpenAI gateway. The router keeps receipts."""
    receipts = tmp_path_factory.mktemp("receipts")
    kept = f"router.receipts={receipts}"
    with start_cluster(ClusterConfig(port=0, openai_port=0), kept, model=DEFAULT_MODEL_ID) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster, receipts=receipts)
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses


@pytest.fixture
def store_server(tmp_path):
    """An empty server that speaks Valkey's protocol."""
    with store_servers.StoreServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def tls_folder(tmp_path_factory):
    """The folder with the files of `outrider up --tls`."""
    authority = pytest.importorskip("outrider.cluster.authority", reason="needs cryptography")
    folder = tmp_path_factory.mktemp("tls")
    authority.prepare_tls_folder(folder, SecurityConfig())
    return folder


@pytest.fixture(scope="session")
def certificate(tls_folder):
    """The TlsConfig of a server on 127.0.0.1 without client certificates; clients need `tls_folder / "ca.pem"`."""
    return TlsConfig(certificate=tls_folder / "node.pem", private_key=tls_folder / "node-key.pem")


@pytest.fixture
def fixed_step_times(monkeypatch):
    """Gives steps and draft calls fixed times, since drafting and verification depend on them."""
    from outrider.speculation.ask_cost import CallCost
    from outrider.speculation.step_cost import StepCostModel

    observe = StepCostModel.observe
    monkeypatch.setattr(StepCostModel, "observe", lambda cost, **step: observe(cost, **{**step, "step_seconds": 0.01}))
    ask = CallCost.observe
    monkeypatch.setattr(CallCost, "observe", lambda cost, _seconds, **asked: ask(cost, 1e-5, **asked))


@pytest.fixture(scope="session", params=["torch", "native"])
def sampler_kernels(request):
    """The kernels of a Sampler, or None for torch. Both must pass the same tests."""
    if request.param == "torch":
        return None
    from outrider.engine.cpu_kernels.paths import choose_kernels
    from tests.support.native_kernels import native_kernels

    return native_kernels() or pytest.skip(str(choose_kernels()))


@pytest.fixture(scope="session", params=["torch", "numpy", "native"])
def sampler_kind(request):
    """The kind of a Sampler: its kernels, and the library of its arrays. All must pass the same tests."""
    from outrider.engine.cpu_kernels.paths import choose_kernels
    from tests.support.native_kernels import native_kernels
    from tests.support.sampler_kinds import NUMPY, TORCH

    if request.param == "native":
        return NUMPY._replace(kernels=native_kernels() or pytest.skip(str(choose_kernels())))
    return {"torch": TORCH, "numpy": NUMPY}[request.param]


@pytest.fixture
def one_thread():
    """Makes torch compute in one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def light_training(one_thread, monkeypatch):
    """Makes `train-head` use one thread, and no longer read 128 MiB to empty the caches before it times steps."""
    for module in ("run", "hidden_states"):
        monkeypatch.setattr(f"outrider.training.{module}.usable_cpus", lambda: (0,))
    monkeypatch.setattr("outrider.training.hidden_states.FLUSHED_BYTES", 1024)
