"""`outrider profile`: where the time of a running node's steps goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

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
    Part,
    Profile,
    ProfiledStep,
    ProfileOptions,
    StepKind,
    parts_in_order,
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
    yield f"a token: {profile.kv_bytes_per_token:,} bytes of K and V, {profile.feature_bytes_per_token:,} of features"
    for kind in StepKind:
        steps = [step for step in profile.steps if step.kind is kind]
        if steps:
            yield ""
            yield from _table(kind, steps)


def _table(kind: StepKind, steps: Sequence[ProfiledStep]) -> Iterator[str]:
    """Medians, and shares of the busy time of all of them: these add up to 1, medians need not."""
    num_rows, num_sequences = median(step.num_rows for step in steps), median(step.num_sequences for step in steps)
    yield f"{kind}: {len(steps)} steps, median of {num_rows:g} rows, {num_sequences:g} sequences"
    yield f"  {'part':<24}{'median ms':>10}{'share':>9}"
    busy = max(sum(step.busy_nanoseconds for step in steps), 1)
    for part in parts_in_order(steps):
        spent = [step.nanoseconds.get(part, 0) for step in steps]
        yield f"{_median_line(part, spent)}{sum(spent) / busy:>9.1%}"
    yield _median_line("total", (step.busy_nanoseconds for step in steps))
    yield _median_line("beside: event loop", (step.event_loop_nanoseconds for step in steps))
    idle = sum(step.nanoseconds.get(Part.IDLE, 0) for step in steps)
    if idle:
        yield f"  idle between these steps: {idle / 1e6:.0f} ms in all"


def _median_line(name: str, nanoseconds: Iterable[int]) -> str:
    return f"  {name:<24}{median(nanoseconds) / 1e6:>10.3f}"


async def _fetch(
    target: str, options: ProfileOptions, credentials: grpc.ChannelCredentials | None, server_name: str
) -> tuple[Profile, bytes]:
    async with open_channel(target, credentials=credentials, server_name=server_name) as channel:
        return await fetch_profile(channel, options, target=target)
