"""Measures the router's CPU time per streamed token, compared to a bare gRPC server that writes the same messages.

    python -m benchmarks.router_cpu [--streams 16] [--tokens 1000] [--step-ms 10] [--rounds 3]

The router is the real process; its nodes are scripted (`tests.support.router_fakes`) and send one token
per stream and step, so that only the router is measured. The bare server is a grpc.aio server on
uvloop that writes one prepared message per token at the same pace. It shows the cost of gRPC itself.
The relay is a bare server whose pace comes from another process: in each step it reads, but does
not parse, a message as large as that of a decode node's session. No router on grpc.aio can cost
less than the relay. The three take turns in each round. CPU time grows if other programs share the caches, so
compare the columns of one run, not runs at different times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc
import grpc.aio
import psutil
import uvloop

from outrider.rpc.channels import server_options
from outrider.v1 import router_pb2

ROOT = Path(__file__).resolve().parents[1]
GENERATE = "/outrider.v1.RouterService/Generate"
PACE = "/benchmark.Pacemaker/Pace"
SESSION_BYTES_OF_A_STREAM = 30
"""Bytes per stream and token in a message of a decode node's session, including a share of the node's report."""
START_SECONDS = 60
STREAM_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the router for each streamed token.")
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="of each stream; default 1000")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, metavar="MS", help="one token of each stream; default 10"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--serve", choices=tuple(SERVERS), help=argparse.SUPPRESS)
    parser.add_argument("--pacemaker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(SERVERS[arguments.serve](arguments))
        return
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Drives the router, the relay and the bare server in turn. Prints the CPU milliseconds per token of each."""
    this = [
        sys.executable,
        "-m",
        "benchmarks.router_cpu",
        "--tokens",
        str(arguments.tokens),
        "--step-ms",
        str(arguments.step_ms),
    ]
    this += ["--streams", str(arguments.streams)]
    figures: dict[str, list[float]] = {"router": [], "relay": [], "bare": []}
    with (
        started([*this, "--serve", "nodes"]) as (_, nodes),
        started([*this, "--serve", "bare"]) as (bare, bare_said),
        started([*this, "--serve", "relay", "--pacemaker", nodes["pacemaker"]]) as (relay, relay_said),
    ):
        command = [sys.executable, "-m", "router", "--set", "server.port=0"]
        for role in ("decode", "prefill"):
            command += ["--set", f"router.{role}_targets={nodes[role]}"]
        with started(command, announces=True) as (router, serving):
            servers = {
                "router": (router, serving["address"]),
                "relay": (relay, relay_said["address"]),
                "bare": (bare, bare_said["address"]),
            }
            for process, address in servers.values():  # warm-up, since the first calls import and connect
                drive(process, address, arguments.streams, min(50, arguments.tokens))
            for _ in range(arguments.rounds):
                for name, (process, address) in servers.items():
                    seconds, num_messages = drive(process, address, arguments.streams, arguments.tokens)
                    num_tokens = arguments.streams * arguments.tokens
                    figures[name].append(seconds * 1e3 / num_tokens)
                    shown = f"{figures[name][-1]:.4f} ms of CPU for each token"
                    print(f"{name:>6}: {shown}, {num_messages / num_tokens:.2f} messages for each", flush=True)
    for what, of in (("median", median), ("least", min)):
        router_ms, relay_ms, bare_ms = (of(figures[name]) for name in ("router", "relay", "bare"))
        times = f"{router_ms / bare_ms:.2f} and {relay_ms / bare_ms:.2f} times"
        print(f"{what}: router {router_ms:.4f} ms, relay {relay_ms:.4f} ms, bare gRPC {bare_ms:.4f} ms, {times}")


def drive(process: psutil.Process, address: str, num_streams: int, num_tokens: int) -> tuple[float, int]:
    """Runs streams. Returns the process's CPU seconds, and the number of messages, which the client does not parse."""
    request = router_pb2.GenerateRequest(text="a prompt")
    request.sampling.max_tokens = num_tokens
    request.stop.ignore_eos = True
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(num_streams) as pool:
        call = channel.unary_stream(GENERATE)
        before = process.cpu_times()
        counts = pool.map(
            lambda _: sum(1 for _ in call(request.SerializeToString(), timeout=STREAM_SECONDS)), range(num_streams)
        )
        num_messages = sum(counts)
        after = process.cpu_times()
    return after.user + after.system - before.user - before.system, num_messages


@contextmanager
def started(command: list[str], *, announces: bool = False) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yields the process and a JSON line: its first on standard output or, with `announces`, its log line "serving"."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL if announces else subprocess.PIPE,
        stderr=subprocess.PIPE if announces else None,
        text=True,
    )
    lines = process.stderr if announces else process.stdout
    assert lines is not None
    try:
        for line in lines:
            said = json.loads(line)
            if not announces or said.get("event") == "serving":
                break
        else:
            raise RuntimeError(f"{command} ended before it served")
        with ThreadPoolExecutor(1) as drain:
            drain.submit(lambda: [None for _ in lines])  # a full pipe would block the process
            try:
                yield psutil.Process(process.pid), said
            finally:
                process.terminate()
                process.wait(START_SECONDS)
    finally:
        process.kill()


async def serve_nodes(arguments: argparse.Namespace) -> None:
    """Runs a scripted decode node, an unused prefill node, and the relay's pacemaker."""
    from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode, fake_model_info

    model = fake_model_info(max_model_len=arguments.tokens + 64)
    decode = FakeDecodeNode(model=model)
    decode.step_seconds = arguments.step_ms / 1e3
    decode.max_local_prefill_tokens = 64
    prefill = FakePrefillNode(model=model)

    async def pace(_request: bytes, context: grpc.aio.ServicerContext) -> None:
        message = bytes(SESSION_BYTES_OF_A_STREAM * arguments.streams)
        while True:
            await asyncio.sleep(arguments.step_ms / 1e3)
            await context.write(message)

    pacemaker = await start_server(PACE, pace)
    addresses = {"decode": await decode.start(), "prefill": await prefill.start(), "pacemaker": pacemaker}
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


async def serve_bare(arguments: argparse.Namespace) -> None:
    """Runs the bare server, which writes to its streams every `step_ms` milliseconds."""
    step = await serve_steps()
    while True:
        await asyncio.sleep(arguments.step_ms / 1e3)
        step.set()
        step.clear()


async def serve_relay(arguments: argparse.Namespace) -> None:
    """Runs the relay, which writes to its streams whenever a message of the pacemaker arrives."""
    step = await serve_steps()
    async with grpc.aio.insecure_channel(arguments.pacemaker) as channel:
        async for _ in channel.unary_stream(PACE)(b""):
            step.set()
            step.clear()


async def serve_steps() -> asyncio.Event:
    """Starts a server that writes a one-token delta to each stream per step, up to the requested number of tokens.

    Returns the event that triggers a step.
    """
    message = router_pb2.GenerateResponse(
        delta=router_pb2.Delta(start_position=500, token_ids=[97], text="a")
    ).SerializeToString()
    step = asyncio.Event()

    async def generate(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(router_pb2.GenerateRequest.FromString(request).sampling.max_tokens):
            await step.wait()
            await context.write(message)

    print(json.dumps({"address": await start_server(GENERATE, generate)}), flush=True)
    return step


async def start_server(method: str, behaviour: Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]) -> str:
    """Starts a grpc.aio server with one method, which streams bytes. Returns its address."""
    server = grpc.aio.server(options=server_options())
    SERVED.append(server)  # without a reference the server would shut itself down
    service, _, name = method[1:].partition("/")
    handler = grpc.unary_stream_rpc_method_handler(behaviour)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}"


SERVED: list[grpc.aio.Server] = []
SERVERS = {"nodes": serve_nodes, "bare": serve_bare, "relay": serve_relay}


if __name__ == "__main__":
    main()
