"""constraints.txt pins versions. requirements.lock has hashes of the same packages, requirements-node.lock of some."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_HASHES = {"torch", "triton"}
"""Packages without hashes, since each index has other builds: torch for CPUs or one CUDA version, and triton for it."""


def name_of(pin):
    """Returns (name, version), with the name in the normalized form that package indexes compare."""
    name, _, version = pin.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def read_lock(name):
    """Returns (version by package, number of hashes by package)."""
    locked, hashes = {}, {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if "==" in line:
            package, version = name_of(line.removesuffix("\\").strip())
            locked[package], hashes[package] = version, 0
        elif "--hash=sha256:" in line:
            hashes[package] += 1
    return locked, hashes


def test_what_is_pinned_is_locked_by_hash():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(name_of(line) for line in lines if line and not line.startswith("#"))
    locked, hashes = read_lock("requirements.lock")
    assert locked == {name: version for name, version in pinned.items() if name not in WITHOUT_HASHES}, "make lock"
    assert min(hashes.values()) >= 1
    of_nodes, hashes = read_lock("requirements-node.lock")
    assert of_nodes.items() <= locked.items(), "make lock"
    assert min(hashes.values()) >= 1
    assert not {"torch", "transformers", "accelerate"} & set(of_nodes), "nodes on native kernels need none of these"
