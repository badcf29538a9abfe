"""The life of a service process: bind → start → serve → drain → stop.

    process = ServiceProcess("decode_node", SECTIONS)
    process.run(DecodeService(process.sections["decode_node"]))

The port answers from the beginning, with health NOT_SERVING and with NodeService. The service is serving once
`start` has returned. SIGTERM or SIGINT drains it; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, Protocol, runtime_checkable
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
import uvloop
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from outrider import __version__
from outrider.config.arguments import parse_role_arguments
from outrider.config.resolve import environment_name
from outrider.errors import ConfigError, OutriderError
from outrider.heap import limit_heaps, trim_heap
from outrider.lossy_stream import exit_now, guard_standard_streams
from outrider.rpc.channels import server_options
from outrider.rpc.tls import PLAINTEXT, PeerSecurity, TlsConfig, TlsFiles
from outrider.service.address import host_port, is_loopback, reachable_address
from outrider.service.announce import announce, announce_failure, announce_uncaught_errors
from outrider.service.config import ServerConfig, TelemetryConfig
from outrider.service.health import HEALTH_SERVICE, Health
from outrider.service.open_calls import OpenCalls
from outrider.service.pages import BoundedRequestHandler, FindPage, bound_connections, with_pages
from outrider.service.reflection import add_reflection
from outrider.service.request_limits import Authenticate, RequestLimits
from outrider.service.security import log_refused_files, warn_if_unauthenticated
from outrider.service.telemetry.logging import configure_logging, get_logger
from outrider.service.telemetry.tracer_factory import make_tracer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_log = get_logger("service")

DRAIN_SLACK_SECONDS = 1.0
"""Seconds after the deadline of a drain at which the drain is abandoned."""
TEXT_FORMAT = "text/plain; version=0.0.4"
HANDOVER_SECONDS = 0.5
"""Minimum seconds of a drain, because peers call the process until they learn of the drain from its reports."""
SPARE_CALLS = 1024
"""gRPC's own limit applies to calls of every kind. It is set to twice the configured limit plus this number."""
MAX_YOUNG_OBJECTS = 10_000
"""Number of young objects that triggers a garbage collection. A large step makes thousands of objects; Python's default
is 700.
"""
TRACES_SECONDS = 0.5
"""Maximum seconds for the export of the last traces during a stop."""
STOP_SECONDS = 2.0
"""Seconds after which a stopping process ends even if a part of the service still hangs."""


class Service(Protocol):
    """The service of a role. All methods run on the event loop and must not block it.

    `add_to` registers the servicers. `start` loads everything (in threads); `address` is the
    host:port under which others reach the service. `drain` is called after health is
    NOT_SERVING: it accepts no new work, and returns when running work has ended and its statuses
    have been sent, or when the deadline has passed. `stop` frees everything; it is called once,
    even if `start` failed.
    `describe` returns the fields of the start-up log line: fingerprint, dtype, device, threads
    and so on, as JSON values.
    """

    service_names: tuple[str, ...]

    def add_to(self, server: grpc.aio.Server) -> None: ...
    async def start(self, address: str) -> None: ...
    async def drain(self, deadline_seconds: float) -> None: ...
    async def stop(self) -> None: ...
    def describe(self) -> Mapping[str, Any]: ...


@runtime_checkable
class FrontService(Service, Protocol):
    """A service for clients. It has pages, and it is serving only while the nodes that it needs are serving.

    `calls` holds the open calls, which the process counts; a drain waits until their statuses have been sent.
    """

    calls: OpenCalls

    def pages(self) -> FindPage:
        """Returns the page finder. Called once, on the event loop, before the service starts."""

    def follow_readiness(self, tell: Callable[[bool], None]) -> None:
        """Calls `tell` on the event loop, immediately and at every change; its argument says whether requests can be
        served.
        """


class ServiceProcess:
    """The process of a role, configured by its command line: `run` runs the service."""

    def __init__(self, role: str, sections: Mapping[str, type], argv: Sequence[str] | None = None) -> None:
        """`sections` are the settings of the role, including `SERVICE_SECTIONS`.

        An error on the command line ends the process with status 2 and one line on stderr. Raises: ConfigError if
        traces cannot be sent.
        """
        limit_heaps()
        guard_standard_streams()
        self.role = role
        self.sections = parse_role_arguments(role, sections, argv)
        self.config: ServerConfig = self.sections["server"]
        self.telemetry: TelemetryConfig = self.sections["telemetry"]
        configure_logging(self.telemetry, role=role)
        announce_uncaught_errors()
        self.security = PeerSecurity(self.sections["security"], on_refused=log_refused_files)  # between services
        self.tracer = make_tracer(self.telemetry, role=role)
        self._stopping = asyncio.Event()
        self._server: grpc.aio.Server | None = None  # kept alive: without a reference it would shut itself down

    def run(
        self, service: Service, *, client_tls: TlsConfig | None = None, authenticate: Authenticate | None = None
    ) -> Never:
        """Runs the service until a signal, then ends the process.

        The exit status is 0 after a drain, and 1 if the service could not start.

        `client_tls`, if enabled, replaces the cluster's TLS for clients. `authenticate` checks clients' tokens.

        An error is logged as one line. To be called from the main thread. Nothing is left to do after
        `Service.stop`, so the interpreter's own shutdown is skipped: with torch loaded it takes
        seconds, and it would wait for a weight load in a thread, which cannot be cancelled.

        The gRPC server is not shut down either: gRPC would end calls that it has accepted but not
        dispatched, and all calls that outlived the drain, with CANCELLED, as if their clients had
        cancelled them. If the process just ends, these calls fail with UNAVAILABLE.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_now(runner.run(self._run(service, client_tls or TlsConfig(), authenticate)))

    async def _run(self, service: Service, client_tls: TlsConfig, authenticate: Authenticate | None) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        calls = service.calls if isinstance(service, FrontService) else OpenCalls()
        server = self._server = make_server(self.config, self.security, authenticate, calls=calls)
        health = Health(service.service_names)
        await health.add_to(server)
        service.add_to(server)
        add_reflection(server, (*service.service_names, HEALTH_SERVICE))
        try:
            address = bind(server, self.config, self.security, role=self.role, client_tls=client_tls)
            await server.start()
            pages = service.pages() if isinstance(service, FrontService) else None
            metrics = serve_metrics(self.config, find_page=pages)
        except (OutriderError, OSError) as error:
            announce_failure("cannot listen", error)
            return 1
        metrics_address = None if metrics is None else host_port(self.config.host, metrics.server_port)
        where = {
            "role": self.role,
            "address": address,
            "metrics_address": metrics_address,
            "pid": os.getpid(),
            "drain_seconds": self.config.drain_seconds,
        }
        announce(**where)
        reachable = reachable_address(self.config.advertise_address, address)
        _log.info(
            "listening",
            address=address,
            reachable_address=reachable,
            metrics_address=metrics_address,
            version=__version__,
        )
        self._warn_if_exposed(client_tls, has_tokens=authenticate is not None)
        try:
            return await self._serve(service, health, where, reachable)
        finally:
            await self._stop(service)

    def _warn_if_exposed(self, tls: TlsConfig, *, has_tokens: bool) -> None:
        asks_for_certificates = tls.authority is not None if tls.is_enabled else self.security.is_enabled
        asks_for_tokens = has_tokens and tls.is_enabled  # plaintext exposes tokens to everyone
        warn_if_unauthenticated(
            self.config.host,
            what=f"this {self.role}",
            is_protected=asks_for_certificates or asks_for_tokens,
            fix="docs/security.md says how to turn on TLS and authentication",
        )

    async def _serve(self, service: Service, health: Health, where: Mapping[str, Any], reachable_address: str) -> int:
        started_at = time.monotonic()
        starting = asyncio.ensure_future(service.start(reachable_address))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=DRAIN_SLACK_SECONDS)
            return 0
        failure = starting.exception()
        if failure is not None:
            stopping.cancel()
            announce_failure("cannot start", failure)
            return 1
        if isinstance(service, FrontService):
            service.follow_readiness(health.set_ready)
        _release_memory()
        await health.set_serving(is_serving=True)
        described = {"version": __version__, **service.describe()}
        announce(serving=True, **{**described, **where})
        _log.info(
            "serving", address=where["address"], start_seconds=round(time.monotonic() - started_at, 3), **described
        )
        await stopping
        await health.set_serving(is_serving=False)
        _log.info("draining", drain_seconds=self.config.drain_seconds)
        try:
            async with asyncio.timeout(self.config.drain_seconds + DRAIN_SLACK_SECONDS):
                await asyncio.gather(service.drain(self.config.drain_seconds), asyncio.sleep(HANDOVER_SECONDS))
        except TimeoutError:
            _log.warning("drain took too long; running work is cut off")
        return 0

    async def _stop(self, service: Service) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await service.stop()
                await asyncio.to_thread(self.tracer.stop, TRACES_SECONDS)
        except TimeoutError:
            _log.warning("the stop took too long; the process exits anyway")
        _log.info("stopped")

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            _log.warning("second signal: ending at once", signal=signal.Signals(number).name)
            exit_now(128 + number)
        self._stopping.set()


def _release_memory() -> None:
    """Gives freed memory back to the system, and excludes the objects of the start from garbage collection.

    There are 350,000 such objects, including those of a model's libraries. A scan of them takes 0.2 s, during which all
    threads wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    trim_heap()


def make_server(
    config: ServerConfig,
    security: PeerSecurity = PLAINTEXT,
    authenticate: Authenticate | None = None,
    *,
    calls: OpenCalls | None = None,
) -> grpc.aio.Server:
    """Makes a server without services and ports; `RequestLimits` wraps every handler."""
    limits = RequestLimits(
        calls=OpenCalls() if calls is None else calls,
        max_calls=config.max_concurrent_rpcs,
        security=security,
        authenticate=authenticate,
    )
    return grpc.aio.server(
        options=server_options(max_connection_age_seconds=config.max_connection_age_seconds),
        interceptors=(limits,),
        maximum_concurrent_rpcs=2 * config.max_concurrent_rpcs + SPARE_CALLS,
    )


def bind(
    server: grpc.aio.Server,
    config: ServerConfig,
    security: PeerSecurity = PLAINTEXT,
    *,
    role: str,
    client_tls: TlsConfig | None = None,
) -> str:
    """Binds the configured port. Returns "host:port" as bound. Raises: ConfigError with advice on what to change."""
    credentials = _credentials(security, client_tls)
    wanted = config.port_of(role)
    advice = f"choose another with --set server.port=N or {environment_name('server.port')}"
    probe_port(config.host, wanted, advice)
    address = host_port(config.host, wanted)
    try:
        if credentials is not None:
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"port {wanted} on {config.host} cannot be bound ({error}); {advice}") from error
    return host_port(config.host, port)


def _credentials(security: PeerSecurity, client_tls: TlsConfig | None) -> grpc.ServerCredentials | None:
    """Returns the credentials of `client_tls` if enabled, else the cluster's; None: plaintext. Raises: ConfigError."""
    credentials = security.server_credentials()  # called in any case, so that unreadable files are an error
    if client_tls is None or not client_tls.is_enabled:
        return credentials
    return TlsFiles(client_tls, on_refused=log_refused_files).server_credentials()


def probe_port(host: str, port: int, advice: str) -> None:
    """Tries to bind a port, since gRPC would not report why binding fails. Raises: ConfigError with the reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        probe = socket.socket(family, kind, protocol)
    except socket.gaierror as error:
        raise ConfigError(f"host {host} is unknown here: {error.strerror}") from error
    except OSError as error:  # this machine lacks the address family
        raise ConfigError(f"host {host} cannot be bound: {error.strerror}; {_other_host(host)}") from error
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except PermissionError as error:
            raise ConfigError(f"port {port} on {host} is not permitted to this user; {advice}") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} on {host} is taken; {advice}") from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{host} is not an address of this machine; {_other_host(host)}") from error
            raise ConfigError(f"port {port} on {host} cannot be bound: {error.strerror}; {advice}") from error


def _other_host(host: str) -> str:
    other = "127.0.0.1" if ":" in host else "::1"
    return f"choose another with --set server.host=ADDRESS, such as {other}"


def serve_metrics(
    config: ServerConfig, *, registry: CollectorRegistry = REGISTRY, find_page: FindPage | None = None
) -> WSGIServer | None:
    """Serves Prometheus metrics over HTTP in a thread, if a port is set. Raises: ConfigError if the port is taken.

    `find_page` returns the pages at paths other than /metrics; without it, all paths lead to the metrics.

    The format is always Prometheus's text: for clients that ask for OpenMetrics, as Prometheus 2
    does, prometheus_client would turn the colons of names into underscores.
    """
    if config.metrics_port is None:
        return None
    try:
        server, _ = start_http_server(config.metrics_port, addr=config.host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics port {config.metrics_port} on {config.host} cannot be bound: {error.strerror}; "
            f"choose another with --set server.metrics_port=N"
        ) from error
    server.RequestHandlerClass = BoundedRequestHandler
    bound_connections(server)
    app: Any = server.get_app()

    def metrics(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        found: Iterable[bytes] = app({**environ, "HTTP_ACCEPT": TEXT_FORMAT}, respond)
        return found

    is_local = is_loopback(config.host)
    server.set_app(metrics if find_page is None else with_pages(metrics, find_page, is_local=is_local))
    return server
