"""Phase 5: what the head is worth on held-out answers, and what that means on this machine. Writes out/report.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.heads.base import HeadModel
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, start_kernels
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.training.hidden_states import CLIENTS, PRICED_CONTEXT, RowPrices, cache_flush, median_seconds
from outrider.training.replay import BOTH, HEAD, LOOKUP, SOURCES, Results, Walk

ALL = "all"
MOST_TEMPERATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What the figures rest on."""

    title: str
    lines: Sequence[str]  # of the run: data, time, size
    prices: RowPrices
    head_seconds: dict[int, float]  # of one draft step, by clients


class _AnyFeatures:
    """Of a text that is nobody's."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return PRICED_CONTEXT

    def read(self, start: int, end: int) -> Tensor:
        return torch.ones(end - start, self._width)


def measure_head(
    head: HeadModel, config: ModelConfig, device: torch.device, *, limit_seconds: float
) -> dict[int, float]:
    """Seconds of one draft step by clients: each decides a token after PRICED_CONTEXT others, as in a node.

    With caches flushed before each: in a node the target has read its own weights before a head's step.
    """
    choice = choose_model_kernels(config, device)
    forward = HeadForward.of(
        head,
        num_cached_tokens=2 * max(CLIENTS) * PRICED_CONTEXT,
        known_token_ids=torch.ones(head.spec.vocab_size, dtype=torch.bool),
        device=device,
        kernels=None if choice.library is None else start_kernels(choice, config),
    )
    options = RequestOptions(sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    start = SequenceStart(options=options, sample=0, prompt_length=1)
    features, seconds = _AnyFeatures(head.reduction.width), {}
    flush = cache_flush(device)
    paths: list[PathRows] = []
    for clients in CLIENTS:
        while len(paths) < clients:
            blocks = forward.pool.allocate(forward.pool.num_blocks_for(PRICED_CONTEXT + 1))
            sampling, known = forward.start(start, (0,)), PRICED_CONTEXT + 1
            paths.append(
                PathRows((0,), PRICED_CONTEXT, blocks, sampling, (), 1, features=features, num_committed=known)
            )
        seconds[clients] = median_seconds(partial(forward.decide, paths, ()), flush, limit_seconds)
    return seconds


def speedup(tokens_per_step: float, k: int, clients: int, prices: RowPrices, head_seconds: float) -> float:
    """Over plain decoding, when all clients' steps draft k tokens and verify them together.

    `head_seconds`: of one draft step for all of them; 0 for lookup.
    """
    plain, *drafted = prices.seconds[clients]
    return tokens_per_step * plain / (drafted[k - 1] + k * head_seconds)


def write_report(facts: ReportFacts, results: Results) -> str:
    """As Markdown."""
    results = _with_all(results)
    kinds = sorted({kind for kind, *_ in results}, key=lambda kind: (kind == ALL, kind))
    most = max(k for *_, k in results)
    counts = Counter({temperature: 0 for _, temperature, _, _ in results})
    for (kind, temperature, source, k), walk in results.items():
        if (kind, source, k) == (ALL, HEAD, 1):
            counts[temperature] += walk.num_tokens
    parts = [f"# {facts.title}", "", *(f"- {line}" for line in facts.lines), ""]
    for temperature, _ in sorted(counts.most_common(MOST_TEMPERATURES)):
        name = "greedy" if temperature == 0 else f"temperature {temperature:g}, coupled"
        rows = [
            [source, *(_figures(results, kinds, temperature, source, k) for k in range(1, most + 1))]
            for source in SOURCES
        ]
        parts += [f"## Tokens a step, {name}", "", f"Of held-out answers: {' / '.join(kinds)}.", ""]
        parts += _table(["", *(f"k = {k}" for k in range(1, most + 1))], rows)
        parts += ["", "Acceptance by position, the ones before being right (head alone):", ""]
        parts += _table(
            ["", *(str(position + 1) for position in range(most))],
            [[kind, *_acceptance(results, kind, temperature, most)] for kind in kinds],
        )
        parts += ["", f"Speedup to expect, {name}, by clients at once:", ""]
        parts += _table(
            ["", *map(str, CLIENTS)],
            [[kind, *(_best(facts, results, kind, temperature, each, most) for each in CLIENTS)] for kind in kinds],
        )
        parts.append("")
    parts += [
        "## Prices on this machine",
        "",
        "Milliseconds of a step, by clients and rows of each; the head's draft step.",
        "Medians, with the processor's caches flushed before each: a head's step follows one of the target.",
    ]
    rows = [
        [
            str(each),
            *(f"{1e3 * value:.2f}" for value in facts.prices.seconds[each]),
            f"{1e3 * facts.head_seconds[each]:.2f}",
        ]
        for each in CLIENTS
    ]
    parts += ["", *_table(["clients", *map(str, range(1, len(facts.prices.seconds[1]) + 1)), "head"], rows), ""]
    return "\n".join(parts)


def _with_all(results: Results) -> Results:
    """And all kinds together, where there are several."""
    if len({kind for kind, *_ in results}) < 2:
        return results
    found = dict(results)
    for (_, *key), walk in results.items():
        total = found.setdefault((ALL, *key), Walk(tried=[0] * len(walk.tried), accepted=[0] * len(walk.tried)))  # type: ignore[arg-type]
        total.num_tokens += walk.num_tokens
        total.num_steps += walk.num_steps
        total.tried = [one + other for one, other in zip(total.tried, walk.tried, strict=True)]
        total.accepted = [one + other for one, other in zip(total.accepted, walk.accepted, strict=True)]
    return found


def _figures(results: Results, kinds: Sequence[str], temperature: float, source: str, k: int) -> str:
    walks = (results.get((kind, temperature, source, k)) for kind in kinds)
    return " / ".join("–" if walk is None or not walk.num_steps else f"{walk.tokens_per_step:.2f}" for walk in walks)


def _acceptance(results: Results, kind: str, temperature: float, most: int) -> list[str]:
    walk = results.get((kind, temperature, HEAD, most), Walk(tried=[0] * most, accepted=[0] * most))
    pairs = zip(walk.accepted or [0] * most, walk.tried or [0] * most, strict=True)
    return [f"{right / tried:.2f}" if tried else "–" for right, tried in pairs]


def _best(facts: ReportFacts, results: Results, kind: str, temperature: float, clients: int, most: int) -> str:
    found = [
        (speedup(walk.tokens_per_step, k, clients, facts.prices, head_seconds), source, k)
        for source, head_seconds in ((BOTH, facts.head_seconds[clients]), (LOOKUP, 0.0))
        for k in range(1, most + 1)
        if (walk := results.get((kind, temperature, source, k))) is not None and walk.num_steps
    ]
    if not found:
        return "–"
    factor, source, k = max(found)
    return f"{factor:.2f} ({source}, k = {k})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
