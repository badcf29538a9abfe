"""Formats the sessions of all rounds as one table of medians over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from session import LevelResult, SessionResult

NOTHING = "–"
HEADINGS = (
    *("peer", "dtype", "plain 1", "4 / 8 / 16", "lookup 1 (chat / extract / code)", "lookup 16", "TTFT ms 1 / 16"),
    *("MiB", "others' CPU"),
)
KINDS = ("chat", "extract", "code")


@dataclass(frozen=True, slots=True)
class Row:
    """The row of a peer in one dtype."""

    plain: Sequence[SessionResult]
    lookup: Sequence[SessionResult]

    def cells(self) -> list[str]:
        sessions = [*self.plain, *self.lookup]
        good = [session for session in sessions if not session.error]
        kinds = " / ".join(
            _of(self.lookup, 1, lambda level, kind=kind: level.stream_by_kind.get(kind)) for kind in KINDS
        )
        return [
            sessions[0].peer,
            sessions[0].dtype,
            _of(self.plain, 1, _stream),
            " / ".join(_of(self.plain, clients, _total) for clients in (4, 8, 16)),
            f"{_of(self.lookup, 1, _stream)} ({kinds})",
            _of(self.lookup, 16, _total),
            " / ".join(_of(self.plain, clients, _ttft) for clients in (1, 16)),
            f"{median(session.resident_mib for session in good):.0f}" if good else NOTHING,
            f"{max((level.others_cpu_share for s in good for level in s.levels.values()), default=0.0):.0%}",
        ]

    def cells_of_lengths(self, lengths: Sequence[int]) -> list[str]:
        """Returns peer, dtype, and by length ms to the first token (and tokens/s after it), without speculation."""
        sessions = [*self.plain, *self.lookup]
        times = [
            f"{_of(self.plain, 1, lambda level, kind=str(length): level.ttft_by_kind.get(kind))} "
            f"({_of(self.plain, 1, lambda level, kind=str(length): level.stream_by_kind.get(kind))})"
            for length in lengths
        ]
        return [sessions[0].peer, sessions[0].dtype, *times]


def as_text(sessions: Sequence[SessionResult], prompt_tokens: Sequence[int] | None = None) -> str:
    """Returns a Markdown table, then one line per failure. `prompt_tokens`: the lengths, if kinds are lengths."""
    headings: Sequence[str] = HEADINGS
    if prompt_tokens:
        headings = ("peer", "dtype", *(f"{number} tokens" for number in prompt_tokens))
    cells_of_rows = [row.cells_of_lengths(prompt_tokens) if prompt_tokens else row.cells() for row in _rows(sessions)]
    rows = [headings, ["---"] * len(headings), *cells_of_rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    failures = [
        f"failed: {session.peer} {session.dtype} {'lookup' if session.speculation else 'plain'}, "
        f"round {session.round}: {session.error}"
        for session in sessions
        if session.error
    ]
    return "\n".join([*lines, *(["", *failures] if failures else [])])


def _rows(sessions: Sequence[SessionResult]) -> list[Row]:
    names = dict.fromkeys((session.peer, session.dtype) for session in sessions)
    grouped: Mapping[tuple[str, str], list[SessionResult]] = {
        name: [session for session in sessions if (session.peer, session.dtype) == name] for name in names
    }
    return [
        Row([one for one in group if not one.speculation], [one for one in group if one.speculation])
        for group in grouped.values()
    ]


def _of(sessions: Sequence[SessionResult], clients: int, read: Callable[[LevelResult], float | None]) -> str:
    """Returns the median over rounds with a value. Without any value: "failed" if a session failed, else NOTHING."""
    levels = [session.levels[clients] for session in sessions if clients in session.levels]
    values = [value for level in levels if (value := read(level)) is not None]
    if values:
        return f"{median(values):.0f}"
    return "failed" if any(session.error for session in sessions) else NOTHING


def _stream(level: LevelResult) -> float:
    return level.stream_tokens_per_second


def _total(level: LevelResult) -> float:
    return level.tokens_per_second


def _ttft(level: LevelResult) -> float:
    return level.ttft_p50_milliseconds
