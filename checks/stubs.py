"""Checks that the stubs in outrider/v1 are those that protoc generates from protos/, or writes them with --write."""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the stubs instead of checking them")
    if parser.parse_args().write:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differing(fresh=Path(folder) / "outrider" / "v1", committed=ROOT / "outrider" / "v1")
    if stale:
        print("stubs: out of date, run `make proto`: " + ", ".join(stale))
        return 1
    print("stubs: fresh")
    return 0


def generate(target: Path) -> None:
    """Generates the stubs into `target`. Raises: SystemExit if protoc rejects the sources."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "outrider").rglob("*.proto"))
    arguments = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    well_known = files("grpc_tools") / "_proto"
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *arguments, *sources]) != 0:
        raise SystemExit("stubs: protoc failed")


def differing(*, fresh: Path, committed: Path) -> list[str]:
    """Returns names of files that differ, are missing, or are left over."""
    names = {path.name for folder in (fresh, committed) for pattern in GENERATED for path in folder.glob(pattern)}
    _, different, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted([*different, *missing])


if __name__ == "__main__":
    sys.exit(main())
