"""The view of `outrider top`: turns a `History` into lines of text, independently of terminals and routers.

Names, conditions and errors come from other processes. They therefore become `Text`, never markup, and their
unprintable characters are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from outrider.cli.top_history import History, NodeTrail
from outrider.node import ClusterStatus, Model, NodeRole, NodeState, NodeStatus

MAX_WORDS = 300
"""Maximum number of characters shown of a text from another process."""
MAX_PROBLEMS = 6
MIN_NAME_WIDTH, MAX_NAME_WIDTH = 12, 32
FULL_KV = 0.9
SPARKS = "▁▂▃▄▅▆▇█"
BAR_CELLS = 8
BAR_PARTS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")

_STYLES = {
    "serving": "green",
    "starting": "cyan",
    "draining": "yellow",
    "late": "bold yellow",
    "lost": "bold red",
    "refused": "bold red",
    "unreachable": "bold red",
}
_REPORTING = (NodeState.SERVING, NodeState.DRAINING)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A Rich renderable of any width. On a narrow terminal it has fewer columns."""

    history: History
    target: str
    model: Model | None = None  # None: the router has not reported one yet
    error: str = ""  # why there are no new figures; empty if there are
    age_seconds: float = 0.0  # age of the last figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._head()
        status = self.history.status
        if status is not None:
            for line in self._figures(status, options.max_width):
                if self.error:
                    line.stylize("dim")
                yield line

    # ------------------------------------------------------------ above the table

    def _head(self) -> Iterator[Text]:
        has_figures = self.history.status is not None
        title = Text.assemble(("outrider top", "bold"), "  ", (escaped(self.target), "cyan"))
        if self.model is not None:
            title.append(f"  {escaped(self.model.name)}  version {escaped(self.model.version)}")
        yield title
        if self.error and has_figures:
            age = f"no report for {self.age_seconds:.0f} s, the figures are old: "
            yield Text(f"{age}{escaped(self.error)}; trying again", style="bold white on red")
        elif self.error:
            yield Text(f"{escaped(self.error)}; trying again", style="bold white on red")
        elif not has_figures:
            yield Text("connecting …")

    def _figures(self, status: ClusterStatus, width: int) -> Iterator[Text]:
        yield _requests(status)
        yield _totals(status)
        yield self._moves(status)
        yield from _problems(status.nodes)
        name_width, columns = _fitting(width, status.nodes)
        for role in (*NodeRole, None):
            nodes = [node for node in status.nodes if node.role is role]
            if not nodes:
                continue
            name = f"{'OTHER' if role is None else role.name} ({len(nodes)})"
            yield _row(name, name_width, columns, [(each.title, "") for each in columns], "bold")
            trails = [self.history.of(node.name) for node in nodes]
            peak = max(_finite(rate) for trail in trails for rate in trail.tokens_per_second.by_bucket())
            for node, trail in zip(nodes, trails, strict=True):
                is_shown = node.state in _REPORTING  # zeros of a silent node would look like measurements
                found = dict(zip(_COLUMNS, _cells(node, trail, peak), strict=True))
                cells = [found[each] if is_shown or each.is_left else ("", "") for each in columns]
                yield _row(escaped(node.name), name_width, columns, cells, _STYLES.get(_state_word(node), ""))

    def _moves(self, status: ClusterStatus) -> Text:
        line = Text(f"{status.num_moves:,} moves since the router's start")
        num_lately = self.history.moves_in_last_minute
        return line.append(f", {num_lately:,} in the last minute", "bold yellow" if num_lately else "")


def _requests(status: ClusterStatus) -> Text:
    line = Text(f"{status.num_requests_running:,} running, ", "bold")
    line.append(f"{status.num_requests_waiting:,} waiting", "yellow" if status.num_requests_waiting else "")
    if status.num_requests_waiting:
        oldest = _short(status.oldest_wait_seconds)
        line.append(f" ({status.num_waiting_tokens:,} prompt tokens, the oldest for {oldest} s)", "not bold")
    return line


def _totals(status: ClusterStatus) -> Text:
    by_role = status.by_role()
    totals = {role: sum(_finite(node.load.tokens_per_second) for node in nodes) for role, nodes in by_role.items()}
    return Text(
        f"tokens/s: {_short(totals[NodeRole.PREFILL])} prompt, {_short(totals[NodeRole.DECODE])} generated, "
        f"{_short(totals[NodeRole.DRAFT])} proposed"
    )


def _problems(nodes: Sequence[NodeStatus]) -> Iterator[Text]:
    """Yields a line for each unhealthy node, with the complete reason."""
    sick = [node for node in nodes if node.condition or node.state is NodeState.LOST]
    for node in sick[:MAX_PROBLEMS]:
        standing = _state_word(node)
        reason = "" if node.condition in ("", standing) else node.condition.removeprefix(f"{standing}: ")
        line = f"! {escaped(node.name)} is {standing}{': ' if reason else ''}{escaped(reason)}"
        yield Text(line, style=_STYLES.get(standing, "bold red"))
    if len(sick) > MAX_PROBLEMS:
        yield Text(f"! and {len(sick) - MAX_PROBLEMS} more", style="bold red")


# ------------------------------------------------------------ the table

_Cell = tuple[str, str]
"""A text and its style."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    rank: int  # a narrow terminal omits columns of high rank
    is_left: bool = False  # for words and pictures; numbers are right-aligned


FIRST_EXTRA = 9
"""Columns of this rank or a higher one are shown only if complete names still fit."""

_COLUMNS = (
    _Column("STATE", 11, 1, is_left=True),
    _Column("RUN/WAIT", 9, 2),
    _Column("KV", 4, 4),
    _Column("", BAR_CELLS, 10, is_left=True),
    _Column("TOK/S", 6, 3),
    _Column("LAST MINUTE", 12, 9, is_left=True),
    _Column("ACCEPT", 6, 5),
    _Column("HITS", 4, 7),
    _Column("KV MB/S", 7, 8),
    _Column("STEPS/S", 7, 6),
)


def _cells(node: NodeStatus, trail: NodeTrail, peak: float) -> tuple[_Cell, ...]:
    """Returns the cells of all columns. `peak` is the role's highest rate of the last minute."""
    load, standing, length = node.load, _state_word(node), node.load.mean_acceptance_length
    used, step_rate = _kv_use(node), trail.steps.rise_per_second
    full = "bold yellow" if used is not None and used >= FULL_KV else ""
    return (
        (standing, _STYLES.get(standing, "")),
        (f"{_short(load.num_running)}/{_short(load.num_waiting)}", "yellow" if load.num_waiting else ""),
        ("" if used is None else f"{used:.0%}", full),
        ("" if used is None else _bar(used), full or "blue"),
        (_short(load.tokens_per_second), "bold"),
        (_sparkline(trail, peak), "cyan"),
        (f"{length:.2f}" if length else "", ""),
        (f"{load.look_ahead_hit_rate:.0%}" if length and node.role is NodeRole.DECODE else "", ""),
        ("" if node.role is NodeRole.DRAFT else _short(load.kv_bytes_per_second / 1e6), ""),
        ("–" if step_rate is None else _short(step_rate), ""),
    )


def _bar(used: float) -> str:
    num_eighths = round(used * BAR_CELLS * 8)
    bar = "█" * (num_eighths // 8) + BAR_PARTS[num_eighths % 8]
    return f"{bar:·<{BAR_CELLS}}"


def _sparkline(trail: NodeTrail, peak: float) -> str:
    rates, top = trail.tokens_per_second.by_bucket(), len(SPARKS) - 1
    return "".join(" " if rate is None else SPARKS[round(_finite(rate) / peak * top) if peak else 0] for rate in rates)


def _fitting(width: int, nodes: Sequence[NodeStatus]) -> tuple[int, list[_Column]]:
    """Returns the width of names, and the columns that fit."""
    longest = max((cell_len(escaped(node.name)) for node in nodes), default=0)
    name_width = min(max(longest, MIN_NAME_WIDTH), MAX_NAME_WIDTH)
    room = width - MIN_NAME_WIDTH
    chosen: set[str] = set()
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width + 1 <= room - (name_width - MIN_NAME_WIDTH if column.rank >= FIRST_EXTRA else 0):
            chosen.add(column.title)
            room -= column.width + 1
    return min(name_width, MIN_NAME_WIDTH + room), [column for column in _COLUMNS if column.title in chosen]


def _row(name: str, name_width: int, columns: Sequence[_Column], cells: Sequence[_Cell], style: str) -> Text:
    """Formats a row. If a name is too long, only its end is shown, because names differ there."""
    if cell_len(name) > name_width:
        name = f"…{name[-name_width:]}"
    while cell_len(name) > name_width:
        name = f"…{name[2:]}" if name.startswith("…") else f"…{name[1:]}"
    row = Text(set_cell_size(name, name_width), no_wrap=True, overflow="crop")
    row.stylize(style)
    for column, (text, cell_style) in zip(columns, cells, strict=True):
        padding = " " * (0 if column.is_left else max(column.width - cell_len(text), 0))
        row.append(" ").append(set_cell_size(padding + text, column.width), cell_style)
    row.rstrip()
    return row


# ------------------------------------------------------------ words and numbers


def escaped(words: str) -> str:
    """Escapes control characters, invisible ones and line ends, so that terminals print the text literally."""
    line = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in words[: MAX_WORDS + 1]
    )
    return line if len(line) <= MAX_WORDS else f"{line[: MAX_WORDS - 1]}…"


def _state_word(node: NodeStatus) -> str:
    """Returns one word for the node's state: the router's view if it is worse than the node's own."""
    said = node.condition.partition(":")[0]
    if said in ("late", "refused") or (said == "unreachable" and node.state is not NodeState.LOST):
        return said
    return "?" if node.state is None else node.state.name.lower()


def _kv_use(node: NodeStatus) -> float | None:
    """Returns the used share of the KV cache, 0 to 1; None if the node has no cache."""
    total = node.load.kv_blocks_total
    return min(max(1.0 - node.load.kv_blocks_free / total, 0.0), 1.0) if total else None


def _finite(number: float | None) -> float:
    return number if number is not None and isfinite(number) and number > 0.0 else 0.0


def _short(number: float) -> str:
    """Formats a number in at most five characters."""
    if not isfinite(number) or abs(number) >= 1e15:
        return "?"
    if abs(number) < 9.95:
        return f"{number:.1f}".removesuffix(".0")
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.0f}{unit}" if not unit or abs(number) >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}T"
