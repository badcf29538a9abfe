"""`python -m router`: the composition root."""

from __future__ import annotations

import sys

from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.service.security import make_security
from outrider.service.server import ServiceProcess
from outrider.service.telemetry.tracer_factory import make_role_tracer
from router.clients import TokenFile
from router.config import SECTIONS, RouterConfig
from router.router import Router


def main() -> int:
    """The exit status, where the service did not get to run."""
    sections = parse_role_arguments("router", SECTIONS)
    config: RouterConfig = sections["router"]
    if not config.decode_targets:
        sys.stderr.write("router: router.decode_targets is empty; name at least one host:port\n")
        return 2
    security = make_security(sections["security"])
    tracer = make_role_tracer(sections["telemetry"], role="router")
    try:
        clients = None if config.token_file is None else TokenFile(config.token_file)
        router = Router(
            config,
            name=sections["server"].name,
            security=security,
            clients=clients,
            shows_text=sections["telemetry"].log_text,
            tracer=tracer,
        )
    except ConfigError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2
    return ServiceProcess(
        router,
        config=sections["server"],
        telemetry=sections["telemetry"],
        security=security,
        client_tls=config.tls,
        authenticate=None if clients is None else clients.authenticate,
        tracer=tracer,
        role="router",
    ).run()


if __name__ == "__main__":
    sys.exit(main())
