"""`python -m router`: the composition root."""

from __future__ import annotations

import sys

from outrider.errors import ConfigError
from outrider.service.server import ServiceProcess
from router.clients import TokenFile
from router.config import SECTIONS, RouterConfig
from router.router import Router


def main() -> int:
    """The exit status, where the service did not get to run."""
    process = ServiceProcess("router", SECTIONS)
    config: RouterConfig = process.sections["router"]
    if not config.decode_targets:
        sys.stderr.write("router: router.decode_targets is empty; name at least one host:port\n")
        return 2
    try:
        clients = None if config.token_file is None else TokenFile(config.token_file)
        router = Router(
            config,
            name=process.config.name,
            security=process.security,
            clients=clients,
            shows_text=process.telemetry.log_text,
            tracer=process.tracer,
            reasoning_parser=process.sections["gateway"].reasoning_parser,
        )
    except ConfigError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2
    return process.run(router, client_tls=config.tls, authenticate=None if clients is None else clients.identify)


if __name__ == "__main__":
    sys.exit(main())
