"""`outrider profile`: where the time of a running node's steps goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

from outrider.cli.connection import (
    add_connection_arguments,
    add_target_argument,
    check_writable,
    read_tls,
    read_token,
)
from outrider.client import Client
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.node import NodeRole, NodeState
from outrider.profile import (
    DEFAULT_NUM_STEPS,
    DEFAULT_TIMEOUT_SECONDS,
    MOST_TRACED_STEPS,
    KindFigures,
    Profile,
    ProfileOptions,
    figures_of,
)
from outrider.rpc.channels import open_channel
from outrider.rpc.credentials import TlsConfig, client_credentials
from outrider.service.profiling import fetch_profile

ROLES = {"prefill_node": NodeRole.PREFILL, "decode_node": NodeRole.DECODE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--node", metavar="HOST:PORT", help="the node's address")
    where.add_argument("--role", choices=sorted(ROLES), help="the first node of this role that --target knows")
    add_target_argument(parser)
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_NUM_STEPS, metavar="N", help="number of steps; default %(default)s"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a trace of N more steps to this file (Chrome trace, .json.gz)",
    )
    parser.add_argument(
        "--traced-steps",
        type=int,
        metavar="N",
        help=f"steps in the trace; default: --steps, at most {MOST_TRACED_STEPS}",
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, metavar="SECONDS", help="limit; default %(default)g"
    )
    parser.add_argument(
        "--server-name", default="", metavar="NAME", help="the name in the node's certificate, if not the address"
    )
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if nothing was captured."""
    options = make_options(arguments)
    if arguments.output:
        check_writable(arguments.output, "output")
    tls, token = read_tls(arguments), read_token(arguments)
    target = arguments.node or find_node(arguments.target, arguments.role, tls=tls, token=token)
    profile, trace = asyncio.run(_fetch(target, options, client_credentials(tls, None), arguments.server_name))
    if arguments.output and trace:
        arguments.output.write_bytes(trace)
    print("\n".join(as_lines(profile)))
    if arguments.output:
        wrote = f"{profile.num_traced_steps} steps in {arguments.output}" if trace else "none"
        print(f"trace: {wrote}")
    if profile.timed_out:
        sys.stdout.flush()
        sys.stderr.write(
            f"outrider profile: fewer than {arguments.steps} steps in {arguments.timeout:g} s; "
            "profile a node while it serves requests\n"
        )
    return 0 if profile.steps else 1


def make_options(arguments: argparse.Namespace) -> ProfileOptions:
    """Raises: InvalidRequestError."""
    if arguments.traced_steps is not None and not arguments.output:
        raise InvalidRequestError("--traced-steps needs --output", field="traced_steps")
    num_traced = min(arguments.steps, MOST_TRACED_STEPS) if arguments.traced_steps is None else arguments.traced_steps
    return ProfileOptions(
        num_steps=arguments.steps,
        num_traced_steps=num_traced if arguments.output else 0,
        timeout_seconds=arguments.timeout,
    )


def find_node(router: str, role: str, *, tls: TlsConfig | None = None, token: str | None = None) -> str:
    """host:port of the first serving node of the role. Raises: NotFoundError; PeerLostError without a router."""
    with Client(router, tls=tls, token=token) as client, contextlib.closing(client.watch_cluster()) as statuses:
        nodes = next(statuses).by_role()[ROLES[role]]
    for node in nodes:
        if node.state is NodeState.SERVING:
            return node.target
    raise NotFoundError(f"the router at {router} knows no serving {role}")


def as_lines(profile: Profile) -> Iterator[str]:
    """One table for each kind of step."""
    yield f"{profile.node}: {len(profile.steps)} steps in {profile.seconds:.2f} s"
    for figures in figures_of(profile.steps):
        yield ""
        yield from _table(figures)


def _table(figures: KindFigures) -> Iterator[str]:
    yield (
        f"{figures.kind}: {figures.num_steps} steps, "
        f"median of {figures.median_rows:g} rows, {figures.median_sequences:g} sequences"
    )
    yield f"  {'part':<24}{'median ms':>10}{'share':>9}"
    for part in figures.parts:
        yield f"  {part.part:<24}{part.median_milliseconds:>10.3f}{part.share:>9.1%}"
    yield f"  {'total':<24}{figures.median_milliseconds:>10.3f}"
    yield f"  {'beside: event loop':<24}{figures.median_event_loop_milliseconds:>10.3f}"
    if figures.idle_milliseconds:
        yield f"  idle between these steps: {figures.idle_milliseconds:.0f} ms in all"


async def _fetch(
    target: str, options: ProfileOptions, credentials: grpc.ChannelCredentials | None, server_name: str
) -> tuple[Profile, bytes]:
    async with open_channel(target, credentials=credentials, server_name=server_name) as channel:
        return await fetch_profile(channel, options, target=target)
