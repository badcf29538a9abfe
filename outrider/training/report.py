"""Phase 4: writes out/report.md, with a head's figures on held-out answers and its speedup on this machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from outrider.model_hub.config import ModelConfig
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, open_head_forward
from outrider.training.hidden_states import CLIENTS, CONTEXT_TOKENS, cache_flush, median_seconds
from outrider.training.replay import BOTH, HEAD, LOOKUP, SOURCES, Results
from outrider.training.trainer import HistoryPoint

ALL = "all kinds"
MAX_TEMPERATURES = 3


def measure_head(folder: Path, config: ModelConfig, *, limit_seconds: float) -> list[float]:
    """Returns, for each number of CLIENTS, the seconds of one draft step: one token per client, after CONTEXT_TOKENS.

    The processor's caches are flushed before each step, because in a node the target's weights flush them.
    """
    target, num_cached_tokens = HeadTarget.locate(config), 2 * max(CLIENTS) * CONTEXT_TOKENS
    forward = open_head_forward(load_head(folder, target), target, num_cached_tokens=num_cached_tokens)
    flush, seconds = cache_flush(target.device), []
    paths: list[PathRows] = []
    for clients in CLIENTS:
        while len(paths) < clients:
            paths.append(forward.blank_path(CONTEXT_TOKENS))
        seconds.append(median_seconds(partial(forward.decide, paths, ()), flush, limit_seconds))
    return seconds


def speedup(tokens_per_step: float, k: int, row_seconds: Sequence[float], draft_seconds: float) -> float:
    """Returns the speedup over plain decoding if every step drafts k tokens for each client and verifies them together.

    `row_seconds`: seconds of a step, by number of rows per client. `draft_seconds`: seconds of all draft steps for all
    clients; 0 for lookup.
    """
    return tokens_per_step * row_seconds[0] / (row_seconds[k] + draft_seconds)


def write_report(
    title: str,
    lines: Sequence[str],
    results: Results,
    row_seconds: Sequence[Sequence[float]],
    head_seconds: Sequence[float],
    point: HistoryPoint,
    *,
    num_at_once: int = 1,
) -> str:
    """Returns the report as Markdown. `lines`: facts about the run. `point`: the figures of the head in training.

    `row_seconds` and `head_seconds` have one entry per number of CLIENTS: the first as in `speedup`, and the seconds of
    one draft step, which drafts `num_at_once` tokens for each client.
    """
    max_k = next(iter(results.values())).shape[1]
    by_temperature: dict[float, dict[str, np.ndarray]] = {}
    for (kind, temperature), counts in sorted(results.items()):
        by_temperature.setdefault(temperature, {})[kind] = counts
    sizes = {temperature: sum(each.sum() for each in kinds.values()) for temperature, kinds in by_temperature.items()}
    parts = [f"# {title}", "", *(f"- {line}" for line in lines), ""]
    for temperature in sorted(sorted(sizes, key=sizes.__getitem__)[-MAX_TEMPERATURES:]):
        name = "greedy" if temperature == 0 else f"temperature {temperature:g}, coupled"
        kinds = by_temperature[temperature]
        if len(kinds) > 1:
            kinds = kinds | {ALL: np.sum(list(kinds.values()), axis=0)}
        by_source = np.stack(list(kinds.values())).transpose(1, 2, 0, 3)  # [num_sources, max_k, num_kinds, max_k + 1]
        parts += [f"## Tokens per step, {name}", "", f"Kinds of held-out answers: {' / '.join(kinds)}.", ""]
        parts += _table(
            ["", *(f"k = {k}" for k in range(1, max_k + 1))],
            [[source, *map(_figures, each)] for source, each in zip(SOURCES, by_source, strict=True)],
        )
        parts += ["", "Acceptance by position, given that earlier positions were accepted (head only):", ""]
        parts += _table(
            ["", *map(str, range(1, max_k + 1))],
            [[kind, *map(_figure, acceptance(counts[HEAD, -1]))] for kind, counts in kinds.items()],
        )
        parts += ["", f"Expected speedup, {name}, by number of clients:", ""]
        parts += _table(
            ["", *map(str, CLIENTS)],
            [
                [kind, *(_best(counts, *each, num_at_once) for each in zip(row_seconds, head_seconds, strict=True))]
                for kind, counts in kinds.items()
            ],
        )
        parts.append("")
    watched = point.kinds | {ALL: [point.held_out_loss, point.acceptance]}
    parts += ["## Held-out texts", "", "By kind of text: loss of the first position; acceptance by position.", ""]
    parts += _table(
        ["", "loss", *map(str, range(1, len(point.acceptance) + 1))],
        [[kind, *map(_figure, (losses[0], *shares))] for kind, (losses, shares) in watched.items()],
    )
    parts += [
        "",
        "## Costs on this machine",
        "",
        "Milliseconds per step, by number of clients and rows per client, and per draft step of the head.",
        "Medians. The processor's caches are flushed before each step, as the target's weights flush them in a node.",
        "",
    ]
    parts += _table(
        ["clients", *map(str, range(1, len(row_seconds[0]) + 1)), "head"],
        [
            [str(clients), *(f"{1e3 * value:.2f}" for value in (*rows, head))]
            for clients, rows, head in zip(CLIENTS, row_seconds, head_seconds, strict=True)
        ],
    )
    return "\n".join([*parts, ""])


def tokens_per_step(counts: np.ndarray) -> float:
    """Returns 1 + the mean number of accepted draft tokens; NaN without steps. `counts[n]`: steps that accepted n."""
    return float(counts @ np.arange(1, len(counts) + 1) / counts.sum()) if counts.any() else math.nan


def acceptance(counts: np.ndarray) -> list[float]:
    """Returns the acceptance at each draft position, over the steps in which all earlier draft tokens were accepted."""
    tried = counts[::-1].cumsum()[::-1]
    return [right / before if before else math.nan for before, right in itertools.pairwise(tried)]


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _figures(by_kind: np.ndarray) -> str:
    return " / ".join(_figure(tokens_per_step(counts)) for counts in by_kind)


def _best(counts: np.ndarray, row_seconds: Sequence[float], head_seconds: float, num_at_once: int) -> str:
    found = [
        (speedup(tokens_per_step(steps), k, row_seconds, seconds * -(-k // num_at_once)), SOURCES[source], k)
        for source, seconds in ((BOTH, head_seconds), (LOOKUP, 0.0))
        for k, steps in enumerate(counts[source], 1)
        if steps.any()
    ]
    return "{:.2f} ({}, k = {})".format(*max(found)) if found else _figure(math.nan)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
