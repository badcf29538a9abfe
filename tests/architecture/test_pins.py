"""constraints.txt names versions, requirements.lock the hashes of the same packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_HASHES = {"torch"}
"""Each index has another build of it: without CUDA, or with one of several."""


def name_of(pin):
    """As package indexes compare names."""
    name, _, version = pin.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def test_what_is_pinned_is_locked_by_hash():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(name_of(line) for line in lines if line and not line.startswith("#"))
    locked, hashes = {}, {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if "==" in line:
            name, version = name_of(line.removesuffix("\\").strip())
            locked[name], hashes[name] = version, 0
        elif "--hash=sha256:" in line:
            hashes[name] += 1
    assert locked == {name: version for name, version in pinned.items() if name not in WITHOUT_HASHES}, "make lock"
    assert min(hashes.values()) >= 1
