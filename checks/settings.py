"""docs/settings.md: every setting, from its declaration. Fails if the page is stale; `--write` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from outrider.cli.config import ROLES, sections_of
from outrider.config import SettingInfo, describe_settings, format_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Generated from the code by `make settings`. How settings are given: [operations](operations.md#settings). A process
reads the sections that concern it and ignores the others. The environment variable of `kv_cache.memory` is
`OUTRIDER_KV_CACHE__MEMORY`.
"""


def page() -> str:
    """The whole document."""
    readers = {role: sections_of(role) for role in ROLES}
    lines = [HEAD.rstrip("\n")]
    for section, infos in groupby(describe_settings(sections_of(None)), key=lambda info: info.key.partition(".")[0]):
        names = [role for role in ROLES if section in readers[role]] or ["`outrider up`"]
        lines += [
            "",
            f"## {section}",
            "",
            f"Read by {'every process' if names == list(ROLES) else ', '.join(names)}.",
            "",
        ]
        lines += ["| key | default | allowed | meaning |", "| -- | -- | -- | -- |", *_rows(infos)]
    return "\n".join(lines) + "\n"


def _rows(infos: Iterator[SettingInfo]) -> Iterator[str]:
    for info in infos:
        allowed = str(info.limits) or info.type_name
        cells = (f"`{info.key}`", f"`{format_value(info.default)}`", allowed, info.help)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write("docs/settings.md is stale: run make settings\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
