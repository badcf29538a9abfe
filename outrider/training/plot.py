"""Draws the learning curve out/training.svg: loss and held-out acceptance over time, also by kind of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from outrider.training.trainer import HistoryPoint

WIDTH, HEIGHT, MARGIN, GAP = 380, 240, 52, 24  # pixels: size of a panel, space around it and between panels
COLORS = ("#0b62c4", "#d1730a", "#2a8f4f", "#8a4bb0", "#5b6673", "#b4bcc6")
INK, QUIET = "#1c2733", "#5b6673"


def draw(history: Sequence[HistoryPoint], title: str) -> str:
    """Returns an SVG of three panels, whose axes begin at zero."""
    losses = {
        "training": [point.loss[0] for point in history],
        "held out": [point.held_out_loss[0] for point in history],
    }
    by_position = zip(*(point.acceptance for point in history), strict=True)
    shares = {f"position {position}": list(values) for position, values in enumerate(by_position, 1)}
    by_kind = {kind: [point.kinds[kind][1][0] for point in history] for kind in history[-1].kinds}
    times = [point.seconds / 60 for point in history]
    width, height = 3 * (WIDTH + MARGIN + GAP) - GAP, HEIGHT + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12"',
            f' width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            _text(MARGIN, 20, title),
            *_panel("loss of the first draft token", times, losses, MARGIN),
            *_panel("held-out acceptance", times, shares, 2 * MARGIN + WIDTH + GAP, highest=1.0),
            *_panel("of the first position, by kind", times, by_kind, 3 * MARGIN + 2 * (WIDTH + GAP), highest=1.0),
            "</svg>\n",
        ]
    )


def _panel(
    title: str, times: Sequence[float], lines: dict[str, list[float]], left: int, highest: float = 0.0
) -> list[str]:
    top, bottom, right, last = MARGIN, MARGIN + HEIGHT, left + WIDTH - MARGIN, max(times[-1], 1e-9)
    finite = [value for values in lines.values() for value in values if math.isfinite(value)]
    highest = highest or max([*finite, 1e-9])
    parts = [_text(left, top - 8, title), _text(left, bottom + 34, "minutes of training", color=QUIET)]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = left + part * (right - left), bottom - part * HEIGHT
        parts += [
            f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#e4e8ec"/>',
            _text(left - 6, y + 4, f"{part * highest:.2g}", "end", QUIET),
            _text(x, bottom + 18, f"{part * last:.3g}", "middle", QUIET),
        ]
    for place, (name, values) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        points = " ".join(
            f"{left + time / last * (right - left):.1f},{bottom - min(value / highest, 1) * HEIGHT:.1f}"
            for time, value in zip(times, values, strict=True)
            if math.isfinite(value)
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
            _text(right - 4, top + 14 * place + 12, name, "end", color),
        ]
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
