"""`docker compose up` from a clone with nothing prepared: one cluster, from its first start to its end."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from datetime import datetime

import pytest

from outrider.client import Client
from outrider.errors import OutriderError, PeerLostError
from tests.compose.project import ROLES, START_SECONDS, Project, docker, wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

IMAGE_BYTES = 1.6e9
DOWN_SECONDS = 10.0
TOLD_SECONDS = 40.0
"""A request whose node died or froze has ended by then, one way or the other."""
PROMPT = "Once upon a time, in a village by the sea, there lived an old fisherman who had seen every storm"
KILL_ROLE = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
        if (entry / "cmdline").read_bytes().split(b"\\0")[1:3] == [b"-m", sys.argv[1].encode()]:
            os.kill(int(entry.name), signal.SIGKILL)
"""


class Story(threading.Thread):
    """A long answer, read in a thread: `begun` is set by its first token, `outcome` is how it ended."""

    def __init__(self, target):
        super().__init__(daemon=True)
        self._target = target
        self.begun = threading.Event()
        self.outcome: str | OutriderError | None = None
        self.start()

    def run(self):
        try:
            with Client(self._target) as client:
                prompt = f"{secrets.token_hex(4)} {PROMPT}"
                with client.generate(prompt, max_tokens=4000, ignore_eos=True, timeout_seconds=300) as stream:
                    for _ in stream:
                        self.begun.set()
                    self.outcome = stream.finished[0].reason.value
        except OutriderError as error:
            self.outcome = error
        self.begun.set()

    def wait(self, *, timeout_seconds=TOLD_SECONDS):
        self.join(timeout_seconds)
        assert not self.is_alive(), f"the request hangs for {timeout_seconds:g} s"
        return self.outcome


@pytest.fixture(scope="module")
def up(image, tmp_path_factory):
    with Project(tmp_path_factory.mktemp("up")) as project:
        project.up()
        yield project


@pytest.fixture
def story(up):
    story = Story(up.target)
    assert story.begun.wait(60)
    assert story.outcome is None
    return story


def answer(project, prompt=PROMPT, **options):
    with project.client() as client:
        return client.complete(prompt, max_tokens=16, temperature=0, timeout_seconds=120, **options)


def is_whole(project):
    with contextlib.suppress(OutriderError):
        return all(len(project.serving(role)) == 1 for role in ("PREFILL", "DECODE", "DRAFT"))
    return False


# ---------------------------------------------------------------- the image and the first start


def test_the_image_is_small_and_brings_no_compiler_no_model_and_no_root(image):
    (described,) = json.loads(docker("image", "inspect", image))
    assert described["Size"] < IMAGE_BYTES
    assert described["Config"]["User"] not in ("", "0", "root")
    look = "command -v g++ gcc cc c++ clang; find / -xdev '(' -name '*.gguf' -o -name '*.safetensors' ')' 2>/dev/null"
    assert docker("run", "--rm", image, "sh", "-c", f"{look}; true") == ""


def test_native_kernels_are_in_the_image(image):
    script = "from outrider.engine.cpu_kernels.build import LIBRARIES; print(*LIBRARIES.glob('*.so'))"
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


def test_a_request_is_answered_from_outside_as_soon_as_up_returns(up):
    result = answer(up)
    assert result.text
    assert {name.partition("@")[0] for name in result.summary.metrics.nodes} == {"prefill", "decode"}


# ---------------------------------------------------------------- the command in the image


def test_generate_in_the_image(up):
    shown = up.exec("router", "outrider", "generate", PROMPT, "--max-tokens", "8", "--temperature", "0", "--stats")
    assert shown.stdout.strip()
    assert "8 tokens" in shown.stderr


def test_bench_in_the_image(up):
    limits = ("--limit", "4", "--max-tokens", "8", "--concurrency", "2")
    shown = up.exec("router", "outrider", "bench", *limits, timeout=600)
    assert "smollm2-135m-instruct" in shown.stdout


def test_config_in_the_image_names_the_file_and_the_line(up):
    shown = up.exec("router", "outrider", "config", "--role", "router").stdout
    assert "  prefill_targets: ['prefill_node:50051']  # /etc/outrider/outrider.yaml:" in shown


def test_probe_in_the_image(up):
    shown = up.exec("router", "outrider", "probe", "--service", "outrider.v1.RouterService")
    assert shown.stdout == "127.0.0.1:50051 is SERVING\n"


def test_kv_goes_over_grpc_where_containers_share_no_memory(up):
    (prefill,) = up.containers("prefill_node")
    samples = up.metrics(prefill)
    moved = {name: value for name, value in samples.items() if name.startswith("outrider:kv_transfer_bytes_total")}
    (name,) = moved
    assert 'connector="grpc"' in name
    assert moved[name] > 0


# ---------------------------------------------------------------- faults


def test_a_killed_draft_node_costs_no_token(up):
    before = answer(up)
    up.run("kill", "draft_node")
    assert answer(up, f"{PROMPT} ").text  # another prompt: nothing of it is cached
    assert answer(up).completions[0].token_ids == before.completions[0].token_ids
    up.up()
    wait_for(lambda: is_whole(up), what="the draft node's return")


def test_requests_of_a_killed_decode_node_are_told_and_up_brings_it_back(up, story):
    up.run("kill", "decode_node")
    assert isinstance(story.wait(), PeerLostError)
    with pytest.raises(OutriderError):  # nobody is left to decode: told, after no_node_timeout_seconds
        answer(up)
    assert any(event["event"] == "node lost" for event in up.logs("router", is_json=True))
    up.up()
    wait_for(lambda: is_whole(up), what="the decode node's return")
    assert answer(up).text


@pytest.mark.parametrize("role", ["prefill_node", "decode_node", "router"])
def test_a_role_that_crashes_is_started_again(up, role):
    (container,) = up.containers(role)
    up.exec(role, "python", "-c", KILL_ROLE, role, is_checked=False)  # a router's exec may die with its container
    wait_for(lambda: up.inspect(role)[0]["RestartCount"] >= 1, what=f"the restart of {role}")
    wait_for(lambda: is_whole(up), timeout_seconds=START_SECONDS, what=f"the return of {role}")
    assert up.containers(role) == [container]
    assert answer(up).text


@pytest.mark.parametrize("role", ["prefill_node", "decode_node"])
def test_a_paused_container_holds_no_request_and_serves_again_when_it_goes_on(up, role):
    up.run("pause", role)
    try:
        began = time.monotonic()
        with pytest.raises(OutriderError):
            answer(up, f"{secrets.token_hex(4)} {PROMPT}")
        assert time.monotonic() - began < TOLD_SECONDS
    finally:
        up.run("unpause", role)
    wait_for(lambda: is_whole(up), what=f"the return of {role}")
    assert answer(up).text


def test_a_running_request_of_a_paused_decode_node_is_told(up, story):
    up.run("pause", "decode_node")
    try:
        assert isinstance(story.wait(), PeerLostError)
    finally:
        up.run("unpause", "decode_node")
    wait_for(lambda: is_whole(up), what="the return of decode_node")


# ---------------------------------------------------------------- a second start, and the end


def test_up_again_fetches_nothing(up):
    began = datetime.now().astimezone().isoformat()
    up.up()
    said = docker("logs", "--since", began, up.containers("model", is_running=False)[0], is_stderr=True)
    assert "check" in said
    assert "download" not in said


def test_down_tells_running_requests_and_every_container_ends_well_in_time(up, story):
    began = time.monotonic()
    up.run("stop")  # as `down` does it, but what is stopped can still be looked at
    took = time.monotonic() - began
    ended = story.wait(timeout_seconds=5)
    assert ended == "length" or isinstance(ended, PeerLostError)
    assert {role: state["ExitCode"] for role, state in up.states().items()} == dict.fromkeys(ROLES, 0)
    assert took < DOWN_SECONDS
    for role in ROLES:
        assert [event["event"] for event in up.logs(role, is_json=True)][-1] == "stopped"
