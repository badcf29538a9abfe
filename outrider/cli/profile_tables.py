"""The tables of `outrider profile`: engine threads and requests, each adding up to the wall clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from outrider.cli.request_times import RequestTimes
from outrider.profile import Part, Profile, ProfiledStep, StepKind, parts_in_order

NAME_WIDTH, COLUMN_WIDTH = 24, 28


@dataclass(frozen=True, slots=True)
class Column:
    """The steps of one kind of one node."""

    profile: Profile
    kind: StepKind
    steps: Sequence[ProfiledStep]

    def cell(self, nanoseconds: int) -> str:
        """The share of the node's time, and milliseconds a step: means add up, medians do not."""
        return f"{nanoseconds / covered(self.profile):.1%}{nanoseconds / len(self.steps) / 1e6:>11.3f}"

    def spent(self, part: str) -> int:
        """Nanoseconds in all."""
        return sum(step.nanoseconds.get(part, 0) for step in self.steps)


def covered(profile: Profile) -> int:
    """Nanoseconds from the first step's beginning to the last one's end."""
    return sum(sum(step.nanoseconds.values()) for step in profile.steps)


def columns_of(profiles: Iterable[Profile]) -> list[Column]:
    return [
        Column(profile, kind, steps)
        for profile in profiles
        for kind in StepKind
        if (steps := [step for step in profile.steps if step.kind is kind])
    ]


def engine_lines(profiles: Sequence[Profile]) -> Iterator[str]:
    """The engine threads' time by part of a step: the columns of a node add up to 100 % of the wall clock."""
    for profile in profiles:
        yield (
            f"{profile.node}: {len(profile.steps)} steps, which cover {covered(profile) / 1e9:.2f} of "
            f"{profile.seconds:.2f} s; a token has {profile.kv_bytes_per_token:,} bytes of K and V, "
            f"{profile.feature_bytes_per_token:,} of features"
        )
    columns = columns_of(profiles)
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
    shares = (sum(map(column.spent, forward)) / (column.profile.seconds * 1e9) for column in columns)
    yield f"  forward passes of all nodes: {sum(shares):.1%} of the wall clock"


def request_lines(requests: Sequence[RequestTimes], profiles: Sequence[Profile]) -> Iterator[str]:
    """A mean request from its arrival to its last token. Steps are split as the engines' own are, on average.

    What neither the router's timeline nor the steps explain is a row of its own.
    """
    if not requests:
        yield "no request without a move ended meanwhile"
        return
    columns = columns_of(profiles)
    prompt = [column.steps for column in columns if column.profile.node in {each.prefill_node for each in requests}]
    decode = [column.steps for column in columns if column.profile.node in {each.decode_node for each in requests}]
    num_chunks, num_steps = fmean(each.num_chunks for each in requests), fmean(each.num_steps for each in requests)
    in_prompt, in_decode = _mean_step(prompt), _mean_step(decode)
    prefill = fmean(each.prefill for each in requests)
    first_token = fmean(each.first_token for each in requests)
    decoding = fmean(each.decoding for each in requests)
    rows = [
        ("encode", fmean(each.encode for each in requests)),
        ("queue", fmean(each.queue for each in requests)),
        ("open (grant)", fmean(each.open for each in requests)),
        *((f"prefill {part}", num_chunks * seconds) for part, seconds in in_prompt.items()),
        ("prefill: others, wire", prefill - num_chunks * sum(in_prompt.values())),
        ("KV out and in, exposed", fmean(each.transfer for each in requests)),
        ("KV commit", fmean(each.commit for each in requests)),
        ("decode: joins the batch", first_token - sum(in_decode.values())),
        *((f"decode {part}", num_steps * seconds) for part, seconds in in_decode.items()),
        ("decode: unexplained", decoding - (num_steps - 1) * sum(in_decode.values())),
        ("router: unexplained", fmean(each.unexplained for each in requests)),
    ]
    total = fmean(each.total for each in requests)
    tokens = f"{fmean(each.num_prompt_tokens for each in requests):.0f} prompt tokens"
    yield f"a request, mean of {len(requests)}: {tokens}, {num_chunks:.1f} chunks, {num_steps:.0f} steps"
    for name, seconds in rows:
        yield f"  {name:<{NAME_WIDTH}}{seconds * 1e3:>10.1f} ms{seconds / total:>8.1%}"
    yield f"  {'total':<{NAME_WIDTH}}{sum(seconds for _, seconds in rows) * 1e3:>10.1f} ms"


def _mean_step(groups: Sequence[Sequence[ProfiledStep]]) -> Mapping[str, float]:
    """Seconds of a step by part, without idle time: of a step that a request waits for."""
    steps = [step for group in groups for step in group]
    return {part: fmean(step.nanoseconds.get(part, 0) for step in steps) / 1e9 for part in parts_in_order(steps)}


def _shape(steps: Sequence[ProfiledStep]) -> str:
    rows, sequences = (median(getattr(step, name) for step in steps) for name in ("num_rows", "num_sequences"))
    return f"{rows:g} rows, {sequences:g} sequences"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<{NAME_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)
