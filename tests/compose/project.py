"""One Compose project, controlled like a user would: by `docker compose` with the files in the repository."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

import yaml

from outrider.client import Client
from outrider.errors import OutriderError

ROOT = Path(__file__).resolve().parents[2]
IMAGE_TAG = "compose-test"
ROLES = ("router", "prefill_node", "decode_node", "draft_node")
BUILD_SECONDS = 1200.0
START_SECONDS = float(os.environ.get("OUTRIDER_COMPOSE_TEST_START_SECONDS", "400"))
COMMAND_SECONDS = 120.0
ERASE_LINE = "\x1b[2K"
METRICS = """
import sys, urllib.request
sys.stdout.write(urllib.request.urlopen("http://127.0.0.1:9464/metrics", timeout=10).read().decode())
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Project:
    """One Compose project with a port of its own. Its `with` block ends with `down`, which removes its volumes, also
    after an error.
    """

    def __init__(self, directory: Path, *, files=("compose.yaml",), override=None, profiles=()):
        self.name = f"outrider-test-{secrets.token_hex(3)}"
        self.port = free_port()
        self.profiles = profiles
        self.files = [ROOT / file for file in files]
        self.environ = {"OUTRIDER_PORT": str(self.port), "OUTRIDER_TAG": IMAGE_TAG}
        self._directory = directory
        if override is not None:
            self.override(override)

    def override(self, changes) -> None:
        """Adds a file that overrides the others."""
        path = self._directory / f"{self.name}-{len(self.files)}.yaml"
        path.write_text(yaml.safe_dump(changes))
        self.files.append(path)

    def run(self, *arguments, timeout=COMMAND_SECONDS, is_checked=True, **environ) -> subprocess.CompletedProcess:
        """Runs `docker compose ARGUMENTS`. The error of a failed command contains its standard error."""
        command = ["docker", "compose", "--progress", "plain", "--project-directory", str(ROOT), "-p", self.name]
        for file in self.files:
            command += ["-f", str(file)]
        for profile in self.profiles:
            command += ["--profile", profile]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=timeout, check=False,
            env={**os.environ, **self.environ, **environ},
        )  # fmt: skip
        if is_checked and done.returncode != 0:
            shown = f"docker compose {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            raise AssertionError(f"{shown}\n{self.logs()[-8000:]}")
        return done

    def up(self, *arguments, timeout=START_SECONDS, is_checked=True, **environ) -> subprocess.CompletedProcess:
        """Runs `up --wait`, which returns when every service is healthy."""
        wait = ("up", "--detach", "--wait", "--wait-timeout", str(int(timeout)))
        return self.run(*wait, *arguments, timeout=timeout + 60, is_checked=is_checked, **environ)

    def down(self) -> None:
        self.run("down", "--volumes", "--remove-orphans", "--timeout", "10", is_checked=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def client(self):
        with Client(self.target) as client:
            yield client

    def answer(self, prompt, *, max_tokens=16, **options):
        """Returns a whole greedy answer."""
        with self.client() as client:
            return client.complete(prompt, max_tokens=max_tokens, temperature=0, timeout_seconds=120, **options)

    def logs(self, *services, is_json=False):
        """Returns the containers' output; with `is_json` only the events, as dicts."""
        text = self.run("logs", "--no-color", "--no-log-prefix", *services, is_checked=False).stdout
        text = text.replace(ERASE_LINE, "")  # Compose writes these codes even to files
        if not is_json:
            return text
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def containers(self, service, *, is_running=True) -> list[str]:
        arguments = ("ps", "--quiet", *(() if is_running else ("--all",)), service)
        return sorted(self.run(*arguments).stdout.split())

    def inspect(self, service, *, is_running=True) -> list[dict]:
        found = self.containers(service, is_running=is_running)
        return json.loads(docker("inspect", *found)) if found else []

    def states(self) -> dict[str, dict]:
        """Returns `docker inspect`'s State by service, for services with one container each."""
        return {role: self.inspect(role, is_running=False)[0]["State"] for role in ROLES}

    def exec(self, service, *command, is_checked=True, timeout=COMMAND_SECONDS) -> subprocess.CompletedProcess:
        return self.run("exec", "-T", service, *command, is_checked=is_checked, timeout=timeout)

    def metrics(self, container: str) -> dict[str, float]:
        """Returns the metric samples of one container, by name with labels."""
        lines = docker("exec", container, "python", "-c", METRICS).splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    def serving(self, role: str) -> list[str]:
        """Returns the names of the nodes that serve according to the router; none if no router answers."""
        with self.client() as client, contextlib.closing(client.watch_cluster(interval_seconds=0.5)) as statuses:
            nodes = next(statuses).nodes
        return sorted(node.name for node in nodes if node.role.name == role and node.state.name == "SERVING")

    def is_whole(self) -> bool:
        """Returns whether every container is healthy and the router uses one node of each kind."""
        if any(found["State"]["Health"]["Status"] != "healthy" for role in ROLES for found in self.inspect(role)):
            return False  # after a pause, Docker reports "unhealthy" until its next check
        with contextlib.suppress(OutriderError):
            return all(len(self.serving(role)) == 1 for role in ("PREFILL", "DECODE", "DRAFT"))
        return False

    def wait_until_whole(self, *, timeout_seconds: float = 120.0) -> None:
        wait_for(self.is_whole, timeout_seconds=timeout_seconds, what="a whole and healthy cluster")


def docker(*arguments, timeout=COMMAND_SECONDS, is_stderr=False) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stderr if is_stderr else done.stdout


def wait_for(condition, *, timeout_seconds=60.0, what="the condition"):
    """Calls `condition` twice a second until it is true, and returns its value."""
    deadline = time.monotonic() + timeout_seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about in {timeout_seconds:g} s")
        time.sleep(0.5)
    return found


def with_models(volume: str) -> dict:
    """Returns an override file, with which the models come from a volume that outlives the project."""
    return {"volumes": {"models": {"external": True, "name": volume}}}
