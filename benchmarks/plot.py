"""Draws docs/figures/peers.svg from benchmarks/data/peers.json.

    .venv/bin/python benchmarks/plot.py

The figures are those of the log entry named in the data file. A bar is the mean of all rounds, and a dot is one round.
Every axis starts at zero.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "peers.json"
FIGURE = ROOT / "docs" / "figures" / "peers.svg"

COLUMNS = 3
NAMES_WIDTH, BARS_WIDTH, LABEL_WIDTH, GAP = 160, 150, 52, 14  # in pixels, like all sizes below
BAR_HEIGHT, BAR_STEP, TITLE_HEIGHT, PANEL_GAP = 14, 22, 44, 22
MARGIN, CAPTION_HEIGHT = 16, 40
OURS, OTHERS, ROUND, QUIET = "#0b62c4", "#b4bcc6", "#1c2733", "#5b6673"


def draw(data: dict[str, Any]) -> str:
    """Returns the chart as SVG: one panel per measure, one bar per server; the first server is Outrider."""
    servers, panels = data["servers"], data["panels"]
    panel_height = TITLE_HEIGHT + BAR_STEP * len(servers) + PANEL_GAP
    width = 2 * MARGIN + NAMES_WIDTH + COLUMNS * (BARS_WIDTH + LABEL_WIDTH) + (COLUMNS - 1) * GAP
    height = 2 * MARGIN + panel_height * -(-len(panels) // COLUMNS) + CAPTION_HEIGHT
    parts = []
    for index, panel in enumerate(panels):
        row, column = divmod(index, COLUMNS)
        top = MARGIN + row * panel_height
        left = MARGIN + NAMES_WIDTH + column * (BARS_WIDTH + LABEL_WIDTH + GAP)
        if column == 0:
            for line, server in enumerate(servers):
                at = f'x="{left - 8}" y="{_baseline(top, line)}" text-anchor="end"'
                parts.append(f"<text {at}{_weight(line)}>{escape(server)}</text>")
        parts += _panel(panel, left, top)
    caption = MARGIN + panel_height * -(-len(panels) // COLUMNS) + 12
    note = f"Bars are means, dots are rounds. Log entry {data['entry']}."
    parts += [
        f'<text x="{MARGIN}" y="{caption}" fill="{QUIET}">{escape(data["machine"])}.</text>',
        f'<text x="{MARGIN}" y="{caption + 17}" fill="{QUIET}">{escape(note)}</text>',
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head += ' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1c2733">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def _panel(panel: dict[str, Any], left: int, top: int) -> list[str]:
    most = max(max(rounds) for rounds in panel["values"])
    parts = [
        f'<text x="{left}" y="{top + 14}" font-weight="bold">{escape(panel["title"])}</text>',
        f'<text x="{left}" y="{top + 30}" font-size="11" fill="{QUIET}">{escape(panel["note"])}</text>',
    ]
    for line, rounds in enumerate(panel["values"]):
        middle = _baseline(top, line) - 4
        size = BARS_WIDTH * mean(rounds) / most
        parts.append(
            f'<rect x="{left}" y="{middle - BAR_HEIGHT / 2}" width="{size:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{OTHERS if line else OURS}"/>'
        )
        if len(rounds) > 1:
            parts += [
                f'<circle cx="{left + BARS_WIDTH * value / most:.1f}" cy="{middle}" r="2.5" fill="{ROUND}"/>'
                for value in rounds
            ]
        end = left + BARS_WIDTH * max(rounds) / most
        parts.append(f'<text x="{end + 7:.1f}" y="{middle + 4}"{_weight(line)}>{mean(rounds):.0f}</text>')
    return parts


def _baseline(top: int, line: int) -> int:
    return top + TITLE_HEIGHT + BAR_STEP * line + 10


def _weight(line: int) -> str:
    return "" if line else ' font-weight="bold"'


def main() -> None:
    FIGURE.write_text(draw(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
    print(FIGURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
