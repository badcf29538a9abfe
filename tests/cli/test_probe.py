"""`outrider probe` against every state that a port can be in."""

from __future__ import annotations

import socket
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cli.main import main
from outrider.v1 import router_pb2_grpc
from tests.client.answering_router import Serving
from tests.support.processes import run_python

ROUTER_SERVICE = "outrider.v1.RouterService"


@pytest.fixture
def servicer():
    return health.HealthServicer()


@pytest.fixture
def target(servicer):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(timeout=60)


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_the_exit_status_is_the_health(servicer, target, capsys, status, code):
    servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
    assert main(["probe", "--target", target]) == code
    assert capsys.readouterr().out == f"{target} is {status}\n"


def test_one_service_may_be_asked_for(servicer, target, capsys):
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.set(ROUTER_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main(["probe", "--target", target, "--service", ROUTER_SERVICE]) == 1
    assert main(["probe", "--target", target, "--service", "outrider.v1.Nothing"]) == 1
    assert capsys.readouterr().err == f"outrider probe: {target} has no service outrider.v1.Nothing\n"


def test_a_port_that_nobody_listens_on(capsys):
    assert main(["probe", "--target", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("outrider probe: 127.0.0.1:1 cannot be reached: ")
    assert shown.count("\n") == 1


def test_a_process_that_is_stopped_does_not_hold_the_probe(capsys):
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # accepts connections, and never answers
        target = f"127.0.0.1:{frozen.getsockname()[1]}"
        assert main(["probe", "--target", target, "--timeout", "0.2"]) == 1
    assert capsys.readouterr().err == f"outrider probe: {target} does not answer within 0.2 s\n"


def test_a_server_without_health_is_none_of_ours(capsys):
    serving = Serving(router_pb2_grpc.RouterServiceServicer())
    assert main(["probe", "--target", serving.address]) == 1
    serving.stop()
    assert "has no health service" in capsys.readouterr().err


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_timeout_must_be_above_0(capsys, timeout):
    assert main(["probe", f"--timeout={timeout}"]) == 1
    assert capsys.readouterr().err == f"outrider probe: --timeout {timeout} is not above 0\n"


def test_a_probe_imports_little():
    """A probe runs every few seconds next to the service that it checks, so it must cost little."""
    script = """
import sys
from outrider.cli.main import main
main(["probe", "--target", "127.0.0.1:1"])
print(*{name.partition(".")[0] for name in sys.modules})
"""
    shown = run_python("-c", script)
    assert shown.returncode == 0, shown.stderr
    heavy = {"torch", "transformers", "numpy", "structlog", "prometheus_client", "yaml", "jinja2", "tokenizers"}
    assert heavy & set(shown.stdout.split()) == set()
