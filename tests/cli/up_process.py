"""`outrider up` as a person starts it, with stand-ins for the four roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from outrider.cli.config import ROLES

ROLE_PROCESS = Path(__file__).parents[1] / "cluster" / "role_process.py"
WAIT_SECONDS = 60.0
ROLE_MODULE = """
import runpy, sys
sys.argv = [{path!r}, {role!r}, *sys.argv[1:]]
runpy.run_path({path!r}, run_name="__main__")
"""
ROLE_CONFIG = """
from dataclasses import dataclass
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.kv_transfer.config import KvTransferConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import SERVICE_SECTIONS

@dataclass(frozen=True, kw_only=True)
class Config:
    pass

NODE_SECTIONS = {{"model": ModelConfig, "kv_cache": KVCacheConfig, "kv_transfer": KvTransferConfig}}
SECTIONS = {{**NODE_SECTIONS, **SERVICE_SECTIONS, "{role}": Config}}
"""


class Up:
    """`outrider up` as a person starts it, with stand-ins for the roles. The working folder has modules of another
    service, named like Outrider's and the standard library's.
    """

    def __init__(self, directory: Path, *, shell: str = 'exec "$@"', **environ: str) -> None:
        """`shell`: the bash script that runs the command line, which is in its arguments."""
        working = directory / "my service"
        working.mkdir()
        for name in ("router", "decode_node", "queue", "token", "outrider"):
            (working / f"{name}.py").write_text("raise SystemExit('this is my service')")
        (working / "prefill_node").mkdir()
        (working / "prefill_node" / "__init__.py").write_text("raise SystemExit('this is my service')")
        for role in ROLES:
            (directory / role).mkdir()
            (directory / role / "__init__.py").touch()
            (directory / role / "__main__.py").write_text(ROLE_MODULE.format(path=str(ROLE_PROCESS), role=role))
            (directory / role / "config.py").write_text(ROLE_CONFIG.format(role=role))
        (directory / "config.json").write_text("{}")  # this is all that `up` looks for in a model's directory
        self.status_file = directory / "status.json"
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash",
             sys.executable, "-P", "-m", "outrider.cli.main", "up", "--port", "0", "--model", str(directory),
             "--json-status", str(self.status_file), "--set", "server.drain_seconds=60"],
            cwd=working, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(directory), **environ},
        )  # fmt: skip
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("version="):
                break

    def nodes(self) -> list[dict]:
        return json.loads(self.status_file.read_text())["nodes"]

    def wait(self) -> int:
        rest, _ = self.process.communicate(timeout=WAIT_SECONDS)
        self.lines += rest.splitlines()
        return self.process.returncode
