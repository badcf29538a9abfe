"""Compares protos/ with the last landed version and fails on what would break a peer.

The version to compare with is origin/main where the branch has gone on from it, else the
commit before HEAD. A first commit, a tree without git or a commit without protos has
nothing to compare with: that is said, and is no failure.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"


def main() -> int:
    reference = landed_reference()
    if reference is None:
        print("wire contract: no earlier version to compare with")
        return 0
    archive = git("archive", "--format=tar", reference, "protos", "buf.yaml")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        status = subprocess.run([BUF, "breaking", "--against", folder], cwd=ROOT, check=False).returncode
    print(f"wire contract: {'compatible with' if status == 0 else 'BREAKS'} {reference}")
    return status


def landed_reference() -> str | None:
    """A commit that has protos, or None."""
    head = resolve("HEAD")
    landed = resolve("origin/main")
    candidates = [landed, resolve("HEAD~1")] if landed != head else [resolve("HEAD~1")]
    for commit in candidates:
        if commit is not None and resolve(f"{commit}:protos") and resolve(f"{commit}:buf.yaml"):
            return commit
    return None


def resolve(name: str) -> str | None:
    try:
        return git("rev-parse", "--verify", "--quiet", name).decode().strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    sys.exit(main())
