"""The service grpc.health.v1: NOT_SERVING until the process has started, and again as soon as it begins to drain.

The health name `LIVENESS` is SERVING as long as the process answers, even while it waits for other nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""Health name for probes that restart a process. Its status does not depend on start and drain of the process,
nor on the states of other nodes.
"""


class Health:
    """One health state, which is reported for the whole process ("") and for each of its services."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = ("", *service_names)
        self._servicer = HealthServicer()
        self._is_serving = False  # whether the process has started and is not draining yet
        self._is_ready = True  # whether the nodes that the service needs are available
        self._telling: asyncio.Task[None] | None = None

    async def add_to(self, server: grpc.aio.Server) -> None:
        await self.set_serving(is_serving=False)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, *, is_serving: bool) -> None:
        self._is_serving = is_serving
        await self._tell()

    def set_ready(self, is_ready: bool) -> None:  # noqa: FBT001 a listener of one value
        """Sets whether the nodes that the service needs are available (`outrider.service.server.FrontService`)."""
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            self._telling = asyncio.create_task(self._tell(), name="health")

    async def _tell(self) -> None:
        """Publishes the current state: if several changes are pending, the last one wins."""
        for name in self._names:
            is_serving = self._is_serving and self._is_ready
            await self._servicer.set(
                name,
                health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING,
            )
