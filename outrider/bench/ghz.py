"""ghz's config files and reports: the same load, sent by a client that sees tokens.

ghz (https://ghz.sh) counts calls; it cannot see a first token, a gap between tokens or an
acceptance. `outrider bench --ghz CONFIG` sends what `ghz --config CONFIG` sends, so that
both can stand in one table.
"""

from __future__ import annotations

import difflib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from outrider.bench.measure import Percentiles
from outrider.bench.prompts import AnswerOptions, Metadata
from outrider.errors import InvalidRequestError
from outrider.rpc.credentials import TlsConfig
from outrider.v1 import router_pb2

CALLS = ("outrider.v1.RouterService.Generate", "outrider.v1.RouterService.Complete")

_READ = {
    *("host", "insecure", "cacert", "cert", "key", "call", "data", "data-file", "metadata", "metadata-file"),
    *("total", "concurrency", "timeout"),
}
_LEFT_TO_GHZ = {  # how ghz reports, finds the messages and connects
    *("name", "tags", "output", "format", "debug", "cpus", "count-errors", "proto", "protoset", "import-paths"),
    *("reflect-metadata", "connections", "connect-timeout", "keepalive", "max-recv-message-size"),
    "max-send-message-size",
}
_NOT_SUPPORTED = {
    *("rps", "async", "duration", "duration-stop", "max-duration", "skipFirst", "skipTLS", "cname", "authority"),
    *("binary-file", "stream-interval", "stream-call-duration", "stream-call-count", "stream-dynamic-messages"),
    *("enable-compression", "lb-strategy", "disable-template-functions", "disable-template-data"),
    *("load-schedule", "load-start", "load-end", "load-step", "load-step-duration", "load-max-duration"),
    *("concurrency-schedule", "concurrency-start", "concurrency-end", "concurrency-step"),
    *("concurrency-step-duration", "concurrency-max-duration"),
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_ACTION = re.compile(r"\{\{\s*(.*?)\s*\}\}")
_ACTIONS: Mapping[str, Callable[[int], str]] = {
    ".RequestNumber": str,
    ".TimestampUnix": lambda _: str(int(time.time())),
    ".UUID": lambda _: str(uuid.uuid4()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GhzRequest:
    """The number-th call of a run, from 0. Templates are filled when it is sent, as ghz does."""

    id: str
    kind: str
    number: int
    template: str  # JSON of a GenerateRequest
    metadata_template: str  # JSON of an object of strings

    def salted(self, salt: str) -> GhzRequest:
        """Itself: what makes prompts new is in the template, so that ghz and bench send the same."""
        return self

    def to_message(
        self, options: AnswerOptions, *, index: int, speculation: bool
    ) -> tuple[router_pb2.GenerateRequest, Metadata]:
        """As the config says; only speculation can be turned off."""
        message = router_pb2.GenerateRequest()
        json_format.Parse(fill_in(self.template, self.number), message)
        if not speculation:
            message.speculation.enabled = False
        return message, tuple(json.loads(fill_in(self.metadata_template, self.number)).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GhzConfig:
    """What a config says of the load. Its requests are JSON templates, used in turn."""

    path: str
    call: str  # one of CALLS
    host: str  # empty: not said
    total: int
    concurrency: int
    timeout_seconds: float
    templates: tuple[str, ...]
    metadata_template: str
    tls: TlsConfig | None

    def describe(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "ghz": self.path,
            "call": self.call,
            "total": self.total,
            "concurrency": self.concurrency,
            "timeout_seconds": self.timeout_seconds,
        }

    def requests(self) -> tuple[GhzRequest, ...]:
        """All calls of a run, in ghz's order."""
        return tuple(
            GhzRequest(
                id=f"{number}",
                kind=self.call.rpartition(".")[2],
                number=number,
                template=self.templates[number % len(self.templates)],
                metadata_template=self.metadata_template,
            )
            for number in range(self.total)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GhzReport:
    """What ghz has seen of a run."""

    num_requests: int
    num_errors: int
    requests_per_second: float
    e2e_seconds: Percentiles | None  # of the calls without error


def load_ghz_config(path: Path) -> GhzConfig:
    """Paths in it are taken from the current directory, as ghz takes them.

    Raises: InvalidRequestError naming the file, the field and the fix.
    """
    config = _Fields(path)
    config.check_names()
    call = config.text("call").replace("/", ".")
    if call not in CALLS:
        raise config.error("call", f"{call!r} is not one of {', '.join(CALLS)}")
    templates = _read_templates(config)
    metadata_template = _read_metadata(config)
    for index, template in enumerate(templates):
        _check_template(config, template, index)
    return GhzConfig(
        path=str(path),
        call=call,
        host=config.text("host", ""),
        total=config.count("total", 200),
        concurrency=config.count("concurrency", 50),
        timeout_seconds=config.duration("timeout", "20s"),
        templates=templates,
        metadata_template=metadata_template,
        tls=_read_tls(config),
    )


def load_ghz_report(path: Path) -> GhzReport:
    """The file that `ghz --format json --output FILE` writes. Raises: InvalidRequestError naming it."""
    value = _read_json(path, field="ghz_report")
    try:
        shares = {entry["percentage"]: entry["latency"] / 1e9 for entry in value["latencyDistribution"] or ()}
        return GhzReport(
            num_requests=int(value["count"]),
            num_errors=sum((value["errorDistribution"] or {}).values()),
            requests_per_second=float(value["rps"]),
            e2e_seconds=Percentiles(p50=shares[50], p90=shares[90], p99=shares[99]) if shares else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} is no report of ghz ({error!r}); write one with ghz --format json --output {path}",
            field="ghz_report",
        ) from error


def fill_in(template: str, number: int) -> str:
    """Replaces ghz's template actions. Raises: InvalidRequestError for one that is not known here."""

    def replace(found: re.Match[str]) -> str:
        action = _ACTIONS.get(found[1])
        if action is None:
            raise InvalidRequestError(
                f"bench cannot fill in {found[0]}; it knows {', '.join(f'{{{{{name}}}}}' for name in _ACTIONS)}",
                field="data",
            )
        return action(number)

    return _ACTION.sub(replace, template)


class _Fields:
    """A config's fields, each checked where it is read. Every error names the file and the field."""

    def __init__(self, path: Path) -> None:
        self._path = path
        value = _read_json(path, field="ghz")
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{path}: a config is a JSON object", field="ghz")
        self.values: dict[str, Any] = value

    def error(self, name: str, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._path}: {name}: {problem}", field=name)

    def check_names(self) -> None:
        """Refuses what ghz itself would take without a word, or bench cannot do."""
        known = _READ | _LEFT_TO_GHZ | _NOT_SUPPORTED
        for name in self.values:
            if name in _NOT_SUPPORTED:
                raise self.error(name, "bench cannot drive that as ghz does; leave it out of the config")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean {near[0]!r}?" if near else "see ghz --help"
                raise self.error(name, f"no such setting of ghz; {advice}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "is missing" if value is None else f"needs text, not {json.dumps(value)}")
        return value

    def count(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"needs a whole number, at least 1, not {json.dumps(value)}")
        return value

    def duration(self, name: str, default: str) -> float:
        """Seconds, from Go's way of writing them."""
        text = self.text(name, default)
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise self.error(name, f"needs a duration such as '90s' or '2m30s', not {text!r}")
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)

    def file(self, name: str) -> Path | None:
        """None when it is not named. Raises: InvalidRequestError when it is not there."""
        text = self.text(name, "")
        if not text:
            return None
        path = Path(text)
        if not path.is_file():
            raise self.error(name, f"no file {text!r} in {Path.cwd()}; ghz takes paths from the current directory")
        return path


def _read_templates(config: _Fields) -> tuple[str, ...]:
    file = config.file("data-file")
    name = "data" if file is None else "data-file"
    data = config.values.get("data") if file is None else _read_json(file, field=name)
    requests = data if isinstance(data, list) else [data]
    if not requests or not all(isinstance(request, dict) for request in requests):
        where = name if file is None else f"{name} {file}"
        raise config.error(where, "needs a request as a JSON object, or a list of them that is not empty")
    return tuple(json.dumps(request, ensure_ascii=False) for request in requests)


def _read_metadata(config: _Fields) -> str:
    file = config.file("metadata-file")
    metadata = config.values.get("metadata", {}) if file is None else _read_json(file, field="metadata-file")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise config.error("metadata", "needs a JSON object of texts")
    template = json.dumps({name.lower(): value for name, value in metadata.items()})
    try:
        fill_in(template, 0)
    except InvalidRequestError as error:
        raise config.error("metadata", error.message) from error
    return template


def _check_template(config: _Fields, template: str, index: int) -> None:
    try:
        json_format.Parse(fill_in(template, 0), router_pb2.GenerateRequest())
    except (json_format.ParseError, InvalidRequestError) as error:
        raise config.error(f"data[{index}]", " ".join(str(error).split())) from error


def _read_tls(config: _Fields) -> TlsConfig | None:
    if config.values.get("insecure", False):
        return None
    try:
        return TlsConfig(
            authority=config.file("cacert"), certificate=config.file("cert"), private_key=config.file("key")
        )
    except ValueError as error:
        raise config.error("cert", str(error)) from error


def _read_json(path: Path, *, field: str) -> Any:
    """Raises: InvalidRequestError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", field=field) from error
    except ValueError as error:
        raise InvalidRequestError(f"{path}: not JSON ({error})", field=field) from error
