"""Measures `docker compose up`: image, start, memory, stop, and throughput compared to `outrider up`.

    python benchmarks/compose.py                          # warm start, memory, stop
    python benchmarks/compose.py --cold                   # also a clone, an image built without cache, and a new volume
    python benchmarks/compose.py --throughput --rounds 4  # also both ways of running, in alternating passes

Needs a Docker engine with Compose. It uses its own project, which it removes at the end; `--cold`
builds with --no-cache, but packages may still come from the engine's cache of downloads unless
`docker builder prune --all` was run before. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.bench.machine import describe_machine
from outrider.client import Client
from outrider.errors import OutriderError

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The three laws of motion are"
START_SECONDS = 900.0
COMMAND_SECONDS = 1800.0
"""Timeout of each command, in seconds. The build without a cache takes longest."""
TAG = "benchmark"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="from git clone and without a build cache")
    parser.add_argument("--throughput", action="store_true", help="beside `outrider up`, interleaved")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts, and passes of --throughput; default 3")
    parser.add_argument("--concurrency", default="1,4,16", help="of --throughput; default 1,4,16")
    parser.add_argument("--limit", type=int, default=16, help="prompts of a pass of --throughput; default 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": vars_of(describe_machine()), "command": sys.argv}
    with tempfile.TemporaryDirectory() as work:
        tree = clone(Path(work), figures) if arguments.cold else ROOT
        project = Project(tree)
        try:
            project.measure_build(figures, use_cache=not arguments.cold)
            project.measure_starts(figures, num_starts=1 + arguments.rounds)
            if arguments.throughput:
                figures["throughput"] = project.compare(arguments)
            project.measure_end(figures)
        finally:
            project.compose("down", "--volumes", "--remove-orphans")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(figures)
    return 0


def clone(work: Path, figures: dict[str, Any]) -> Path:
    with timed(figures, "clone_seconds"):
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(work / "outrider")], check=True)  # noqa: S607
    return work / "outrider"


class Project:
    """A Compose project on a free port."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._name = f"outrider-benchmark-{secrets.token_hex(3)}"
        self._port = free_port()

    def compose(self, *arguments: str) -> str:
        environ = {**os.environ, "OUTRIDER_PORT": str(self._port), "OUTRIDER_TAG": TAG}
        command = ["docker", "compose", "--progress", "plain", "-p", self._name, *arguments]
        done = subprocess.run(
            command, cwd=self._tree, env=environ, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
        )
        if done.returncode != 0:
            raise SystemExit(f"docker compose {' '.join(arguments)}: status {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    def measure_build(self, figures: dict[str, Any], *, use_cache: bool) -> None:
        with timed(figures, "build_seconds"):
            self.compose("build", *(() if use_cache else ("--no-cache",)))
        figures["is_build_cached"] = use_cache
        figures["image_bytes"] = int(docker("image", "inspect", "--format", "{{.Size}}", f"outrider:{TAG}"))

    def measure_starts(self, figures: dict[str, Any], *, num_starts: int) -> None:
        """Measures starts. The first has a new volume, so it downloads the model. Leaves the project running."""
        starts = []
        for number in range(num_starts):
            if number:
                self.compose("down")
            start: dict[str, float] = {}
            with timed(start, "up_seconds"):
                self.compose("up", "--detach", "--wait", "--wait-timeout", str(int(START_SECONDS)))
            with timed(start, "first_answer_seconds"), Client(self.target) as client:
                client.complete(PROMPT, max_tokens=16, temperature=0, timeout_seconds=120)
            starts.append(start)
        figures["cold_start"], figures["warm_starts"] = starts[0], starts[1:]
        figures["memory_bytes"] = self.memory()

    def memory(self) -> dict[str, int]:
        """Returns each service's memory in bytes, as reported by the Docker engine."""
        found = {}
        for container in self.compose("ps", "--quiet").split():
            service = docker("inspect", "--format", '{{index .Config.Labels "com.docker.compose.service"}}', container)
            used = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", container).partition("/")[0].strip()
            found[service] = to_bytes(used)
        return found

    def measure_end(self, figures: dict[str, Any]) -> None:
        with timed(figures, "stop_seconds"):
            self.compose("stop")
        states = self.compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").split("\n")
        figures["exit_codes"] = {line.split()[0]: int(line.split()[1]) for line in states if line.strip()}

    def compare(self, arguments: argparse.Namespace) -> list[dict[str, Any]]:
        """Runs passes of the same load, alternately against the containers and against `outrider up`."""
        passes = []
        with outrider_up() as target:
            check_same_model(self.target, target)
            for number in range(arguments.rounds):
                for way, where in (("compose", self.target), ("outrider up", target)):
                    for level in bench(where, arguments):
                        passes.append({"round": number, "way": way, **level})
                        print(f"{way:>12}: {level['level']} clients, {level['tokens_per_second']:.1f} tokens/s")
        return passes


def check_same_model(containers: str, here: str) -> None:
    """Checks that both clusters compute in the same dtype. They do not if this machine lacks native kernels."""
    dtypes = []
    for target in (containers, here):
        with Client(target) as client:
            dtypes.append(client.model().dtype)
    if dtypes[0] != dtypes[1]:
        raise SystemExit(
            f"the containers serve {dtypes[0]} and `outrider up` {dtypes[1]}: `make setup` builds the kernels for it"
        )


@contextmanager
def outrider_up() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "outrider.cli.main", "up", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_serving(process, f"127.0.0.1:{port}")
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def wait_until_serving(process: subprocess.Popen[bytes], target: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OutriderError), Client(target) as client:
            client.model()
            return
        time.sleep(0.5)
    raise SystemExit(f"`outrider up` does not serve, exit status {process.poll()}")


def bench(target: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one pass of `outrider bench` at each concurrency."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "outrider.cli.main", "bench", "load", "--target", target, "--json", file.name]
        command += ["--concurrency", arguments.concurrency, "--limit", str(arguments.limit), "--ignore-eos"]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=COMMAND_SECONDS)
        levels: list[dict[str, Any]] = json.loads(Path(file.name).read_bytes())["levels"]
    return levels


def docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS).stdout.strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def timed(figures: dict[str, Any], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    figures[name] = round(time.monotonic() - began, 2)


def to_bytes(text: str) -> int:
    """Parses a size in the format of `docker stats`: "84.87MiB"."""
    number, unit = re.fullmatch(r"([0-9.]+)([KMG]?i?B)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit])


def vars_of(machine: Any) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in machine.__slots__}


def show(figures: dict[str, Any]) -> None:
    cold, warm = figures["cold_start"], figures["warm_starts"]
    build = "with" if figures["is_build_cached"] else "without"
    print(
        f"image {figures['image_bytes'] / 1e9:.2f} GB, built in {figures['build_seconds']:.0f} s {build} a build cache"
    )
    print(f"first start, with the model's download: up {cold['up_seconds']:.1f} s")
    print(f"later starts: up {', '.join(format(start['up_seconds'], '.1f') for start in warm)} s")
    first = figures.get("clone_seconds", 0.0) + figures["build_seconds"] + sum(cold.values())
    print(f"to the first answer: {first:.0f} s; later {', '.join(f'{sum(one.values()):.1f}' for one in warm)} s")
    for service, used in sorted(figures["memory_bytes"].items()):
        print(f"memory of {service}: {used / 2**20:.0f} MiB")
    print(f"stop {figures['stop_seconds']:.1f} s, exit codes {figures['exit_codes']}")
    for level in dict.fromkeys(one["level"] for one in figures.get("throughput", ())):
        ratios = [one / other for one, other in zip(*by_way(figures["throughput"], level), strict=True)]
        print(f"{level} clients: {statistics.median(ratios):.3f} of `outrider up`'s tokens/s, median of {len(ratios)}")


def by_way(passes: list[dict[str, Any]], level: str) -> tuple[list[float], list[float]]:
    """Returns the tokens per second of each round, with containers and without."""
    found = {way: [one["tokens_per_second"] for one in passes if (one["way"], one["level"]) == (way, level)]
             for way in ("compose", "outrider up")}  # fmt: skip
    return found["compose"], found["outrider up"]


if __name__ == "__main__":
    sys.exit(main())
