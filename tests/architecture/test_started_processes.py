"""Every Python process that the product starts has `-P` or `-I`, so that `sys.path` lacks the working folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("outrider", "router", "prefill_node", "decode_node", "draft_node")
START = re.compile(r"[\[(*]\s*sys\.executable,\s*(.*)")


def test_no_process_of_ours_imports_from_the_working_folder():
    found = {
        f"{path.relative_to(ROOT)}: {started[0]}": started[1]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for started in START.finditer(path.read_text(encoding="utf-8"))
    }
    assert found, "nothing is started any more?"
    assert [place for place, flags in found.items() if not flags.startswith(('"-P"', '"-I"'))] == []


def test_containers_and_documents_start_services_so():
    written = [
        ROOT / "compose.yaml",
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").glob("clients/*.md"),
    ]
    written += (ROOT / "deploy").rglob("*.tpl")
    bare = re.compile(r"python,? -m,? (router|prefill_node|decode_node|draft_node|outrider\.)|python, -m, \{\{")
    assert [(path.name, found[0]) for path in written for found in bare.finditer(path.read_text())] == []
