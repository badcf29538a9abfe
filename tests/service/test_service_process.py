"""The life of a real service process, seen from outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.processes import WAIT_SECONDS, RoleProcess, check_health

ROLE_PROCESS = Path(__file__).parents[1] / "cluster" / "role_process.py"
ROUTER_SERVICE = "outrider.v1.RouterService"


def service_process(*settings: str, **environ: str) -> RoleProcess:
    """Starts `python role_process.py router …`."""
    return RoleProcess("router", *settings, command=[sys.executable, str(ROLE_PROCESS), "router"], **environ)


@pytest.fixture(scope="module")
def served():
    service = service_process("server.port=0")
    announced = service.announcement("serving")
    yield announced["address"]
    status, _ = service.end()
    assert status == 0


@pytest.fixture(params=["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"])
def reflect(request, served):
    """Sends one request to the reflection service, with the same bytes as ghz and grpcurl."""
    with grpc.insecure_channel(served) as channel:
        method = channel.stream_stream(
            f"/{request.param}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )

        def ask_all(*questions):
            requests = [reflection_pb2.ServerReflectionRequest(**question) for question in questions]
            return list(method(iter(requests), timeout=WAIT_SECONDS))

        def ask(**question):
            (answer,) = ask_all(question)
            return answer

        ask.all = ask_all
        yield ask


def file_names(response) -> list[str]:
    files = response.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(data).name for data in files]


# To list services, grpcurl sends "*" and other tools send nothing. The service ignores the value.
@pytest.mark.parametrize("question", ["", "*"])
def test_reflection_lists_every_service(reflect, question):
    names = [service.name for service in reflect(list_services=question).list_services_response.service]
    assert {ROUTER_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= set(names)


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "outrider/v1/router.proto"},
        {"file_containing_symbol": ROUTER_SERVICE},  # what grpcurl sends for a call and for describe
        {"file_containing_symbol": f"{ROUTER_SERVICE}.Generate"},  # what ghz sends for a call, and grpcurl for describe
        {"file_containing_symbol": f"{ROUTER_SERVICE}.Complete"},
        {"file_containing_symbol": "outrider.v1.GenerateRequest"},  # what grpcurl sends for describe
        {"file_containing_symbol": "outrider.v1.GenerateRequest.sampling"},
        {"file_containing_symbol": "outrider.v1.FinishReason"},
        {"file_containing_symbol": ROUTER_SERVICE, "host": "127.0.0.1:50051"},
    ],
)
def test_reflection_finds_a_file_by_name_service_method_and_message(reflect, question):
    names = file_names(reflect(**question))
    assert "outrider/v1/router.proto" in names
    assert "google/protobuf/duration.proto" in names


def test_reflection_answers_all_questions_of_one_stream_in_their_order(reflect):
    questions = [
        {"list_services": "*"},
        {"file_containing_symbol": "nothing"},  # it is answered with an error, which does not end the stream
        {"file_containing_symbol": f"{ROUTER_SERVICE}.Generate"},
        {"file_by_filename": "google/protobuf/duration.proto"},
    ]
    answers = reflect.all(*questions)
    assert [answer.original_request for answer in answers] == [
        reflection_pb2.ServerReflectionRequest(**question) for question in questions
    ]
    assert [answer.WhichOneof("message_response") for answer in answers] == [
        "list_services_response",
        "error_response",
        "file_descriptor_response",
        "file_descriptor_response",
    ]


def test_the_files_of_one_answer_are_all_that_a_tool_needs_to_make_a_call(reflect, served):
    files = reflect(file_containing_symbol=f"{ROUTER_SERVICE}.Generate").file_descriptor_response.file_descriptor_proto
    pool = descriptor_pool.DescriptorPool()
    for data in reversed(files):  # each file comes before the files that it imports
        pool.AddSerializedFile(data)
    method = pool.FindServiceByName(ROUTER_SERVICE).methods_by_name["Generate"]
    request = json_format.ParseDict({"text": "two words"}, message_factory.GetMessageClass(method.input_type)())
    with grpc.insecure_channel(served) as channel:
        call = channel.unary_stream(
            f"/{ROUTER_SERVICE}/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        events = [json_format.MessageToDict(event) for event in call(request, timeout=WAIT_SECONDS)]
    assert "".join(event["delta"]["text"] for event in events if "delta" in event) == "two words"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_itself(reflect, version):
    assert file_names(reflect(file_containing_symbol=f"grpc.reflection.{version}.ServerReflection"))


@pytest.mark.parametrize("symbol", ["outrider.v1.Nothing", f"{ROUTER_SERVICE}.Nothing", "nothing"])
def test_reflection_answers_not_found_for_a_strange_symbol(reflect, symbol):
    assert reflect(file_containing_symbol=symbol).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_client_that_pings_all_the_time_is_kept(served):
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(served, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        leaving = threading.Timer(2.0, watch.cancel)
        leaving.start()
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        leaving.join()
        assert ended.value.code() is grpc.StatusCode.CANCELLED  # not UNAVAILABLE because of too_many_pings
        assert check_health(channel) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4096),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512,
        b"",
    ],
    ids=["http1", "random", "broken_http2", "silence"],
)
def test_noise_on_the_port_disturbs_nobody(served, noise):
    host, port = served.split(":")
    with grpc.insecure_channel(served) as channel:
        assert check_health(channel) == health_pb2.HealthCheckResponse.SERVING
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
            connection.sendall(noise)
        assert check_health(channel, ROUTER_SERVICE) == health_pb2.HealthCheckResponse.SERVING


def test_health_is_not_serving_until_the_service_has_started_and_sigterm_ends_with_0(tmp_path):
    may_start = tmp_path / "may start"
    service = service_process(
        "server.port=0",
        "server.metrics_port=0",
        "server.drain_seconds=600",  # not needed, because the process ends at once
        START_WHEN=str(may_start),
    )
    bound = service.announcement("address")
    with grpc.insecure_channel(bound["address"]) as channel:
        watch = iter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS))
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert check_health(channel, ROUTER_SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert service.announcement("progress") == {"progress": "weights", "done": 10, "total": 10}
        may_start.touch()
        assert service.announcement("serving")["threads"] == 1
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://{bound['metrics_address']}/metrics", timeout=WAIT_SECONDS) as response:
            assert b"process_resident_memory_bytes" in response.read()
        service.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status, log = service.wait()
    assert status == 0
    assert [line["event"] for line in log] == ["listening", "serving", "draining", "stopped"]
    assert all(line["role"] == "router" for line in log)


def test_sigterm_while_loading_ends_with_0(tmp_path):
    service = service_process("server.port=0", "server.host=0.0.0.0", START_WHEN=str(tmp_path / "never"))
    service.announcement("progress")
    status, log = service.end()
    assert status == 0
    (warning,) = [line["event"] for line in log if line["level"] == "warning"]  # about the host, before anything loads
    assert warning.startswith("ANYBODY who reaches this machine can use this router")


def test_a_start_that_fails_is_one_clear_line_and_status_1():
    status, log = service_process("server.port=0", ROLE_FAILS="router").wait()
    assert status == 1
    (failure,) = (line for line in log if line["level"] == "error")
    assert failure["event"] == "cannot start"
    assert failure["error"] == "weights.safetensors is not there"
    assert "exception" not in failure


@pytest.mark.parametrize(
    ("host", "other"), [("192.0.2.1", "::1"), ("2001:db8::1", "127.0.0.1"), ("[2001:db8::1]", "127.0.0.1")]
)
def test_a_host_that_is_none_of_this_machines_is_named_and_not_the_port(host, other):
    status, log = service_process(f"server.host={host}", "server.port=0").wait()
    assert status == 1
    (failure,) = (line for line in log if line["level"] == "error")
    assert failure["error"] == (
        f"{host.strip('[]')} is not an address of this machine; "
        f"choose another with --set server.host=ADDRESS, such as {other}"
    )


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_addresses_of_ipv6_are_said_in_brackets(host):
    service = service_process(f"server.host={host}", "server.port=0", "server.metrics_port=0")
    assert re.fullmatch(r"\[::1\]:\d+", service.announcement("serving")["address"])
    status, log = service.end()
    (listening,) = (line for line in log if line["event"] == "listening")
    assert re.fullmatch(r"\[::1\]:\d+", listening["metrics_address"])
    assert status == 0


@pytest.mark.parametrize("by", ["a socket", "a service"])
def test_a_taken_port_is_named_with_the_way_out(served, by):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if by == "a socket" else served.rpartition(":")[2]
        status, log = service_process(f"server.port={port}").wait()
    assert status == 1
    (failure,) = log
    assert failure["error"] == (
        f"port {port} on 127.0.0.1 is taken; choose another with --set server.port=N or OUTRIDER_SERVER__PORT"
    )
