"""`outrider profile`: how running nodes and their requests spend wall-clock time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import grpc

from outrider.cli.connection import (
    add_connection_arguments,
    add_target_argument,
    check_writable,
    read_connection,
    targets,
)
from outrider.cli.printable import printable
from outrider.cli.profile_tables import engine_lines, request_lines
from outrider.cli.request_times import ended_serials, request_times
from outrider.client import Client
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.node import NodeRole, NodeState
from outrider.profile import (
    DEFAULT_NUM_STEPS,
    DEFAULT_TIMEOUT_SECONDS,
    MAX_STEPS,
    MAX_TRACED_STEPS,
    Profile,
    ProfileOptions,
)
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import TlsConfig, client_credentials
from outrider.service.profiling import fetch_profile

ROLES = {"prefill_node": NodeRole.PREFILL, "decode_node": NodeRole.DECODE}
DEFAULT_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--node", type=targets, metavar="HOST:PORT", help="profile only the node at this address")
    where.add_argument(
        "--role",
        choices=sorted(ROLES),
        help="profile only the nodes of this role; default: all nodes that the router knows",
    )
    add_target_argument(parser)
    parser.add_argument(
        "--page",
        metavar="HOST:PORT",
        help="the router's page, as `outrider up` prints it; the output then also shows how requests spent their time",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="duration of the profile; default %(default)g",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=MAX_STEPS,
        metavar="N",
        help="maximum number of steps per node; default %(default)s",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also trace further steps of one node with torch, and write the trace to this file (Chrome "
        "trace, .json.gz); native kernels have none",
    )
    parser.add_argument(
        "--traced-steps",
        type=int,
        metavar="N",
        help=f"number of steps in the trace; default {DEFAULT_NUM_STEPS}, at most {MAX_TRACED_STEPS}",
    )
    parser.add_argument(
        "--server-name", default="", metavar="NAME", help="name in the nodes' certificate, if it is not the address"
    )
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if nothing was captured."""
    options = ProfileOptions(num_steps=arguments.steps, timeout_seconds=arguments.seconds)
    traced = ProfileOptions(
        num_steps=1,
        num_traced_steps=DEFAULT_NUM_STEPS if arguments.traced_steps is None else arguments.traced_steps,
        timeout_seconds=max(arguments.seconds, DEFAULT_TIMEOUT_SECONDS),
    )
    if arguments.traced_steps is not None and not arguments.output:
        raise InvalidRequestError("--traced-steps needs --output", field="traced_steps")
    if arguments.output:
        check_writable(arguments.output, "output")
    connection = read_connection(arguments)
    targets = [arguments.node] if arguments.node else find_nodes(arguments.target, arguments.role, **connection)
    if arguments.output and len(targets) > 1:
        raise InvalidRequestError("--output needs --node: a trace is of one node", field="output")
    credentials = client_credentials(connection["tls"], None)

    def fetch(options: ProfileOptions) -> list[tuple[Profile, bytes]]:
        return asyncio.run(_fetch_all(targets, options, credentials, arguments.server_name))

    ended, started_at = ended_serials(arguments.page) if arguments.page else set(), time.monotonic()
    _say(f"{', '.join(targets)}: {arguments.seconds:g} s")
    profiles = [profile for profile, _ in fetch(options)]
    _show(engine_lines(profiles))
    if arguments.page:
        requests = list(request_times(arguments.page, ended_serials(arguments.page) - ended))
        seconds = time.monotonic() - started_at
        whole = [each for each in requests if each["age"] <= seconds]  # others had steps before the profile began
        _show(["", *request_lines(whole or requests, profiles)])
    if any(not profile.steps for profile in profiles):
        sys.stdout.flush()
        _say("a node without steps serves no requests: profile it under load")
    elif arguments.output:
        ((profile, trace),) = fetch(traced)
        if not trace:
            raise NotFoundError(f"no step to trace within {traced.timeout_seconds:g} s: {arguments.output} is empty")
        arguments.output.write_bytes(trace)
        print(f"trace: {profile.num_traced_steps} steps in {arguments.output}")
    return 0 if any(profile.steps for profile in profiles) else 1


def find_nodes(router: str, role: str | None, *, tls: TlsConfig | None = None, token: str | None = None) -> list[str]:
    """Returns host:port of the role's serving nodes; without a role, those of all roles whose engines can be profiled.

    Raises: NotFoundError; PeerLostError if no router answers.
    """
    with Client(router, tls=tls, token=token) as client, contextlib.closing(client.watch_cluster()) as statuses:
        by_role = next(statuses).by_role()
    found = [
        node.target
        for name, each in ROLES.items()
        if role in (None, name)
        for node in by_role[each]
        if node.state is NodeState.SERVING
    ]
    if not found:
        raise NotFoundError(f"the router at {router} knows no serving {role or 'prefill or decode node'}")
    return found


async def _fetch_all(
    targets: Sequence[str], options: ProfileOptions, credentials: grpc.ChannelCredentials | None, server_name: str
) -> list[tuple[Profile, bytes]]:
    """Profiles all nodes at the same time."""

    async def fetch(target: str) -> tuple[Profile, bytes]:
        async with open_channel(target, credentials=credentials, server_name=server_name) as channel:
            return await fetch_profile(channel, options, target=target)

    return await asyncio.gather(*map(fetch, targets))


def _show(lines: Iterable[str]) -> None:
    print("\n".join(map(printable, lines)))


def _say(message: str) -> None:
    sys.stderr.write(f"outrider profile: {printable(message)}\n")
