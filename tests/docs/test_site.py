"""The site builds without warnings, has every document, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, f"a new page needs a line in mkdocs.yml:\n{built.stderr}"
    assert "Documentation built" in built.stderr  # with --quiet, --strict would not see warnings
    return folder


def test_every_document_is_on_the_site(site):
    documents = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    assert [path for path in documents if path.name != "index" and not (site / path / "index.html").is_file()] == []
    assert (site / "overview" / "index.html").is_file()


def test_a_link_out_of_docs_leads_to_a_page_that_shows_the_file(site):
    page = (site / "constraints" / "index.html").read_text(encoding="utf-8")
    assert 'href="../protos/outrider/v1/router.proto/"' in page
    shown = (site / "protos" / "outrider" / "v1" / "router.proto" / "index.html").read_text(encoding="utf-8")
    assert "RouterService" in shown


def test_nothing_is_loaded_from_elsewhere(site):
    loads = r'<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)="?((?:https?:)?//[^"\s>]+)'
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert {url for page in pages for url in re.findall(loads, page.read_text(encoding="utf-8"))} == set()
    styles = "\n".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", styles)
