"""The settings in the documents are those of the code, defaults included."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from outrider.cli.config import sections_of
from outrider.config import describe_settings, environment_name

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {info.key: info.default for info in describe_settings(sections_of(None))}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def documented_defaults():
    """(pattern of keys, default) of every row of the table in docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    text = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    for keys, default in re.findall(r"^\| ((?:`[\w.*]+\.[\w.*]+`(?:, )?)+) \| (.+?) \|", text, flags=re.MULTILINE):
        for key in re.findall(r"`([^`]+)`", keys):
            yield key, default


def test_every_documented_key_has_its_documented_default():
    wrong, num_compared = [], 0
    for pattern, shown in documented_defaults():
        defaults = [value for key, value in SETTINGS.items() if fnmatch.fnmatchcase(key, pattern)]
        if not defaults:
            wrong.append(f"{pattern} is no setting")
            continue
        number, _, unit = shown.partition(" ")
        if re.fullmatch(r"[\d.]+", number) and (not unit or unit in UNITS):
            expected = float(number) * UNITS.get(unit, 1)
        elif shown in ("true", "false"):
            expected = shown == "true"
        elif re.fullmatch(r"[a-z_0-9]+", shown) and shown not in ("none", "off"):
            expected = shown
        else:
            continue  # words: "the model's"
        num_compared += 1
        wrong += [f"{pattern} is {default}, not {shown}" for default in defaults if default != expected]
    assert wrong == []
    assert num_compared > 20


def test_keys_and_variables_in_commands_exist():
    names = {environment_name(key) for key in SETTINGS}
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"\bOUTRIDER_\w+__\w+", text)) <= names, document
        assert set(re.findall(r"--set ([a-z][\w.]+)=", text)) <= set(SETTINGS), document
