"""`python -m router`: the composition root."""

from __future__ import annotations

import sys

from outrider.config import parse_role_arguments
from outrider.rpc.peer_security import SecurityConfig
from outrider.service.config import TelemetryConfig
from outrider.service.security import make_security
from outrider.service.server import run_service
from router.config import RouterConfig
from router.router import Router


def main() -> int:
    """The exit status, where the service did not get to run."""
    sections = parse_role_arguments(
        "router", {"router": RouterConfig, "telemetry": TelemetryConfig, "security": SecurityConfig}
    )
    config: RouterConfig = sections["router"]
    telemetry: TelemetryConfig = sections["telemetry"]
    for name in ("prefill_targets", "decode_targets"):
        if not getattr(config, name):
            sys.stderr.write(f"router: router.{name} is empty; name at least one host:port\n")
            return 2
    security = make_security(sections["security"])
    router = Router(config, security=security)
    return run_service(router, server=config.server, telemetry=telemetry, security=security, role="router")


if __name__ == "__main__":
    sys.exit(main())
