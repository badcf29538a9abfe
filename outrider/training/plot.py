"""Draws how a head learnt: out/training.svg, loss and held-out acceptance over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from outrider.training.trainer import HistoryPoint

WIDTH, HEIGHT, MARGIN, GAP = 380, 240, 52, 24  # pixels, of a panel and around it
COLORS = ("#0b62c4", "#d1730a", "#2a8f4f", "#8a4bb0", "#5b6673", "#b4bcc6")
QUIET = "#5b6673"


def draw(history: Sequence[HistoryPoint], title: str) -> str:
    """As SVG: two panels. Axes begin at zero."""
    last = history[-1]
    losses = {
        "training": [point.loss[0] for point in history],
        "held out": [point.held_out_loss[0] for point in history],
    }
    shares = {
        f"position {position + 1}": [point.acceptance[position] for point in history]
        for position in range(len(last.acceptance))
    }
    times = [point.seconds / 60 for point in history]
    width, height = 2 * (WIDTH + MARGIN) + GAP, HEIGHT + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12" fill="#1c2733"',
            f' width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="{MARGIN}" y="20" font-weight="bold">{escape(title)}</text>',
            *_panel("loss of the first draft token", times, losses, MARGIN),
            *_panel("held-out acceptance", times, shares, 2 * MARGIN + WIDTH + GAP, most=1.0),
            "</svg>\n",
        ]
    )


def _panel(
    title: str, times: Sequence[float], lines: dict[str, list[float]], left: int, most: float = 0.0
) -> list[str]:
    top, bottom, last = MARGIN, MARGIN + HEIGHT, max(times[-1], 1e-9)
    finite = [value for values in lines.values() for value in values if math.isfinite(value)]
    most = most or max([*finite, 1e-9])
    parts = [f'<text x="{left}" y="{top - 8}">{escape(title)}</text>']
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - part * HEIGHT
        parts += [
            f'<line x1="{left}" y1="{y}" x2="{left + WIDTH - MARGIN}" y2="{y}" stroke="#e4e8ec"/>',
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="{QUIET}">{part * most:.2g}</text>',
            (
                f'<text x="{left + part * (WIDTH - MARGIN):.1f}" y="{bottom + 18}" text-anchor="middle" fill="{QUIET}">'
                f"{part * last:.3g}</text>"
            ),
        ]
    for place, (name, values) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        points = " ".join(
            f"{left + time / last * (WIDTH - MARGIN):.1f},{bottom - min(value / most, 1) * HEIGHT:.1f}"
            for time, value in zip(times, values, strict=True)
            if math.isfinite(value)
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
            (
                f'<text x="{left + WIDTH - MARGIN - 4}" y="{top + 14 * place + 12}" text-anchor="end" fill="{color}">'
                f"{escape(name)}</text>"
            ),
        ]
    parts.append(f'<text x="{left}" y="{bottom + 34}" fill="{QUIET}">minutes of training</text>')
    return parts
