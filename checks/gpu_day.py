"""Tests this project on a machine with a GPU, in stages, each of which is a process with a time limit.

    python3 checks/gpu_day.py --out OUT                       # everything, 400 s at most
    python3 checks/gpu_day.py --out OUT --stages env,steps    # some stages, in this order
    python3 checks/gpu_day.py --out OUT --device cpu          # the same on a CPU, with small shapes

Each result is one line of JSON in OUT/results.jsonl, written at once. OUT/output.txt has the stages' output. A failed
stage does not stop the others, but makes the exit status 1. CONTRIBUTING.md says what a machine without a package
index needs besides the checkout. What to check, by stage:

- the end of the output: how each stage ended, then every line with `"kind": "failure"`
- env: the two ceilings: `copy_gb_s`, from which floors are computed, and `tflops`
- smoke: `numerics` begin with `exact` in deterministic mode; graphs are `equal` to eager steps; 0 of 200 answers are
  `differing` at any batch size
- steps: `ms` of one sequence; `times_floor` and `predicted_ms`; `busy` from 0.9 up, the `pause_ms` between steps,
  and which kernels take `longest`; a `prompt` of 64 tokens with a `graph` and without, and if its `host_ms` are most of
  its `ms`, the host's `longest` calls
- cluster: 8 of 8 answers are the `same` with drafts and after a kill, with `attempts` above 1; `acceptance`, `ttft_ms`,
  `ms_a_token`
- speculation: `times_plain` at most 1, above all of `suspended` rounds and of 16 answers at once; `accepted` is near 1
  by construction, so figures show what drafts cost; `same` is 1 in deterministic mode. If a kind is slow: its
  `part_ms` beside those of `plain`, drafts `found` of those `wanted`, and `busy_ms` of the draft node, which takes
  turns with the decode node on the GPU; `reached`: where the start spends its time
- train: `samples_per_second`
- handoff: `gb_s` by connector, or why one is `unavailable`; by CUDA IPC also by `frame_mib`, with the parts of a push
  in `sender_ms` and `receiver_ms`
- kernels: `failed_test`; a wrong kernel makes the figures above worthless
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checks.gpu_stages.day import Day, write_line  # noqa: E402 found by the line above

SECONDS = 400.0
STAGES = {
    "env": 30,
    "smoke": 50,
    "steps": 75,
    "cluster": 60,
    "speculation": 90,
    "train": 55,
    "handoff": 20,
    "kernels": 20,
}
"""Each stage's share of SECONDS, the most valuable stage first. Time that a stage does not use goes to later ones, so
the last one, which compiles most, usually has more than twice its share."""
SHOWN_BYTES = 600
"""Number of bytes, from the end of a stage's output, that the line about its failure shows."""
SCRATCH_PARENTS = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108 only parents of the script's own folder
WEIGHTS_BYTES = 34 << 30
"""Free space, in bytes, that the random models and the files written next to them need."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    status: str  # "passed", "failed", or "cut off" at its time limit
    exit_status: int
    seconds: float


def run_limited(command: Sequence[str], *, seconds: float, log: Path, environ: Mapping[str, str]) -> Outcome:
    """Runs a command, and kills its process group at the time limit. Its output is appended to the file `log`."""
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        # The child gets no session of its own, so that it is killed with this script's session.
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=dict(environ), process_group=0)
        status = "cut off"
        try:
            status = "passed" if child.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            file.write(f"\ncut off after {seconds:.0f} s\n")
        finally:
            with contextlib.suppress(ProcessLookupError):  # also kills processes that a stage left behind
                os.killpg(child.pid, signal.SIGKILL)
            exit_status = child.wait()
    return Outcome(status, exit_status, time.monotonic() - started)


def run_day(
    commands: Mapping[str, Sequence[str]],
    parts: Mapping[str, float],
    *,
    out: Path,
    seconds: float,
    environ: Mapping[str, str],
    node_logs: Path | None = None,
) -> dict[str, str]:
    """Runs the command of each stage, all within `seconds`; returns how each ended (see `Outcome`).

    Args:
        commands: the command of each stage, in order.
        parts: each stage's share of the time, relative to the others'. A stage also gets what earlier stages left.
        out: the folder for results and the stages' output. It gets two files, as a GPU machine returns only eight.
        seconds: the time limit of all stages together.
        environ: the commands' environment variables.
        node_logs: a folder in which a stage's nodes write their logs, under the stage's name. The ends of these logs
            are added to the output of a stage that did not pass.
    """
    unit = seconds / sum(parts[stage] for stage in commands)
    ends_at = time.monotonic()
    results, log, ended = out / "results.jsonl", out / "output.txt", {}
    for stage, command in commands.items():
        ends_at += unit * parts[stage]
        limit = max(ends_at - time.monotonic(), 0.0)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"==== {stage}\n")
        outcome = run_limited(command, seconds=limit, log=log, environ=environ)
        ended[stage] = outcome.status
        line: dict[str, Any] = {"stage": stage, "status": outcome.status, "seconds": round(outcome.seconds, 1)}
        if outcome.status != "passed":
            if node_logs is not None:
                _append_ends(log, node_logs / stage)
            printed = log.read_text(encoding="utf-8", errors="replace")
            line |= {"limit": round(limit), "exit_status": outcome.exit_status, "end": printed[-SHOWN_BYTES:]}
        write_line(results, **line)
    return ended


def _append_ends(log: Path, folder: Path) -> None:
    """Appends the last lines of each log in `folder` to `log`."""
    with log.open("a", encoding="utf-8") as file:
        for each in sorted(folder.rglob("*.log")):
            lines = each.read_text(encoding="utf-8", errors="replace").splitlines()
            file.write("\n".join([f"\n---- {each.name}", *lines[-30:], ""]))


def run_stage(stage: str, day: Day) -> int:
    """Runs one stage in this process. Returns the exit status."""
    with day.part(stage):
        importlib.import_module(f"checks.gpu_stages.{stage}").run(day)
    return 1 if day.failures else 0


def choose_scratch() -> Path:
    """Returns a folder for weights: an earlier run's, if there is one. Otherwise prefers one in memory, if the weights
    fit, since they are read several times.
    """
    parents = [parent for parent in SCRATCH_PARENTS if os.access(parent, os.W_OK)]
    folders = [parent / f"outrider-gpu-day-{os.getuid()}" for parent in parents]
    with_room = [folder for folder in folders if shutil.disk_usage(folder.parent).free > WEIGHTS_BYTES]
    return next((folder for folder in folders if folder.is_dir()), (with_room or folders)[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results; made if need be")
    parser.add_argument("--device", default="cuda", help="cuda or cpu; default cuda")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"default: {','.join(STAGES)}")
    parser.add_argument("--stage", choices=STAGES, help="one stage, in this process and without a limit")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for these stages; default {SECONDS:g}")
    parser.add_argument("--model", default="", help="a model of the Llama shape for `steps`; default: random weights")
    parser.add_argument("--scratch", type=Path, help="a folder for random weights, which later calls find again")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.resolve()
    scratch: Path = (arguments.scratch or choose_scratch()).resolve()
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    if arguments.stage:
        return run_stage(
            arguments.stage,
            Day(out=out, device=arguments.device, stage=arguments.stage, scratch=scratch, model=arguments.model),
        )
    stages = arguments.stages.split(",")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        parser.error(f"--stages {','.join(unknown)}: choose from {', '.join(STAGES)}")
    # Run as a module: a script's folder would be the first in sys.path, and libraries would import its kernels.py.
    own = [sys.executable, "-m", "checks.gpu_day", "--out", str(out), "--scratch", str(scratch)]
    own += ["--device", arguments.device, "--model", arguments.model]
    for name in ("results.jsonl", "output.txt"):
        (out / name).unlink(missing_ok=True)  # left by an earlier run
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running stage is stopped
    ended = run_day(
        {stage: [*own, "--stage", stage] for stage in stages},
        STAGES,
        out=out,
        seconds=arguments.seconds,
        environ=_environ(scratch),
        node_logs=scratch / "logs",
    )
    print((out / "results.jsonl").read_text(encoding="utf-8"), end="")
    print("; ".join(f"{stage} {status}" for stage, status in ended.items()), flush=True)
    return 0 if set(ended.values()) == {"passed"} else 1


def _environ(scratch: Path) -> dict[str, str]:
    """Returns an environment in which subprocesses of a stage find the checkout, and share compiled kernels."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [*filter(None, kept.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
    return {"TRITON_CACHE_DIR": str(scratch / "triton"), **kept, **own}


if __name__ == "__main__":
    sys.exit(main())
