"""Agreement of the files for Docker Compose; `make compose-test` runs them."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pytest
import yaml

from decode_node.config import DecodeNodeConfig
from outrider import __version__
from outrider.cli import probe
from outrider.cli.config import ROLES, sections_of
from outrider.cli.connection import read_tls
from outrider.config.resolve import load_config
from outrider.engine.memory import GPU_SHARE
from outrider.rpc.tls import SecurityConfig
from outrider.service.server import DRAIN_SLACK_SECONDS, STOP_SECONDS
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "deploy" / "outrider.yaml"
DOWN_SECONDS = 10.0
"""Seconds within which `docker compose down` must end."""
IDLE_NODE_SECONDS = 2.0
"""Seconds within which a node without a router and without requests ends."""
RESOLVE_SECONDS = 2.0
"""Seconds between two lookups of a name, at most, according to docs/deploy.md."""
END_SECONDS = DRAIN_SLACK_SECONDS + STOP_SECONDS
"""Seconds that a process takes to end after its drain, at most."""


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config():
    return load_config(sections_of(None), file=SETTINGS, environ={}).sections


def server_of(compose, role):
    """Returns a container's server settings: those of the file, overridden by the variables of its service."""
    environ = {
        name: str(value)
        for name, value in compose["services"][role].get("environment", {}).items()
        if name.startswith("OUTRIDER_SERVER__")
    }
    return load_config(sections_of(role), file=SETTINGS, environ=environ).sections["server"]


def seconds(text):
    assert text.endswith("s")
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("role", ROLES)
def test_a_role_runs_as_little_as_it_can(compose, role):
    service = compose["services"][role]
    assert service["command"] == ["python", "-P", "-m", role]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"] == ["CMD", "outrider", "probe"]


def test_nodes_that_share_a_gpu_share_its_memory():
    """This holds with a draft model, too. Each node uses only its own share, so nodes may start in any order."""
    gpu = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    shares = []
    for role in ("prefill_node", "decode_node", "draft_node"):
        (device,) = gpu[role]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [f"${{{role.removesuffix('_node').upper()}_GPU:-0}}"]
        memory = re.fullmatch(r"\$\{\w+_MEMORY:-(\d+%)\}", gpu[role]["environment"]["OUTRIDER_KV_CACHE__MEMORY"])
        settings = load_config(sections_of(None), file=SETTINGS, environ={"OUTRIDER_KV_CACHE__MEMORY": memory[1]})
        shares.append(settings.sections["kv_cache"].size[1])
    assert sum(shares) <= GPU_SHARE


@pytest.mark.parametrize("role", ["prefill_node", "decode_node", "draft_node"])
def test_nodes_share_what_they_compile_and_the_locks_of_gpus(compose, role):
    """Compiled kernels and locks are in the volume `models`."""
    environ = dict(re.findall(r"(\w+_DIR)=(\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8")))
    volumes = compose["services"][role].get("volumes", compose["x-outrider"]["volumes"])
    (folder,) = [volume.split(":")[1] for volume in volumes if volume.startswith("models:")]
    for name in ("OUTRIDER_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert environ[name].startswith(f"{folder}/")


def test_an_image_for_gpus_has_the_compiler_that_triton_calls():
    """Triton compiles C code on the machine where it runs."""
    runtime = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition("FROM dependencies AS runtime")[2]
    condition, _, install = runtime.partition('if [ "$TORCH_BUILD" = cuda ]')
    assert "ARG TORCH_BUILD" in condition  # each stage declares its own
    assert "gcc libc6-dev" in install


def test_nodes_take_turns_through_a_volume_that_they_share(compose, config):
    folder = config["model"].turns_file.rpartition("/")[0]
    for role in ("prefill_node", "decode_node"):
        assert f"turns:{folder}" in compose["services"][role]["volumes"]
    assert compose["volumes"]["turns"]["driver_opts"]["type"] == "tmpfs"


@pytest.mark.parametrize("service", ["router", "router_2", "openai", "prometheus", "grafana"])
def test_ports_are_published_on_loopback_only(compose, service):
    assert all(port.startswith("127.0.0.1:") for port in compose["services"][service]["ports"])


def test_nobody_else_publishes_a_port(compose):
    published = {name for name, service in compose["services"].items() if "ports" in service}
    assert published == {"router", "router_2", "openai", "prometheus", "grafana"}


def test_kv_and_drafts_have_a_network_of_their_own(compose):
    assert compose["networks"]["nodes"] == {"internal": True}
    members = {name: list(service.get("networks", ["default"])) for name, service in compose["services"].items()}
    nodes = {"prefill_node", "decode_node", "draft_node"}
    assert {name for name, networks in members.items() if networks == ["nodes"]} == nodes
    assert {name for name, networks in members.items() if "nodes" in networks} - nodes == {
        *("router", "router_2"),
        "prometheus",  # reads every node's metrics
    }


def test_with_tls_every_service_has_the_files_and_its_health_check_shows_them(compose):
    secured = yaml.safe_load((ROOT / "compose.tls.yaml").read_text(encoding="utf-8"))["services"]
    ours = {name for name, service in compose["services"].items() if "env_file" in service}
    assert set(secured) == ours - {"model", "openai"}  # the gateway speaks no TLS
    for service in secured.values():
        settings = load_config({"security": SecurityConfig}, file=None, environ=service["environment"])
        security = settings.sections["security"]
        parser = argparse.ArgumentParser()
        probe.add_arguments(parser)
        command = service["healthcheck"]["test"]
        arguments = parser.parse_args(command[3:])
        assert command[:3] == ["CMD", "outrider", "probe"]
        assert (read_tls(arguments), arguments.server_name) == (security.tls, security.peer_name)
        (mount,) = service["volumes"]
        assert all(str(path).startswith(f"{mount.split(':')[-2]}/") for path in (security.tls.certificate,))


SECRETS = {
    "HF_TOKEN": {"model"},
    "PIP_INDEX_URL": {"model"},
    "PIP_EXTRA_INDEX_URL": {"model"},
    "OUTRIDER_STORE_PASSWORD": {"router", "router_2"},
}


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_reaches_only_who_uses_it(compose, secret):
    ours = {name: service for name, service in compose["services"].items() if "env_file" in service}
    assert set(ROLES) < set(ours)
    values = {name: service["environment"][secret] for name, service in ours.items()}
    assert {name for name, value in values.items() if value is None} == SECRETS[secret]  # None: the user's value
    assert {value for value in values.values() if value is not None} == {""}  # overrides the value in .env


@pytest.mark.parametrize("role", ROLES)
def test_a_container_is_killed_only_after_its_drain(compose, role):
    drain = server_of(compose, role).drain_seconds
    assert seconds(compose["services"][role]["stop_grace_period"]) >= drain + END_SECONDS


def test_a_cluster_can_be_down_in_time(compose):
    """The router ends first; then the nodes have nothing left to wait for."""
    router = compose["services"]["router"]
    assert set(router["depends_on"]) == set(ROLES) - {"router"}
    assert server_of(compose, "router").drain_seconds + END_SECONDS + IDLE_NODE_SECONDS < DOWN_SECONDS


@pytest.mark.parametrize("role", ROLES)
def test_every_role_listens_where_the_others_look_for_it(compose, config, role):
    server = server_of(compose, role)
    assert server.host == "0.0.0.0"
    targets = [*config["router"].prefill_targets, *config["router"].decode_targets, *config["router"].draft_targets]
    if role == "router":
        (port,) = compose["services"]["router"]["ports"]
        assert port.endswith(f":{server.port}")
    else:
        assert f"{role}:{server.port}" in targets
    assert config["decode_node"].draft_targets == config["router"].draft_targets


def test_the_gateway_asks_the_router_and_stops_beside_it(compose, config):
    gateway = compose["services"]["openai"]
    assert config["gateway"].router_targets == (f"router:{config['server'].port}",)
    assert "depends_on" not in gateway
    environ = gateway["environment"]
    drain = float(environ["OUTRIDER_SERVER__DRAIN_SECONDS"])
    assert drain == server_of(compose, "router").drain_seconds
    assert seconds(gateway["stop_grace_period"]) > math.ceil(drain)  # the gateway drains for whole seconds
    (port,) = gateway["ports"]
    assert port.endswith(f":{environ['OUTRIDER_SERVER__PORT']}")
    assert f":{environ['OUTRIDER_SERVER__PORT']}/readiness" in gateway["healthcheck"]["test"][-1]


@pytest.mark.parametrize("kind", [RouterConfig, DecodeNodeConfig])
def test_whoever_has_targets_finds_new_containers_within_seconds(kind):
    assert kind().resolve_interval_seconds <= RESOLVE_SECONDS


def test_prometheus_scrapes_every_role_on_its_port(config):
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = prometheus["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == set(ROLES)
    assert config["server"].metrics_port == found["port"]


def test_what_is_mounted_is_there(compose):
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    sources += [item["file"] for item in compose["configs"].values()]
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_build_context_has_what_the_wheel_is_made_of():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "outrider", *ROLES} == set(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_build_takes_no_argument_that_could_hold_a_credential(compose):
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    arguments = {line.split()[1].partition("=")[0] for line in lines if line.startswith("ARG ")}
    assert arguments == {"PYTHON_IMAGE", "TORCH_BUILD", "REVISION"}  # none is a URL
    assert set(compose["services"]["model"]["build"]["args"]) <= arguments


def test_the_image_is_labelled_with_this_version():
    assert f'org.opencontainers.image.version="{__version__}"' in (ROOT / "Dockerfile").read_text(encoding="utf-8")
