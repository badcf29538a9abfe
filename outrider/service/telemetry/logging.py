"""Structured logs: one line per event, as JSON or text, on stderr.

Events are short fixed phrases; everything variable is a field:

    log = get_logger("decode_node")
    log.info("sequence group opened", request_id=request_id, num_prompt_tokens=240)

The text of prompts and answers goes into the field `text`, which is dropped unless `telemetry.log_text` is on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from outrider.lossy_stream import LossyStream
from outrider.service.config import TelemetryConfig

TEXT_FIELD = "text"


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger whose events carry `component=name`. Bind `request_id` if there is one."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def configure_logging(config: TelemetryConfig, *, role: str, stream: TextIO | None = None) -> None:
    """Configures the process's log output; every event carries `role`. The composition root calls it once.

    Warnings and errors of the standard library's loggers (those of grpc and other libraries) go to the same output.
    After `guard_standard_streams` a logger neither blocks nor raises; lost lines are reported when the stream recovers.
    """
    stream = sys.stderr if stream is None else stream
    if isinstance(stream, LossyStream):
        stream.on_lost = lambda number: get_logger("logging").warning("log lines were lost", num_lines=number)
    as_json = config.log_format == "json" or (config.log_format == "auto" and not stream.isatty())
    level = logging.getLevelNamesMapping()[config.log_level.upper()]

    def add_role(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("role", role)
        return event

    def guard_text(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if not config.log_text:
            event.pop(TEXT_FIELD, None)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_role,
        guard_text,
    ]
    without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # locals may contain prompts
    last: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(without_locals), _order, structlog.processors.JSONRenderer()]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[drop_meta, *last], foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))


def _order(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Moves the fields that every line has to the front, which makes lines easier to read."""
    first = ("timestamp", "level", "role", "component", "event")
    return {key: event[key] for key in first if key in event} | dict(event)
