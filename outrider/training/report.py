"""Phase 5: what the head is worth on held-out answers, and what that means on this machine. Writes out/report.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.base import HeadModel, HeadRows
from outrider.training.hidden_states import CLIENTS, PRICED_CONTEXT, RowPrices, fastest
from outrider.training.replay import BOTH, HEAD, SOURCES, Results, Walk

ALL = "all"
MOST_TEMPERATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What the figures rest on."""

    title: str
    lines: Sequence[str]  # of the run: data, time, size
    prices: RowPrices
    head_seconds: dict[int, float]  # of one draft step, by clients


def measure_head(head: HeadModel, device: torch.device, *, limit_seconds: float) -> dict[int, float]:
    """Seconds of one draft step by clients: a row for each, whose attention reads PRICED_CONTEXT rows."""
    spec = head.spec
    dtype = getattr(torch, spec.dtype)
    seconds = {}
    for clients in CLIENTS:
        rows = HeadRows(
            token_ids=torch.zeros(clients, dtype=torch.long, device=device),
            features=torch.ones(clients, spec.width, dtype=dtype, device=device),
            depths=torch.zeros(clients, dtype=torch.long, device=device),
            positions=torch.full((clients,), PRICED_CONTEXT, device=device),
        )
        shape = (clients, spec.num_kv_heads, PRICED_CONTEXT, spec.head_dim)
        seen = torch.ones(shape, dtype=dtype, device=device)

        def attend(
            layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor = seen
        ) -> Tensor:
            """Of each row over a cache of its own."""
            return torch.nn.functional.scaled_dot_product_attention(
                query.unsqueeze(2), seen, seen, scale=scaling, enable_gqa=True
            ).squeeze(2)

        def step(rows: HeadRows = rows, attend: Callable[..., Tensor] = attend) -> Tensor:
            return head.logits(head.forward(rows, attend), rows.depths).argmax(-1).cpu()

        with torch.inference_mode():
            seconds[clients] = fastest(step, limit_seconds)
    return seconds


def speedup(tokens_per_step: float, k: int, clients: int, prices: RowPrices, head_seconds: dict[int, float]) -> float:
    """Over plain decoding, when all clients' steps draft k tokens with the head and verify them together."""
    plain, *drafted = prices.seconds[clients]
    return tokens_per_step * plain / (drafted[k - 1] + k * head_seconds[clients])


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
        parts += ["", f"Speedup to expect, {name}, by clients at once (the best k):", ""]
        parts += _table(
            ["", *map(str, CLIENTS)],
            [[kind, *(_best(facts, results, kind, temperature, each, most) for each in CLIENTS)] for kind in kinds],
        )
        parts.append("")
    parts += [
        "## Prices on this machine",
        "",
        "Milliseconds of a step, by clients and rows of each; the head's draft step.",
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
        (speedup(walk.tokens_per_step, k, clients, facts.prices, facts.head_seconds), k)
        for k in range(1, most + 1)
        if (walk := results.get((kind, temperature, BOTH, k))) is not None and walk.num_steps
    ]
    if not found:
        return "–"
    factor, k = max(found)
    return f"{factor:.2f} (k = {k})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
