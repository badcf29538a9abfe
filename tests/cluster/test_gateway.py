"""The OpenAI gateway as a process of a cluster, in front of a stand-in for the router; tests/e2e has real answers."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import openai
import psutil
import pytest

from outrider.cli.main import main
from outrider.cluster.child import ChildState
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig, Supervision
from outrider.cluster.gateway import GatewayPorts, choose_ports, gateway_arguments, served_model
from outrider.cluster.plan import GATEWAY, Launch
from outrider.errors import ConfigError
from outrider.service.config import GatewayConfig, ServerConfig, TelemetryConfig
from tests.support.cluster_nodes import wait_for_node
from tests.support.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.traces import CALLER_ID, TRACE_ID, TRACEPARENT, Collector

ROLE_PROCESS = Path(__file__).with_name("role_process.py")
WAIT_SECONDS = 60.0
HELLO = [{"role": "user", "content": "hello there"}]


def role_command(role: str) -> list[str]:
    return [sys.executable, "-m", GATEWAY] if role == GATEWAY else [sys.executable, str(ROLE_PROCESS), role]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_cluster(directory, tokenizer_folder, **environ):
    launch = Launch(
        command=role_command,
        locate_model=False,
        log_directory=directory / "logs",
        environ={**os.environ, "ECHO_TOKENIZER": str(tokenizer_folder), **environ},
    )
    config = ClusterConfig(port=0, openai_port=0, prefill_nodes=0, draft_nodes=0)
    return Cluster(config, launch, supervision=Supervision(restart_seconds=0.1, end_seconds=WAIT_SECONDS))


@pytest.fixture(scope="module")
def cluster(tokenizer_folder, tmp_path_factory):
    with make_cluster(tmp_path_factory.mktemp("gateway"), tokenizer_folder) as cluster:
        yield cluster
        gateway = psutil.Process(cluster.node("openai").pid)
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses
    assert not gateway.is_running()


def ask(cluster, **fields):
    """Sends a chat like any HTTP client; returns the status, and the answer or error as JSON."""
    body = json.dumps({"model": "echo", "messages": HELLO, **fields}).encode()
    url, headers = f"{cluster.openai_url}/chat/completions", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=WAIT_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for_answer(cluster):
    """Repeats a request until it is answered."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ask(cluster)[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"no answer in {WAIT_SECONDS} s")


def test_the_gateway_answers_as_soon_as_the_cluster_serves(cluster):
    node = cluster.node("openai")
    assert node.description["model"] == "echo"
    assert node.address.startswith("127.0.0.1:")
    with openai.OpenAI(base_url=cluster.openai_url, api_key="none", timeout=WAIT_SECONDS, max_retries=0) as client:
        answer = client.chat.completions.create(model="echo", messages=HELLO)
        assert "hello there" in answer.choices[0].message.content
        assert [model.id for model in client.models.list()] == ["echo"]
    with urllib.request.urlopen(f"http://{node.metrics_address}/metrics", timeout=WAIT_SECONDS) as page:
        assert b"smg_" in page.read()


@pytest.mark.parametrize(("status", "body"), [(503, b'{"error": {}}'), (200, b'{"error": {}}'), (200, b"")])
def test_an_error_in_place_of_the_models_is_waited_out(status, body):
    """A gateway sends such an error if it loses its router between two requests."""

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/readiness" else status)
            self.end_headers()
            self.wfile.write(body)

    with http.server.HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ports = GatewayPorts(host="127.0.0.1", port=server.server_port, metrics_host="127.0.0.1", metrics_port=0)
        assert served_model(ports) is None
        server.shutdown()


def test_only_loopback_is_listened_on(cluster):
    connections = psutil.Process(cluster.node("openai").pid).net_connections("tcp")
    listening = [entry.laddr for entry in connections if entry.status == psutil.CONN_LISTEN]
    assert len(listening) == 2  # the API, and metrics
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("status", "expected"), [("RESOURCE_EXHAUSTED", 429), ("INVALID_ARGUMENT", 400), ("UNAVAILABLE", 503)]
)
def test_an_error_is_told_after_one_try(cluster, status, expected):
    told = [ask(cluster, seed=1000 + grpc.StatusCode[status].value[0]) for _ in range(2)]
    assert [code for code, _ in told] == [expected, expected]
    one, other = (int(re.search(r"call (\d+)", answer["error"]["message"])[1]) for _, answer in told)
    assert other == one + 1, "the engine was called once for each"


def test_many_failures_close_no_door(cluster):
    assert {ask(cluster, seed=1014)[0] for _ in range(15)} == {503}  # UNAVAILABLE
    assert ask(cluster)[0] == 200


def test_nobody_can_change_what_the_gateway_asks(cluster):
    root = cluster.openai_url.removesuffix("/v1")
    for method, path in (("POST", "/workers"), ("GET", "/workers"), ("POST", "/flush_cache"), ("GET", "/wasm")):
        request = urllib.request.Request(f"{root}{path}", method=method, data=b"{}" if method == "POST" else None)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=WAIT_SECONDS)
        assert raised.value.code == 401


def test_a_gateway_that_dies_comes_back_on_its_port(cluster):
    before = cluster.node("openai")
    os.kill(before.pid, signal.SIGKILL)
    after = wait_for_node(
        cluster,
        "openai",
        lambda node: node.num_restarts > before.num_restarts and node.state is ChildState.SERVING,
    )
    assert after.address == before.address
    assert ask(cluster)[0] == 200


def test_a_router_that_dies_is_found_again(cluster):
    before = cluster.node("openai")
    cluster.kill("router")
    wait_for_answer(cluster)
    assert cluster.node("openai").pid == before.pid


def test_a_tokenizer_that_is_not_here_comes_from_the_router_and_no_hub_is_asked(tokenizer_folder, tmp_path):
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def listen():
            with contextlib.suppress(OSError):
                while True:
                    asked.append(hub.accept())

        threading.Thread(target=listen, daemon=True).start()
        environ = {
            "ECHO_TOKENIZER_SHOWN": "nobody/nothing",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HUB_OFFLINE": "0",
        }
        with make_cluster(tmp_path, tokenizer_folder, **environ) as cluster:
            assert "hello there" in ask(cluster)[1]["choices"][0]["message"]["content"]
        hub.shutdown(socket.SHUT_RDWR)
    assert asked == []


@pytest.mark.full
def test_the_gateway_continues_its_clients_trace(tokenizer_folder, tmp_path):
    with Collector() as collector:
        environ = {"OUTRIDER_TELEMETRY__OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with make_cluster(tmp_path, tokenizer_folder, **environ) as cluster:
            body = json.dumps({"model": "echo", "messages": HELLO}).encode()
            headers = {"Content-Type": "application/json", "traceparent": TRACEPARENT}
            request = urllib.request.Request(f"{cluster.openai_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                assert answer.status == 200

            def of_trace(spans):
                return {span.name: span for span in spans if span.trace_id == TRACE_ID}

            found = of_trace(collector.wait_for(lambda spans: {"http_request", "grpc_execute"} <= set(of_trace(spans))))
            assert found["http_request"].parent_id == CALLER_ID


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        ("http://c:4317", ["--enable-trace", "--otlp-traces-endpoint", "http://c:4317", "--log-level", "info"]),
        ("https://c:4317", ["--log-level", "warn"]),
        ("", ["--log-level", "warn"]),
    ],
)
def test_the_gateway_traces_where_it_can(endpoint, flags):
    """The gateway would not start with an https:// endpoint, and makes no spans if its log level excludes info."""
    ports = GatewayPorts(host="127.0.0.1", port=1, metrics_host="127.0.0.1", metrics_port=2)
    telemetry = TelemetryConfig(otlp_endpoint=endpoint, log_format="text")
    arguments = gateway_arguments(GatewayConfig(router_targets=("r:1",)), telemetry, ports, 6.0)
    assert arguments[-len(flags) :] == flags
    assert ("--enable-trace" in arguments) is ("--enable-trace" in flags)


def test_a_file_without_a_key_is_refused(tmp_path):
    ports = GatewayPorts(host="127.0.0.1", port=1, metrics_host="127.0.0.1", metrics_port=2)
    config = GatewayConfig(router_targets=("r:1",), key_file=tmp_path / "keys")
    for content, reason in ((None, "cannot be read"), ("\n", "has no key")):
        if content is not None:
            config.key_file.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            gateway_arguments(config, TelemetryConfig(), ports, 6.0)


def test_no_other_process_gets_a_chosen_port_before_the_gateway_listens_on_it():
    ports = choose_ports(ServerConfig(host="127.0.0.1", port=0))
    for port in (ports.port, ports.metrics_port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # sets SO_REUSEADDR, as smg does
            socket.create_connection(("127.0.0.1", port), WAIT_SECONDS).close()


SUPERVISOR = """
import sys, time
sys.path.insert(0, {directory!r})
from pathlib import Path
import test_gateway
with test_gateway.make_cluster(Path({tmp!r}), Path({folder!r})) as cluster:
    print(cluster.node("openai").pid, flush=True)
    time.sleep(60)
"""


def test_the_gateway_does_not_outlive_a_supervisor_that_was_killed(tokenizer_folder, tmp_path):
    script = SUPERVISOR.format(directory=str(ROLE_PROCESS.parent), tmp=str(tmp_path), folder=str(tokenizer_folder))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        gateway = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
        supervisor.wait(WAIT_SECONDS)
    _, alive = psutil.wait_procs([gateway], timeout=WAIT_SECONDS)
    assert alive == []


def test_up_says_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "smg" else find(name, *rest))
    assert main(["up", "--port", "0", "--openai", "0"]) != 0
    assert "pip install 'outrider[openai]'" in capsys.readouterr().err


def test_up_says_that_the_protocol_of_the_gateway_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    assert main(["up", "--port", "0", "--openai", "0"]) != 0
    assert "smg-grpc-proto cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (["--tls", "{folder}"], "in plaintext only"),
        (["--token-hashes", "{folder}/tokens"], "shows routers no token"),
        (["--set", "router.token_file={folder}/tokens"], "shows routers no token"),
    ],
)
def test_up_refuses_what_the_gateway_cannot_do(tmp_path, capsys, option, reason):
    assert main(["up", "--port", "0", "--openai", "0", *(text.format(folder=tmp_path / "x") for text in option)]) != 0
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("routers", ["1", "2"])
def test_up_says_that_a_router_has_the_port(capsys, routers):
    port = 50050 + int(routers)
    assert main(["up", "--port", "50051", "--routers", routers, "--openai", str(port)]) != 0
    assert f"openai_port {port} is the port of a router" in capsys.readouterr().err


def test_up_says_that_the_port_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["up", "--port", "0", "--openai", str(taken.getsockname()[1])]) != 0
    assert "choose another with --openai" in capsys.readouterr().err
