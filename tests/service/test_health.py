"""Health is SERVING while the service runs and the nodes that it needs are available."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from outrider.service.health import Health


@pytest.mark.parametrize("is_serving", [False, True])
@pytest.mark.parametrize("is_ready", [False, True])
async def test_both_have_to_hold(is_serving, is_ready):
    health = Health(("a.Service",))
    for ready in (True, False, is_ready):
        health.set_ready(ready)
    await health.set_serving(is_serving=is_serving)
    for name in ("", "a.Service"):
        response = await health._servicer.Check(health_pb2.HealthCheckRequest(service=name), None)
        assert (response.status == health_pb2.HealthCheckResponse.SERVING) is (is_serving and is_ready)
