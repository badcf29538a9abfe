"""grpc.health.v1: NOT_SERVING until the service has started, and again from the first sign of its end."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

HEALTH_SERVICE = "grpc.health.v1.Health"


class Health:
    """One state for the whole process ("") and for each of its services."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = ("", *service_names)
        self._servicer = HealthServicer()

    async def add_to(self, server: grpc.aio.Server) -> None:
        await self.set_serving(is_serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, *, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
