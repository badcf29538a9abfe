"""Starts the real gateway as `outrider up` does, in front of a router with fake nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import openai

from outrider.cluster.gateway import ENVIRONMENT, choose_ports, gateway_arguments, served_model
from outrider.service.config import GatewayConfig, ServerConfig, TelemetryConfig
from tests.support.waiting import wait_for

MODEL = "fake-model"
CALL_SECONDS = 60.0


@contextlib.contextmanager
def gateway_before(router, **config):
    """Starts a gateway in front of a `ThreadedRouter`, and yields OpenAI's client. `config`: the section `gateway`."""
    settings = GatewayConfig(router_targets=(router.cluster.address,), **config)
    ports = choose_ports(ServerConfig(host="127.0.0.1", port=0))
    arguments = gateway_arguments(settings, TelemetryConfig(), ports, 1.0)
    command = [str(Path(sys.executable).with_name("smg")), "launch", *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT, "NO_PROXY": "127.0.0.1"}
        ) as gateway,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{ports.port}/v1", api_key="a-key", max_retries=0, timeout=CALL_SECONDS
        ) as client,
    ):
        try:
            wait_for(lambda: _serves(gateway, ports))
            yield client
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            gateway.kill()


def _serves(gateway, ports):
    """Returns whether the gateway has found the router and its tokenizer."""
    assert gateway.poll() is None, "the gateway has ended"
    return served_model(ports)


def own(router, **fields):
    """Returns the answer of the router's own service."""
    request = router.cluster.request(**fields)

    async def complete():
        return await router.cluster.stub.Complete(request, timeout=CALL_SECONDS)

    return router.run(complete())
