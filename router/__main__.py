"""`python -m router`: the composition root."""

from __future__ import annotations

from outrider.errors import ConfigError
from outrider.extras import run_role


def main() -> int:
    """Builds and runs a router, and returns the exit status. Raises: ConfigError."""
    from outrider.service.server import ServiceProcess
    from router.api.clients import TokenFile
    from router.config import SECTIONS, RouterConfig
    from router.router import Router

    process = ServiceProcess("router", SECTIONS)
    config: RouterConfig = process.sections["router"]
    if not config.decode_targets:
        raise ConfigError("router.decode_targets is empty; name at least one host:port")
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
    return process.run(router, client_tls=config.tls, authenticate=None if clients is None else clients.identify)


if __name__ == "__main__":
    run_role("router", main)
