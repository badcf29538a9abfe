"""Hooks of mkdocs that make links work on the site as they do in the repository.

A document links to others, and to files outside docs/, by paths in the repository. Linked files become part of the
site: Markdown as a page, a picture unchanged, source text as a page that shows it, a folder without a README.md as a
list of its documents. A link to a missing file is left unchanged, and `mkdocs build --strict` rejects it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
README = "overview.md"
"""The README's page on the site. It cannot be index.md, which is the front page."""
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
PICTURES = (".svg", ".png")
LANGUAGES = {".proto": "protobuf", ".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> None:
    """Replaces a folder in the navigation by the page that lists its documents, then these documents, by name."""
    for entry in config.nav or ():
        for title, place in entry.items():
            if isinstance(place, str) and place.endswith("/"):
                documents = sorted(path.name for path in (Path(config.docs_dir) / place).glob("*.md"))
                entry[title] = [f"{place}{name}" for name in ("README.md", *documents)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds files outside docs/ that documents link to, and those that these files link to in turn."""
    to_read = [_repository_path(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    to_read += ["README.md"]
    for document in to_read:  # grows during the loop
        for path in (document, *_linked(document)):
            uri = _site_uri(path)
            if files.get_file_from_path(uri) is None and (made := _make_file(path, uri, config)) is not None:
                files.append(made)
                if path.endswith(".md"):
                    to_read.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    document = _repository_path(page.file.src_uri)
    if not document.endswith(".md"):
        return markdown

    def rewrite(match: re.Match[str]) -> str:
        target = _resolve(document, match[1])
        uri = _site_uri(target)
        if "://" in match[1] or files.get_file_from_path(uri) is None:
            return match[0]
        return f"]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{match[2] or ''})"

    # In tables, GitHub reads \| as a bar even within code, where Python-Markdown wants a bar without the backslash.
    rows = re.compile(r"^\|.*\|$", re.MULTILINE)
    return _outside_fences(
        markdown,
        lambda text: rows.sub(
            lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), LINK.sub(rewrite, text)
        ),
    )


def _linked(document: str) -> list[str]:
    """Returns the repository paths that a document links to."""
    found: list[str] = []

    def note(text: str) -> str:
        found.extend(_resolve(document, match[1]) for match in LINK.finditer(text) if "://" not in match[1])
        return text

    if (ROOT / document).is_file():
        _outside_fences((ROOT / document).read_text(encoding="utf-8"), note)
    return found


def _resolve(document: str, target: str) -> str:
    """Returns a link's path in the repository; for a folder, that of its README.md."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _site_uri(path: str) -> str:
    """Returns the source path by which mkdocs knows a file of the repository."""
    if path == "README.md":
        return README
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith((".md", *PICTURES)) else f"{path}.md"


def _repository_path(uri: str) -> str:
    if uri == README:
        return "README.md"
    for path in (f"docs/{uri}", uri):
        if (ROOT / path).is_file():
            return path
    return uri.removesuffix(".md")


def _make_file(path: str, uri: str, config: MkDocsConfig) -> File | None:
    """Makes the site's file for a path. Returns None if the repository has nothing at the path."""
    source = ROOT / path
    if path.startswith("../"):
        return None
    if source.is_file() and path.endswith((".md", *PICTURES)):
        return File.generated(config, uri, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV)
    if source.is_file():
        language = LANGUAGES.get(source.suffix, "text")
        text = f"````{language}\n{source.read_text(encoding='utf-8')}````"
        content = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{text}\n"
    elif source.name == "README.md" and source.parent.is_dir():
        documents = sorted(source.parent.glob("*.md"))
        links = [
            f"- [{document.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}]({document.name})"
            for document in documents
        ]
        content = "\n".join([f"# Documents in {path.removesuffix('/README.md')}", "", *links, ""])
    else:
        return None
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    return "".join(part if FENCE.fullmatch(part) else change(part) for part in FENCE.split(markdown))
