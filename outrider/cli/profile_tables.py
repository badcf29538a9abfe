"""The tables of `outrider profile`: engine threads and requests. Each table adds up to the wall-clock time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from outrider.cli.request_times import BEFORE_PREFILL, RequestTimes
from outrider.profile import Part, Profile, ProfiledStep, StepKind, parts_in_order

NAME_WIDTH, COLUMN_WIDTH = 24, 28


@dataclass(frozen=True, slots=True)
class Column:
    """One node's steps of one kind."""

    profile: Profile
    kind: StepKind
    steps: Sequence[ProfiledStep]

    def cell(self, nanoseconds: int) -> str:
        """Returns the share of the node's time, and mean milliseconds per step. Means add up; medians would not."""
        return f"{nanoseconds / max(covered(self.profile), 1):.1%}{nanoseconds / len(self.steps) / 1e6:>11.3f}"

    def spent(self, part: str) -> int:
        """Returns the total nanoseconds of a part."""
        return sum(step.nanoseconds.get(part, 0) for step in self.steps)


def covered(profile: Profile) -> int:
    """Returns nanoseconds from the first step's beginning to the last one's end."""
    return sum(sum(step.nanoseconds.values()) for step in profile.steps)


def engine_lines(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yields the engine threads' time by part of a step: a node's columns add up to 100 % of the wall-clock time."""
    for profile in profiles:
        yield (
            f"{profile.node}: {len(profile.steps)} steps, which cover {covered(profile) / 1e9:.2f} of "
            f"{profile.seconds:.2f} s{f'; weights: {profile.weights}' if profile.weights else ''}; a token has "
            f"{profile.kv_bytes_per_token:,} bytes of K and V, {profile.feature_bytes_per_token:,} of features"
        )
        if held := profile.longest_kv_bytes:
            share = held / (profile.num_longest_tokens * profile.kv_bytes_per_token)
            yield (
                f"{profile.node}: the longest sequence has {profile.num_longest_tokens:,} tokens and {held:,} bytes of "
                f"K and V, {share:.2f} of {profile.kv_bytes_per_token:,} a token"
            )
    columns = [
        Column(profile, kind, steps)
        for profile in profiles
        for kind in StepKind
        if (steps := [step for step in profile.steps if step.kind is kind])
    ]
    if not columns:
        return
    yield ""
    yield _row("share, ms a step", (column.profile.node for column in columns))
    yield _row("", (f"{column.kind}, {len(column.steps)} steps" for column in columns))
    yield _row("", (_shape(column.steps) for column in columns))
    parts = [Part.IDLE, *parts_in_order([step for column in columns for step in column.steps])]
    for part in parts:
        yield _row(part, (column.cell(column.spent(part)) for column in columns))
    yield _row("total", (column.cell(sum(map(column.spent, parts))) for column in columns))
    event_loop = (sum(step.event_loop_nanoseconds for step in column.steps) for column in columns)
    yield _row("beside: event loop", map(Column.cell, columns, event_loop))
    forward = [part for part in parts if part.startswith(Part.FORWARD)]
    shares = (sum(map(column.spent, forward)) / max(column.profile.seconds * 1e9, 1) for column in columns)
    yield f"  forward passes of all nodes: {sum(shares):.1%} of the wall clock"


def request_lines(requests: Sequence[RequestTimes], profiles: Sequence[Profile]) -> Iterator[str]:
    """Yields the times of a mean request, from arrival to last token. Steps are split in the engines' average
    proportions.

    Time that neither the router's timeline nor the steps explain has its own row.
    """
    if not requests:
        yield (
            "no request ended meanwhile that one prefill and one decode node computed: decode nodes compute short "
            "prompts themselves, so give it longer ones"
        )
        return

    def mean(name: str) -> float:
        return fmean(each[name] for each in requests)

    in_prompt = _mean_step(profiles, {each["prefill_node"] for each in requests})
    in_decode = _mean_step(profiles, {each["decode_node"] for each in requests})
    num_chunks, num_steps, step, total = mean("num_chunks"), mean("num_steps"), sum(in_decode.values()), mean("total")
    rows = [
        *((name, mean(name)) for name in BEFORE_PREFILL),
        *((f"prefill {part}", num_chunks * seconds) for part, seconds in in_prompt.items()),
        ("prefill: others, wire", mean("prefill") - num_chunks * sum(in_prompt.values())),
        ("KV out and in, exposed", mean("transfer")),
        ("KV commit", mean("commit")),
        ("decode: joins the batch", mean("first_token") - step),
        *((f"decode {part}", num_steps * seconds) for part, seconds in in_decode.items()),
        ("decode: unexplained", mean("decoding") - (num_steps - 1) * step),
    ]
    rows.append(("router: unexplained", total - sum(seconds for _, seconds in rows)))
    tokens = f"{mean('num_prompt_tokens'):.0f} prompt tokens"
    yield f"a request, mean of {len(requests)}: {tokens}, {num_chunks:.1f} chunks, {num_steps:.0f} steps"
    for name, seconds in rows:
        yield f"  {name:<{NAME_WIDTH}}{seconds * 1e3:>10.1f} ms{seconds / max(total, 1e-9):>8.1%}"
    yield f"  {'total':<{NAME_WIDTH}}{total * 1e3:>10.1f} ms"


def _mean_step(profiles: Iterable[Profile], nodes: Collection[str]) -> Mapping[str, float]:
    """Returns the mean seconds per step of these nodes by part, without idle time, in which no request waits."""
    steps = [step for profile in profiles if profile.node in nodes for step in profile.steps]
    return {part: fmean(step.nanoseconds.get(part, 0) for step in steps) / 1e9 for part in parts_in_order(steps)}


def _shape(steps: Sequence[ProfiledStep]) -> str:
    rows, sequences = (median(getattr(step, name) for step in steps) for name in ("num_rows", "num_sequences"))
    return f"{rows:g} rows, {sequences:g} sequences"


def _row(name: str, cells: Iterable[str]) -> str:
    """Formats a row. Only the end of a long address is shown, since it has the port."""
    ends = (cell[1 - COLUMN_WIDTH :] for cell in cells)
    return f"  {name:<{NAME_WIDTH}.{NAME_WIDTH}}" + "".join(f"{end:>{COLUMN_WIDTH}}" for end in ends)
