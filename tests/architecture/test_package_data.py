"""The files of an installation that are not Python."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "router", "prefill_node", "decode_node", "draft_node")


def test_every_file_that_a_package_reads_is_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    data = {ROOT / name for name in tracked.stdout.splitlines() if not name.endswith((".py", ".pyi"))}
    assert {path for path in data - packed if path.suffix != ".md"} == set()
    assert ROOT / "outrider/model_hub/smollm2-135m-instruct/chat_template.jinja" in data
