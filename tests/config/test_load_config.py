from __future__ import annotations

import operator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.config.arguments import parse_role_arguments
from outrider.config.resolve import load_config
from outrider.config.settings import describe_settings, setting
from outrider.config.values import format_value
from outrider.errors import ConfigError
from outrider.service.config import ServerConfig, TelemetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=50052))
    max_running: int = setting(64, at_least=1, at_most=4096, help="Sequences in the running batch.")
    share: float = setting(0.2, at_least=0, at_most=0.95)
    targets: tuple[str, ...] = setting(())
    cpus: tuple[int, ...] = setting(())
    memory_bytes: int | None = setting(None, at_least=1)
    name: str = setting("")
    verbose: bool = setting(False)
    low: int = setting(1)
    high: int = setting(2)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


SECTIONS = {"telemetry": TelemetryConfig, "decode_node": DecodeConfig}


def load(*overrides: str, file: Path | None = None, **environ: str) -> DecodeConfig:
    return load_config(SECTIONS, file=file, environ=environ, overrides=overrides).sections["decode_node"]


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "outrider.yaml"
        path.write_text(text)
        return path

    return write_file


def test_later_sources_win(write):
    file = write("decode_node:\n  max_running: 8\n  share: 0.5\n  server: {port: 7, host: 0.0.0.0}\n")
    config = load(
        "decode_node.max_running=32",
        file=file,
        OUTRIDER_DECODE_NODE__SHARE="0.25",
        OUTRIDER_DECODE_NODE__MAX_RUNNING="16",
    )
    assert (config.max_running, config.share) == (32, 0.25)
    assert (config.server.port, config.server.host) == (7, "0.0.0.0")
    assert config.server.drain_seconds == ServerConfig().drain_seconds


def test_the_sources_of_what_is_set_are_known(write):
    file = write("decode_node:\n  max_running: 8\n")
    resolved = load_config(
        SECTIONS, file=file, environ={"OUTRIDER_DECODE_NODE__SERVER__PORT": "9"}, overrides=["decode_node.share=0.5"]
    )
    assert resolved.sources == {
        "decode_node.max_running": f"{file}:2",
        "decode_node.server.port": "environment variable OUTRIDER_DECODE_NODE__SERVER__PORT",
        "decode_node.share": "--set decode_node.share=0.5",
    }


def test_sections_of_other_roles_are_ignored(write):
    file = write("router:\n  whatever: 1\ncluster:\ndecode_node:\n")
    assert load("prefill_node.x=1", file=file, OUTRIDER_DRAFT_NODE__Y="2", OUTRIDER_CACHE_DIR="/x") == DecodeConfig()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("targets=a:1,b:2", ("a:1", "b:2")),
        ("targets=[a:1, b:2]", ("a:1", "b:2")),
        ("targets=", ()),
        ("targets=[::1]:1", ("[::1]:1",)),
        ("targets=[::1]:1, [fe80::1%eth0]:2,a:3", ("[::1]:1", "[fe80::1%eth0]:2", "a:3")),
        ("targets=[[::1]:1, '[::2]:1']", ("[::1]:1", "[::2]:1")),
        ('targets=["[::1]:1", "a:2"]', ("[::1]:1", "a:2")),
        ("targets=- '[::1]:1'\n- a:2", ("[::1]:1", "a:2")),
        ("server.host=::1", "::1"),
        ("cpus=0,1", (0, 1)),
        ("cpus=3", (3,)),
        ("cpus=[2, 4]", (2, 4)),
        ("memory_bytes=null", None),
        ("memory_bytes=12", 12),
        ("share=1e-3", 0.001),
        ("name=123", "123"),
        ("verbose=true", True),
        ("verbose=on", True),
        ("verbose=0", False),
        ("max_running=1e+03", 1000),
        ("max_running=4k", 4000),
        ("memory_bytes=2MiB", 2 << 20),
        ("memory_bytes=25.6k", 25_600),
    ],
)
def test_text_becomes_a_value_of_the_declared_type(override, value):
    key, _, text = override.partition("=")
    by_source = (
        load(f"decode_node.{override}"),
        load(**{f"OUTRIDER_DECODE_NODE__{key.upper().replace('.', '__')}": text}),
        load_config(SECTIONS, file=None, environ={}, defaults=[f"decode_node.{override}"]).sections["decode_node"],
    )
    assert [operator.attrgetter(key)(config) for config in by_source] == [value] * 3


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("max_running: '16'", "max_running", 16),
        ("max_running: 1_000", "max_running", 1000),
        ("max_running: !!int '8'", "max_running", 8),
        ("max_running: 1.024e+3", "max_running", 1024),
        ("memory_bytes: '4k'", "memory_bytes", 4000),
        ("memory_bytes: 1.5e6", "memory_bytes", 1_500_000),
        ("share: '0.5'", "share", 0.5),
        ("verbose: yes", "verbose", True),
        ("verbose: 'off'", "verbose", False),
        ("name: 0123", "name", "0123"),
        ("name: 1.10", "name", "1.10"),
        ("name: off", "name", "off"),
        ("name: 2026-11-26", "name", "2026-11-26"),
        ("targets: ['[::1]:1', a:2]", "targets", ("[::1]:1", "a:2")),
        ("targets: '[::1]:1,a:2'", "targets", ("[::1]:1", "a:2")),
        ("targets: a:2", "targets", ("a:2",)),
        ("cpus: ['0', 1]", "cpus", (0, 1)),
        ("server.host: ::1", "server.host", "::1"),
    ],
)
def test_a_value_in_a_file_is_read_by_the_type_of_its_setting(write, text, key, value):
    assert operator.attrgetter(key)(load(file=write(f"\ufeffdecode_node:\r\n  {text}\r\n"))) == value


def test_anchors_merge_keys_and_empty_documents_are_read_as_pyyaml_does(write):
    text = """---
x-shared: &shared {verbose: yes}
.more: 1
telemetry: &one {log_level: debug, log_text: true}
decode_node:
  <<: [{max_running: 3, name: a}, {name: b, low: 0}, *shared]
  max_running: 4
  verbose: no
  server: &server {port: 7}
---
"""
    config = load(file=write(text))
    assert (config.max_running, config.name, config.low, config.server.port, config.verbose) == (4, "a", 0, 7, False)
    with pytest.raises(ConfigError, match=r":4: decode_node.low is already set in line 3"):
        load(file=write("decode_node:\n  <<: {name: a}\n  low: 0\n  low: 1\n"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode_node.max_runing=3", "unknown key decode_node.max_runing; the nearest is decode_node.max_running"),
        ("decode_node.server.prt=3", "the nearest is decode_node.server.port"),
        ("decode_nodes.max_running=3", "unknown key decode_nodes; the nearest is decode_node"),
        ("decode_node.name.x=3", "unknown key decode_node.name.x; decode_node.name has no settings of its own"),
        (
            "decode_node.max_running=0",
            "decode_node.max_running = 0 is out of range: must be at least 1 and at most 4096",
        ),
        ("decode_node.share=1", "must be at least 0 and at most 0.95"),
        ("decode_node.share=.nan", "out of range"),
        ("decode_node.max_running=many", "is not of type int"),
        ("decode_node.max_running=true", "is not of type int"),
        ("decode_node.cpus=0,one", "decode_node.cpus = [0, 'one'] is not of type tuple"),
        ("decode_node.max_running=[", "not a value"),
        ("decode_node.share=2026-03-32", "not a value: '2026-03-32'"),
        ("decode_node.server=3", "decode_node.server is a group of settings; name one of them"),
        ("decode_node.low=3", "low 3 is above high 2"),
        ("telemetry.log_level=loud", "must be one of debug, info, warning, error"),
        ("decode_node.max_running", "expected KEY=VALUE"),
    ],
)
def test_a_mistake_names_its_source_and_the_way_out(override, message):
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert str(raised.value).startswith(f"--set {override}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "decode_node:\n  max_runing: 3\n",
            ":2: unknown key decode_node.max_runing; the nearest is decode_node.max_running",
        ),
        (
            "decode_node: {keep_features: /x}\n",
            "keep_features is not a setting any more: it is decode_node.keep_answers",
        ),
        ("decode_node:\n\n  share: 2\n", ":3: decode_node.share = 2 is out of range"),
        ("decode_node: 3\n", ":1: decode_node is a group of settings, not 3"),
        ("- 1\n", ":1: settings are needed, each as NAME: VALUE"),
        ("a: [\n", "not YAML"),
        ("\x01", "not YAML"),
        ("decode_node:\n  share: 0.5\n  share: 0.6\n", ":3: decode_node.share is already set in line 2"),
        ("decode_node:\n  share: 2026-03-32\n", ":2: decode_node.share is not a value: day is out of range for month"),
        ("decode_node: {}\ndecode_node: {}\n", ":2: decode_node is already set in line 1"),
        ("decode_node.share: 0.5\ndecode_node:\n  share: 0.6\n", ":3: decode_node.share is already set in line 1"),
        ("nonsense:\n  a: 1\n", ":1: unknown key nonsense"),
        ("decode_node: {}\n---\ntelemetry: {}\n", ":3: a second document begins: keep one"),
        ("decode_node:\n\tshare: 0.5\n", ":2: not YAML: found character '\\t' that cannot start any token; use spaces"),
        ("decode_node:\n  targets: [::1]:7002\n", '; put an IPv6 address in quotes: "[::1]:50051"'),
        ("decode_node:\n  targets: [[::1]:7002]\n", '; put an IPv6 address in quotes: "[::1]:50051"'),
        ("decode_node:\n  name:\ta\n", "; use spaces, not tabs"),
        ("yes: 1\n", ":1: unknown key yes"),
        ("? [a]\n: 1\n", ":1: a group or list cannot be a key"),
        ("decode_node:\n  name: {{ .Values.name }}\n", ":2: a group or list cannot be a key; render a template first"),
        ("{{- if .Values.name }}\ndecode_node: {}\n", "; render a template first"),
        ("decode_node: {name: {{ tpl .Values.x . }}}\n", "; render a template first"),
        ("max-num-seqs: 3\n", "; give a file of another server to --extra-engine-args"),
        ("decode_node:\n  name: a-${NAME:-b}\n", ":2: decode_node.name = a-${NAME:-b} must be filled in first"),
        (
            "decode_node:\n  name: '{{ .Values.name }}'\n",
            ":2: decode_node.name = {{ .Values.name }} must be filled in",
        ),
        ("decode_node:\n  name: $(NAME)\n", ":2: decode_node.name = $(NAME) must be filled in first"),
        ("decode_node:\n  name: $NAME/x\n", ":2: decode_node.name = $NAME/x must be filled in first"),
        (
            "decode_node:\n  targets: [a:1, '${HOST}:1']\n",
            ":2: decode_node.targets = ${HOST}:1 must be filled in first",
        ),
        ("modelArtifacts: {uri: x}\n", "this is a file of values of a Helm chart"),
        ("services:\n  router: {}\n", ":2: services: this is a Compose file: give the server's own file"),
        ("settings: {decode_node: {}}\n", "this is a file of values of a Helm chart"),
    ],
)
def test_a_mistake_in_a_file_is_found_by_its_line(write, text, message):
    with pytest.raises(ConfigError) as raised:
        load(file=write(text))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mistake_over_several_fields_names_the_source_of_those_it_is_about():
    with pytest.raises(ConfigError, match=r"^--set decode_node.low=3: decode_node: low 3 is above high 2"):
        load("decode_node.low=3", "decode_node.max_running=5", "decode_node.share=0.5")


def test_a_mistake_in_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match=r"environment variable OUTRIDER_DECODE_NODE__SHARE: decode_node\.share = 7"):
        load(OUTRIDER_DECODE_NODE__SHARE="7")
    with pytest.raises(ConfigError, match="environment variable OUTRIDER_DECOD_NODE__SHARE: unknown key decod_node"):
        load(OUTRIDER_DECOD_NODE__SHARE="7")
    with pytest.raises(
        ConfigError, match=r"OUTRIDER_DECODE_NODE_SHARE is not .* nearest is OUTRIDER_DECODE_NODE__SHARE"
    ):
        load(OUTRIDER_DECODE_NODE_SHARE="7")


def test_what_kubernetes_sets_for_services_is_no_setting():
    ports = {"DECODE_NODE_PORT": "tcp://10.0.0.1:1", "DECODE_NODE_PORT_50051_TCP_ADDR": "10.0.0.1"}
    services = {"DECODE_NODE_SERVICE_HOST": "10.0.0.1", "DECODE_NODE_SERVICE_PORT_GRPC": "1", **ports}
    environ = {f"OUTRIDER_{name}": value for name, value in services.items()}
    assert load_config(SECTIONS, file=None, environ=environ).warnings == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("OUTRIDER_PORT", "OUTRIDER_DECODE_NODE__SERVER__PORT"),
        ("OUTRIDER_LOG_LEVEL", "OUTRIDER_TELEMETRY__LOG_LEVEL"),
        ("OUTRIDER_CACHE_DIRECTORY", "OUTRIDER_CACHE_DIR"),
        ("OUTRIDER_CONFG", "OUTRIDER_CONFIG"),
    ],
)
def test_a_variable_that_is_no_setting_is_warned_of_with_the_nearest(name, nearest):
    resolved = load_config(
        SECTIONS,
        file=None,
        environ={name: "x", "OUTRIDER_TARGET": "h:1", "OUTRIDER_ROUTER_PORT": "1", "OUTRIDERS": "y"},
    )
    assert resolved.warnings == [f"environment variable {name} is not a setting; the nearest is {nearest}"]


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(file=tmp_path / "none.yaml")


def test_help_shows_every_key_with_default_range_and_document(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_role_arguments("decode_node", SECTIONS, ["--help"], environ={})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {info.key} = " in shown for info in describe_settings(SECTIONS))
    assert "decode_node.max_running = 64  (int, at least 1 and at most 4096)\n      Sequences in the running" in shown


def test_a_role_says_a_mistake_in_one_line_and_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_role_arguments("decode_node", SECTIONS, ["--set", "decode_node.share=9"], environ={})
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_role_reads_the_file_that_its_environment_names(write):
    file = write("decode_node: {max_running: 5}\n")
    sections = parse_role_arguments("decode_node", SECTIONS, [], environ={"OUTRIDER_CONFIG": str(file)})
    assert sections["decode_node"].max_running == 5


def test_the_password_of_a_url_is_not_shown():
    resolved = load_config(SECTIONS, file=None, environ={}, overrides=["decode_node.name=valkey://me:s3c@ret@h:1/0"])
    assert resolved.sections["decode_node"].name == "valkey://me:s3c@ret@h:1/0"
    shown = f"{format_value(resolved.sections['decode_node'].name)} {resolved.sources}"
    assert shown == "valkey://me:…@h:1/0 {'decode_node.name': '--set decode_node.name=valkey://me:…@h:1/0'}"
    assert format_value(["http://h:1/x", "a@b"]) == "['http://h:1/x', a@b]"
