"""What a machine with a GPU shows about this project, in one script: stages, each a process with a time limit.

    python3 checks/gpu_day.py --out OUT                       # everything, 400 s at most
    python3 checks/gpu_day.py --out OUT --stages env,steps    # some stages, in this order
    python3 checks/gpu_day.py --out OUT --device cpu          # the same on a CPU, with small shapes

Each result is one line of JSON in OUT/results.jsonl, written as it comes. OUT/STAGE.out has what a stage printed. A
stage that fails does not stop the others; the exit status is 1 then. CONTRIBUTING.md says what a machine without a
package index needs besides the checkout.
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
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checks.gpu_stages.day import Day, write_line  # noqa: E402 found by the line above

STAGES = {"env": 30, "kernels": 100, "smoke": 80, "steps": 110, "handoff": 30, "cluster": 110, "train": 100}
"""Seconds at most on a GPU, in the order of what is learnt from each. What one leaves is for those that follow."""
MIN_STAGE_SECONDS = 10.0
"""With less time left a stage is not started."""
SHOWN_BYTES = 600
"""Of what a stage printed last, in the line that says how it failed."""
WEIGHTS_BYTES = 24 << 30
"""Room for the largest random model, and what is written beside it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    status: str  # "passed", "failed" or "cut off"
    exit_status: int
    seconds: float


def run_limited(command: Sequence[str], *, seconds: float, log: Path, environ: Mapping[str, str]) -> Outcome:
    """Runs a command, and kills its whole process group when its time is over. Its output goes to the file `log`."""
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        # Not a session of its own: where ours is ended as a whole, this group is, too.
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=dict(environ), process_group=0)
        status = "cut off"
        try:
            status = "passed" if child.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            file.write(f"\ncut off after {seconds:.0f} s\n")
        finally:
            with contextlib.suppress(ProcessLookupError):  # of those that a stage left behind
                os.killpg(child.pid, signal.SIGKILL)
            exit_status = child.wait()
    return Outcome(status, exit_status, time.monotonic() - started)


def run_day(
    commands: Mapping[str, Sequence[str]],
    limits: Mapping[str, float],
    *,
    out: Path,
    seconds: float,
    environ: Mapping[str, str],
    node_logs: Path | None = None,
) -> dict[str, str]:
    """Runs the command of each stage, all within `seconds`; returns how each ended: see `Outcome`, or "skipped".

    `node_logs`: a folder in which a stage's nodes write their logs, under the stage's name. What they end with is added
    to the output of a stage that did not pass.
    """
    ends_at = time.monotonic() + seconds
    results, ended = out / "results.jsonl", {}
    for stage, command in commands.items():
        limit = min(limits[stage], ends_at - time.monotonic())
        if limit < min(MIN_STAGE_SECONDS, limits[stage]):
            ended[stage] = "skipped"
            write_line(results, stage=stage, status="skipped", reason=f"{max(limit, 0):.0f} s were left")
            continue
        log = out / f"{stage}.out"
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
    """The last lines of each file in `folder`."""
    with log.open("a", encoding="utf-8") as file:
        for each in sorted(folder.rglob("*.log")):
            lines = each.read_text(encoding="utf-8", errors="replace").splitlines()
            file.write("\n".join([f"\n---- {each.name}", *lines[-30:], ""]))


def run_stage(stage: str, day: Day) -> int:
    """One stage in this process. Returns the exit status."""
    try:
        importlib.import_module(f"checks.gpu_stages.{stage}").run(day)
    except Exception as error:  # noqa: BLE001 the border of the process
        traceback.print_exc()
        day.expect(f"{type(error).__name__}: {error}", False)
    return 1 if day.failures else 0


def choose_scratch() -> Path:
    """A folder for weights: in memory where there is room, as they are read several times."""
    for parent in ("/dev/shm", tempfile.gettempdir()):  # noqa: S108 a private folder is made there
        with contextlib.suppress(OSError):
            if shutil.disk_usage(parent).free > WEIGHTS_BYTES:
                return Path(parent, f"outrider-gpu-day-{os.getuid()}")
    return Path(tempfile.gettempdir(), f"outrider-gpu-day-{os.getuid()}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results; made if need be")
    parser.add_argument("--device", default="cuda", help="cuda or cpu; default cuda")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"default: {','.join(STAGES)}")
    parser.add_argument("--stage", choices=STAGES, help="one stage, in this process and without a limit")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all stages; default 400")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies each stage's limit, on a slow machine")
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
    # As a module: the folder of a script comes first in its path, and libraries would find our kernels.py there.
    own = [sys.executable, "-m", "checks.gpu_day", "--out", str(out), "--scratch", str(scratch)]
    own += ["--device", arguments.device, "--model", arguments.model]
    (out / "results.jsonl").unlink(missing_ok=True)  # of an earlier day
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running stage is ended
    ended = run_day(
        {stage: [*own, "--stage", stage] for stage in stages},
        {stage: arguments.patience * STAGES[stage] for stage in stages},
        out=out,
        seconds=arguments.seconds,
        environ=_environ(),
        node_logs=scratch / "logs",
    )
    print((out / "results.jsonl").read_text(encoding="utf-8"), end="")
    print("; ".join(f"{stage} {status}" for stage, status in ended.items()), flush=True)
    return 0 if set(ended.values()) == {"passed"} else 1


def _environ() -> dict[str, str]:
    """The checkout is found by the processes that a stage starts, too, and what one has compiled others read."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [*filter(None, kept.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
