"""Fails on Python files of over 400 lines, which should be split."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_LINES = 400
FOLDERS = (
    *("outrider", "router", "prefill_node", "decode_node", "draft_node"),
    *("tests", "benchmarks", "checks", "examples"),
)


def main() -> int:
    sizes = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "v1" not in path.parts
    }
    long = sorted(((lines, path) for path, lines in sizes.items() if lines > LIMIT_LINES), reverse=True)
    print(f"file sizes: {len(sizes)} files, {sum(sizes.values())} lines, {len(long)} over {LIMIT_LINES} lines")
    for lines, path in long:
        print(f"  {lines:5d} {path}")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
