"""Settings in commands of the documents exist; docs/settings.md is generated."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.cli.config import sections_of
from outrider.config.resolve import environment_name
from outrider.config.settings import describe_settings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {info.key for info in describe_settings(sections_of(None))}


def test_keys_and_variables_in_commands_exist():
    names = {environment_name(key) for key in SETTINGS}
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"\bOUTRIDER_\w+__\w+", text)) <= names, document
        assert set(re.findall(r"--set ([a-z][\w.]+)=", text)) <= SETTINGS, document
