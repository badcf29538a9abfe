"""Formats figures as a table for people and as JSON for programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from outrider.bench.load import Level, RequestRecord
from outrider.bench.machine import MachineInfo
from outrider.bench.measure import BenchResult, Comparison, LevelFigures, Percentiles

SCHEMA_VERSION = 1


def as_json(
    result: BenchResult,
    *,
    machine: MachineInfo,
    options: dict[str, Any],
    model: dict[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """Returns the report, with JSON values only. Durations are in seconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(command),
        "machine": asdict(machine),
        "model": model,
        "options": options,
        "levels": [asdict(figures) for figures in result.figures],
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
    }


def as_text(result: BenchResult, *, machine: MachineInfo, model: dict[str, Any]) -> str:
    """Returns the table as several lines, without a trailing newline."""
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    lines = [
        f"{machine.processor}, {machine.num_cores} cores, {memory}, {machine.system}, commit {machine.commit or '?'}",
        ", ".join(f"{name} {value}" for name, value in model.items()),
        "",
        *_table([_HEADINGS, *(_row(figures) for figures in result.figures)]),
    ]
    failed = [f for f in result.figures if f.errors]
    for figures in failed:
        lines.append(f"errors at {figures.level} ({_mode(figures)}): {_counts(figures.errors)}")
        lines += [f"  {reason}: {message}" for reason, message in sorted(figures.error_messages.items())]
    if result.comparisons:
        lines += ["", *_table([_COMPARISON_HEADINGS, *(_comparison_row(one) for one in result.comparisons)])]
    return "\n".join(lines)


_HEADINGS = (
    "clients",
    "mode",
    "requests",
    "errors",
    "tokens/s",
    "per stream",
    "TTFT ms p50/p90/p99",
    "ITL ms p50/p90/p99",
    "acceptance",
    "accept. length",
    "hit rate",
    "others' CPU",
)
_COMPARISON_HEADINGS = ("clients", "pairs", "tokens/s ×", "per stream ×", "TTFT ×", "identical")


def _row(figures: LevelFigures) -> tuple[str, ...]:
    share = figures.others_cpu_share
    return (
        figures.level,
        _mode(figures),
        str(figures.num_requests),
        str(sum(figures.errors.values())),
        f"{figures.tokens_per_second:.1f}",
        f"{figures.stream_tokens_per_second:.1f}",
        _milliseconds(figures.ttft_seconds),
        _milliseconds(figures.itl_seconds),
        *_acceptance(figures),
        f"{share:.0%}" if share is not None else "?",
    )


def _acceptance(figures: LevelFigures) -> tuple[str, str, str]:
    if not figures.mean_acceptance_length:
        return "-", "-", "-"
    hit_rate = f"{figures.look_ahead_hit_rate:.0%}"
    return f"{figures.acceptance_rate:.0%}", f"{figures.mean_acceptance_length:.2f}", hit_rate


def _comparison_row(comparison: Comparison) -> tuple[str, ...]:
    compared = comparison.num_compared_answers
    return (
        comparison.level,
        str(comparison.num_pairs),
        f"{comparison.tokens_per_second_ratio:.2f}",
        f"{comparison.stream_tokens_per_second_ratio:.2f}",
        f"{comparison.ttft_ratio:.2f}",
        f"{comparison.num_identical_answers}/{compared}" if compared else "-",
    )


def _mode(figures: LevelFigures) -> str:
    return "speculative" if figures.speculation else "plain"


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(reasons.items()))


def _milliseconds(percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return "-"
    return " / ".join(f"{1000 * value:.0f}" for value in (percentiles.p50, percentiles.p90, percentiles.p99))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


class LineProgress:
    """Shows progress: one line that is rewritten on a terminal, one line per pass on other outputs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._num_requests = 0
        self._started_at = 0.0
        self._num_done = self._num_tokens = 0
        self._failures: Counter[str] = Counter()

    def pass_started(self, level: Level, *, speculation: bool, num_requests: int, is_warm_up: bool = False) -> None:
        unit = "requests" if level.is_open_loop else "clients"
        what = "warm-up, not measured" if is_warm_up else f"{level.name} {unit}"
        self._title = f"{what}, {'speculative' if speculation else 'plain'}"
        self._num_requests = num_requests
        self._started_at = time.monotonic()
        self._num_done = self._num_tokens = 0
        self._failures.clear()
        self._show()

    def request_done(self, record: RequestRecord) -> None:
        self._num_done += 1
        self._failures.update([record.error] if record.error else [])
        self._num_tokens += record.num_tokens
        self._show()

    def pass_ended(self) -> None:
        self._stream.write("\r\033[K" if self._stream.isatty() else f"{self._line()}\n")
        self._stream.flush()

    def _show(self) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\033[K{self._line()}")
            self._stream.flush()

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started_at, 1e-9)
        failed = f", failed: {_counts(self._failures)}" if self._failures else ""
        rate = self._num_tokens / seconds
        return f"{self._title}: {self._num_done}/{self._num_requests} answers{failed}, {rate:.1f} tokens/s"
