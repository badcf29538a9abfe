"""Generated pages leave nothing out. Stale pages are found by `make check`, not here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("outrider", "router", "prefill_node", "decode_node", "draft_node")


def test_no_metric_is_left_out():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = set(re.findall(r'"((?:vllm|outrider):[a-z_]+)"', "\n".join(sources)))
    assert len(names) > 30
    assert [name for name in sorted(names) if not re.search(rf"`{name}(_total)?`", page)] == []


def test_metrics_that_the_pages_name_are_exported():
    """Suffixes of histograms are ignored, and so are names without an underscore, which may be tags of our image."""
    exported = set(re.findall(r"`((?:vllm|outrider):[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8")))
    for page in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"\b(?:vllm|outrider):[a-z]+_[a-z_]+\b", page.read_text(encoding="utf-8")))
        unknown = {re.sub("_(bucket|sum|count)$", "", name) for name in named} - exported
        assert not unknown, page.name


def test_every_reason_that_an_error_can_have_is_in_troubleshooting():
    reasons = set(_reasons())
    assert {"QUEUE_FULL", "REQUEST_LOSES_NODES", "NODE_LOST"} <= reasons
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", text.partition("## Error reasons")[2]))
    assert reasons <= named, f"docs/troubleshooting.md, Error reasons, lacks {', '.join(sorted(reasons - named))}"


def _reasons():
    """Returns the values of `reason=` and of class attributes `reason` in the code: literals and named constants."""
    constants, given = {}, []
    texts = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for node in (node for text in texts if "reason" in text for node in ast.walk(ast.parse(text))):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                given += [value] if name == "reason" else []
                constants[name] = value
            case ast.keyword(arg="reason", value=value):
                given.append(value)
    for value in given:
        match constants.get(value.id) if isinstance(value, ast.Name) else value:
            case ast.Constant(value=str(text)) if re.fullmatch(r"[A-Z][A-Z_]+", text):
                yield text
