"""`outrider probe`: a service's health as an exit status, for container health checks and scripts.

It runs frequently next to the service that it checks, so it imports little.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.connection import add_connection_arguments, read_tls, targets
from outrider.client.targets import DEFAULT_TARGET
from outrider.errors import InvalidRequestError, NotFoundError, OutriderError, PeerLostError
from outrider.rpc.channels import open_sync_channel
from outrider.rpc.tls import client_credentials

DEFAULT_TIMEOUT_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=targets,
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"the address of any service; default {DEFAULT_TARGET}",
    )
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="service to check, for example outrider.v1.RouterService; default: the whole process",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"time limit of the check; default {DEFAULT_TIMEOUT_SECONDS:g}",
    )
    parser.add_argument(
        "--server-name", default="", metavar="NAME", help="name in the service's certificate, if it is not the address"
    )
    add_connection_arguments(parser, with_token=False)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0 for SERVING, 1 for anything else.

    Raises: PeerLostError if there is no answer, NotFoundError if the process has no such service,
    InvalidRequestError for an invalid timeout, ConfigError for a file that cannot be read.
    """
    tls = read_tls(arguments)
    if not arguments.timeout > 0:
        raise InvalidRequestError(f"--timeout {arguments.timeout:g} is not above 0", field="timeout")
    credentials = client_credentials(tls, None)
    with open_sync_channel(arguments.target, credentials=credentials, server_name=arguments.server_name) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        try:
            answer = health.Check(request, timeout=arguments.timeout)
        except grpc.RpcError as error:
            raise _explained(error, arguments) from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    sys.stdout.write(f"{arguments.target} is {status}\n")
    return 0 if status == "SERVING" else 1


def _explained(error: grpc.RpcError, arguments: argparse.Namespace) -> OutriderError:
    target, code = arguments.target, error.code()
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(f"{target} has no service {arguments.service}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotFoundError(f"{target} has no health service: it is not an Outrider service")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerLostError(f"{target} does not answer within {arguments.timeout:g} s")
    return PeerLostError(f"{target} cannot be reached: {error.details()}")
