"""constraints.txt names versions, requirements.lock the hashes of the same packages, requirements-node.lock of some."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_HASHES = {"torch", "triton"}
"""Each index has another build of torch: without CUDA, or with one of several. triton comes with the latter only."""


def name_of(pin):
    """As package indexes compare names."""
    name, _, version = pin.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def read_lock(name):
    """(version by package, number of hashes by package)"""
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
