"""`docker compose up` from a clone with nothing prepared: one cluster, from its first start to its end."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest

from outrider.errors import PeerLostError
from tests.compose.project import ROLES, Project, docker
from tests.compose.story import PROMPT, begun_story, unseen

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

IMAGE_BYTES = 1.6e9
DOWN_SECONDS = 10.0
NUM_STORIES = 8


@pytest.fixture(scope="module")
def up(image, tmp_path_factory):
    with Project(tmp_path_factory.mktemp("up")) as project:
        project.up()
        yield project


# ---------------------------------------------------------------- the image and the first start


def test_the_image_is_small_and_brings_a_head_but_no_compiler_no_model_and_no_root(image):
    (described,) = json.loads(docker("image", "inspect", image))
    assert described["Size"] < IMAGE_BYTES
    assert described["Config"]["User"] not in ("", "0", "root")
    look = "command -v g++ gcc cc c++ clang; find / -xdev '(' -name '*.gguf' -o -name '*.safetensors' ')' 2>/dev/null"
    (found,) = docker("run", "--rm", image, "sh", "-c", f"{look}; true").splitlines()
    assert found.endswith("/outrider/heads/smollm2-135m-eagle3/model.safetensors")


def test_a_memory_limit_of_a_container_is_what_a_node_takes_its_share_of(image):
    script = "from outrider.engine.memory import free_main_memory_bytes as free; print(free())"
    limit = 600 * 2**20
    assert 0 < int(docker("run", "--rm", "--memory", str(limit), image, "python", "-c", script)) < limit


def test_native_kernels_are_in_the_image(image):
    script = "from outrider.engine.cpu_kernels.paths import choose_kernels; print(choose_kernels().library)"
    assert ".so" in docker("run", "--rm", image, "python", "-c", script)


def test_the_model_is_fetched_once_in_sight_and_the_others_wait(up):
    lines = up.logs("model").splitlines()
    assert sum("download …" in line for line in lines) == 1
    assert any("download 88.6/88.6 MiB" in line for line in lines)
    assert any("convert 3/3" in line for line in lines)
    (fetched,) = up.inspect("model", is_running=False)
    assert fetched["State"]["ExitCode"] == 0
    ended = datetime.fromisoformat(fetched["State"]["FinishedAt"])
    starts = {role: datetime.fromisoformat(up.inspect(role)[0]["State"]["StartedAt"]) for role in ROLES}
    assert all(ended <= started for started in starts.values())
    assert starts["router"] == max(starts.values())


@pytest.mark.parametrize("role", ROLES)
def test_a_container_is_healthy_unprivileged_and_reads_only(up, role):
    (container,) = up.inspect(role)
    assert container["State"]["Health"]["Status"] == "healthy"
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    assert up.exec(role, "id", "-u").stdout.strip() == "10001"
    written = up.exec(role, "sh", "-c", "echo > /usr/local/x", is_checked=False)
    assert "Read-only file system" in written.stderr
    up.exec(role, "sh", "-c", "echo > /tmp/x && rm /tmp/x")


def test_nodes_take_turns_in_memory_that_they_share(up):
    look = "stat -c '%n %s %d:%i' /run/outrider/*; grep -l /run/outrider/ /proc/[0-9]*/maps"
    found = {
        role: up.exec(role, "sh", "-c", f"{{ {look}; }} 2>/dev/null").stdout for role in ("prefill_node", "decode_node")
    }
    files = {role: text.splitlines()[0] for role, text in found.items()}
    assert files["prefill_node"] == files["decode_node"]
    assert files["decode_node"].startswith("/run/outrider/turns-")
    assert all("/maps" in text for text in found.values())


def test_a_request_is_answered_from_outside_as_soon_as_up_returns(up):
    result = up.answer(unseen())
    assert result.text
    assert {name.partition("@")[0] for name in result.summary.metrics.nodes} == {"prefill", "decode"}


# ---------------------------------------------------------------- the command in the image


def test_generate_in_the_image(up):
    shown = up.exec("router", "outrider", "generate", PROMPT, "--max-tokens", "8", "--temperature", "0", "--stats")
    assert shown.stdout.strip()
    assert "8 tokens" in shown.stderr


def test_bench_in_the_image(up):
    limits = ("--limit", "4", "--max-tokens", "8", "--concurrency", "2")
    shown = up.exec("router", "outrider", "bench", "load", *limits, timeout=600)
    assert "smollm2-135m-instruct" in shown.stdout


def test_kv_goes_over_grpc_where_containers_share_no_memory(up):
    (prefill,) = up.containers("prefill_node")
    samples = up.metrics(prefill)
    moved = {name: value for name, value in samples.items() if name.startswith("outrider:kv_transfer_bytes_total")}
    (name,) = moved
    assert 'connector="grpc"' in name
    assert moved[name] > 0


# ---------------------------------------------------------------- a second start, and the end


def test_up_again_fetches_nothing(up):
    began = datetime.now().astimezone().isoformat()
    up.up()
    said = docker("logs", "--since", began, up.containers("model", is_running=False)[0], is_stderr=True)
    assert "check" in said
    assert "download" not in said


def test_down_tells_running_requests_and_every_container_ends_well_in_time(up):
    stories = [begun_story(up.target) for _ in range(NUM_STORIES)]
    began = time.monotonic()
    up.run("stop")  # like `down`, but stopped containers can still be inspected
    took = time.monotonic() - began
    for story in stories:
        told = story.wait(timeout_seconds=5)
        assert isinstance(told, PeerLostError)
        assert told.message == "the router is stopping"
    assert {role: state["ExitCode"] for role, state in up.states().items()} == dict.fromkeys(ROLES, 0)
    assert took < DOWN_SECONDS
    for role in ROLES:
        assert [event["event"] for event in up.logs(role, is_json=True)][-1] == "stopped"
