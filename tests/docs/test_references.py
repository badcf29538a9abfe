"""Pages that are made of the code are fresh, and leave nothing out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("outrider", "router", "prefill_node", "decode_node", "draft_node")


def test_the_pages_are_fresh():
    command = [sys.executable, ROOT / "checks" / "references.py"]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert checked.returncode == 0, checked.stderr


def test_no_metric_is_left_out():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = set(re.findall(r'"((?:vllm|outrider):[a-z_]+)"', "\n".join(sources)))
    assert len(names) > 30
    assert [name for name in sorted(names) if not re.search(rf"`{name}(_total)?`", page)] == []
