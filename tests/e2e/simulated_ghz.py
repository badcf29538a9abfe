"""Simulates ghz, for machines without it: `python simulated_ghz.py CONFIG HOST [--total N] [--proto FILE DIR]`.

As ghz, it knows nothing of Outrider's stubs: it finds the method by reflection (or in the
.proto file), makes messages from JSON by their descriptors, and counts statuses. It is no
measuring tool: it says that it simulates, and its times are its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from outrider.bench.ghz import fill_in, load_ghz_config

REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
WAIT_SECONDS = 60.0
MESSAGES = "messages"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("host")
    parser.add_argument("--total", type=int)
    parser.add_argument("--proto", nargs=2, metavar=("FILE", "IMPORT_DIR"))
    arguments = parser.parse_args()
    config = load_ghz_config(arguments.config)
    total = arguments.total or config.total
    with grpc.insecure_channel(arguments.host) as channel:
        files = files_from_proto(*arguments.proto) if arguments.proto else files_by_reflection(channel, config.call)
        call = Call(channel, find_method(files, config.call), config)
        numbers = iter(range(total))
        started_at = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(config.concurrency) as workers:
            runs = [workers.submit(run_worker, call, numbers) for _ in range(config.concurrency)]
            seen = sum((run.result() for run in runs), Counter())
    num_messages = seen.pop(MESSAGES)
    seconds = time.monotonic() - started_at
    how = "the .proto file" if arguments.proto else "reflection"
    print(f"simulated ghz, not ghz itself; {config.call}, messages by {how}")
    print(f"Count: {seen.total()} Total: {seconds:.2f} s Concurrency: {config.concurrency}")
    print(json.dumps({"statusCodeDistribution": seen, "messages": num_messages}))


class Call:
    """One method, called with a config's requests."""

    def __init__(self, channel, method, config) -> None:
        self._config = config
        self._requests = config.requests()
        self._input = message_factory.GetMessageClass(method.input_type)
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        self._is_streaming = method.server_streaming
        self._call = make(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )

    def run(self, number: int) -> Counter:
        """Its status, and how many messages came."""
        template = self._requests[number % len(self._requests)]
        message = json_format.Parse(fill_in(template.template, number), self._input())
        metadata = tuple(json.loads(fill_in(template.metadata_template, number)).items())
        try:
            answer = self._call(message, timeout=self._config.timeout_seconds, metadata=metadata)
            num_messages = sum(1 for _ in answer) if self._is_streaming else 1
        except grpc.RpcError as error:
            return Counter({f"{error.code().name}: {error.details()}": 1})
        return Counter({"OK": 1, MESSAGES: num_messages})


def run_worker(call: Call, numbers: Iterator[int]) -> Counter:
    return sum((call.run(number) for number in numbers), Counter())


def files_by_reflection(channel: grpc.Channel, symbol: str) -> list[descriptor_pb2.FileDescriptorProto]:
    """Asks for the method's symbol, as ghz does."""
    ask = channel.stream_stream(
        REFLECTION,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    (answer,) = ask(iter([question]), timeout=WAIT_SECONDS)
    assert not answer.HasField("error_response"), answer.error_response
    files = answer.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(data) for data in reversed(files)]


def files_from_proto(file: str, import_dir: str) -> list[descriptor_pb2.FileDescriptorProto]:
    from grpc_tools import protoc

    with tempfile.NamedTemporaryFile(suffix=".protoset") as protoset:
        includes = [f"-I{import_dir}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        status = protoc.main(["protoc", *includes, "--include_imports", f"--descriptor_set_out={protoset.name}", file])
        assert status == 0, f"{file} does not compile"
        return list(descriptor_pb2.FileDescriptorSet.FromString(Path(protoset.name).read_bytes()).file)


def find_method(files: list[descriptor_pb2.FileDescriptorProto], symbol: str):
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    service_name, _, method_name = symbol.rpartition(".")
    return pool.FindServiceByName(service_name).methods_by_name[method_name]


if __name__ == "__main__":
    main()
