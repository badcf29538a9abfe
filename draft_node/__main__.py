"""Runs a draft node: `python -m draft_node --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prometheus_client import REGISTRY

from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.config import parse_role_arguments
from outrider.engine.processor import SPIN_SHORT, prepare_environment
from outrider.rpc.peer_security import SecurityConfig
from outrider.service.config import TelemetryConfig
from outrider.service.security import make_security
from outrider.service.server import run_service


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain."""
    sections = parse_role_arguments(
        "draft_node",
        {"telemetry": TelemetryConfig, "security": SecurityConfig, "draft_node": DraftNodeConfig},
        argv,
    )
    config: DraftNodeConfig = sections["draft_node"]
    prepare_environment(spin_count=SPIN_SHORT, cpus=config.model.cpus)
    service = DraftNode(config, registry=REGISTRY)
    return run_service(
        service,
        server=config.server,
        telemetry=sections["telemetry"],
        security=make_security(sections["security"]),
        role="draft_node",
    )


if __name__ == "__main__":
    sys.exit(main())
