"""Compares plain decoding, a drafter beside the target, and remote drafters: interleaved, on the same prompts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.three_lines.decode_side import LineNode, Passed, TimedProposer
from benchmarks.three_lines.pair import Pair
from benchmarks.three_lines.speed_model import SpeedModel, acceptance_of
from decode_node.drafting.client import DraftClient
from outrider.engine.engine import Engine
from outrider.errors import InternalError, PeerLostError
from outrider.speculation.draft_stream import DraftHello

PLAIN, COLOCATED = "plain", "colocated"
CONNECT_SECONDS = 60.0
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The settings of a comparison, which runs all lines in each round, for each temperature."""

    pair: Pair
    round_trips_ms: tuple[float, ...] = (0.0, 1.0, 5.0, 20.0)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_rounds: int = 1
    num_sequences: int = 1
    max_tokens: int = 128
    has_both: bool = False  # whether there are lines with a drafter beside the target and a remote one

    @property
    def description(self) -> str:
        return (
            f"{self.pair.description}; sequences: {self.num_sequences}, rounds: {self.num_rounds}, "
            f"tokens: {self.max_tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFigures:
    """The figures of one line at one temperature."""

    line: str
    temperature: float
    tokens_per_second: float
    speedup: float  # relative to the plain line
    predicted: float | None  # the speedup that the speed model predicts for the line's hit rate; None with two drafters
    explained: float | None  # the same prediction, with measured times and the line's draft length
    acceptance_rate: float
    hit_rate: float
    tokens_per_step: float  # per sequence
    draft_tokens_per_step: float  # verified draft tokens, per sequence
    step_seconds: float  # mean time from one step to the next


def remote(round_trip_ms: float) -> str:
    return f"remote_{round_trip_ms:g}ms"


def both(round_trip_ms: float) -> str:
    return f"both_{round_trip_ms:g}ms"


async def compare_lines(comparison: Comparison) -> list[LineFigures]:
    """Runs all lines.

    Raises: InternalError if two lines generate different tokens, PeerLostError if the drafter does not start or answer.
    """
    figures: list[LineFigures] = []
    with ThreadPoolExecutor(1, "engine") as engine_thread:
        for temperature in comparison.temperatures:
            figures += await _at_temperature(comparison, temperature, engine_thread)
    return figures


async def _at_temperature(
    comparison: Comparison, temperature: float, engine_thread: ThreadPoolExecutor
) -> list[LineFigures]:
    pair = comparison.pair

    async def answer(node: LineNode, number: int, max_tokens: int) -> list[list[int]]:
        prompts = pair.prompts(number, comparison.num_sequences)
        run = partial(node.answer, prompts, temperature=temperature, max_tokens=max_tokens)
        return await asyncio.get_running_loop().run_in_executor(engine_thread, run)

    async with contextlib.AsyncExitStack() as stack:
        drafter = _process("benchmarks.three_lines.drafter", pair.drafter_arguments(temperature=temperature))
        port = await stack.enter_async_context(drafter)
        cpus = ",".join(map(str, pair.draft_cpus))
        links = _process("benchmarks.three_lines.delayed_link", (port, cpus, *map(str, comparison.round_trips_ms)))
        ports = map(int, (await stack.enter_async_context(links)).split())
        engine = pair.engine()
        beside = TimedProposer(*pair.drafter_beside(engine, temperature=temperature))
        colocated = LineNode(pair, engine, beside=beside, takes_trees=pair.takes_trees)
        nodes = {PLAIN: LineNode(pair, pair.engine()), COLOCATED: colocated}
        for round_trip_ms, link in zip(comparison.round_trips_ms, ports, strict=True):
            engine = pair.engine()
            client = await stack.enter_async_context(_connected(link, pair, engine))
            nodes[remote(round_trip_ms)] = LineNode(pair, engine, client=client, takes_trees=pair.takes_trees)
            if comparison.has_both:
                engine = pair.engine()
                client = await stack.enter_async_context(_connected(link, pair, engine))
                second = TimedProposer(*pair.drafter_beside(engine, temperature=temperature))
                nodes[both(round_trip_ms)] = LineNode(
                    pair, engine, client=client, beside=second, takes_trees=pair.takes_trees
                )
        for node in nodes.values():  # warm-up, since a process's first steps are slow
            await answer(node, -1, WARM_UP_TOKENS)
            node.passed = Passed()
        beside.seconds, beside.num_tokens = 0.0, 0
        for number in range(comparison.num_rounds):
            answers = {
                name: await answer(node, number, comparison.max_tokens)
                for name, node in (list(nodes.items()) if number % 2 == 0 else reversed(nodes.items()))
            }
            if any(each != answers[PLAIN] for each in answers.values()):
                raise InternalError(f"tokens depend on drafts in round {number} at temperature {temperature:g}")
    passed = {name: node.passed for name, node in nodes.items()}
    measured = _measured(passed, beside, num_sequences=comparison.num_sequences)
    return [_figures(comparison, name, passed, measured, temperature) for name in passed]


def as_text(comparison: Comparison, figures: Sequence[LineFigures]) -> str:
    """Returns a table and the summary line, without a final newline."""
    rows = [
        (
            *("line", "temperature", "tokens/s", "speedup", "predicted", "by measured times", "acceptance", "hit rate"),
            *("tokens/step", "drafted/step", "ms/step"),
        )
    ]
    rows += [
        (
            each.line,
            f"{each.temperature:g}",
            f"{each.tokens_per_second:.1f}",
            f"{each.speedup:.2f}",
            "-" if each.predicted is None else f"{each.predicted:.2f}",
            "-" if each.explained is None else f"{each.explained:.2f}",
            "-" if each.line == PLAIN else f"{each.acceptance_rate:.0%}",
            f"{each.hit_rate:.0%}" if each.line not in (PLAIN, COLOCATED) else "-",
            f"{each.tokens_per_step:.2f}",
            f"{each.draft_tokens_per_step:.2f}",
            f"{1000 * each.step_seconds:.1f}",
        )
        for each in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        [
            comparison.description,
            *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
            summary(figures),
        ]
    )


def summary(figures: Sequence[LineFigures]) -> str:
    """Returns the last line of the output: speedups over plain decoding, as means over the temperatures."""
    names = dict.fromkeys(each.line for each in figures)
    parts = [f"{name}={_mean(each.speedup for each in figures if each.line == name):.2f}" for name in names]
    if (name := remote(1.0)) in names:
        parts.append(f"predicted_1ms={_mean(each.predicted or 0.0 for each in figures if each.line == name):.2f}")
    return "three-lines: " + " ".join(parts)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _measured(passed: Mapping[str, Passed], beside: TimedProposer, *, num_sequences: int) -> SpeedModel:
    """Returns a speed model with the times and acceptance measured in the plain and the colocated line."""
    plain, colocated = passed[PLAIN], passed[COLOCATED]
    counts = colocated.counts
    num_draft_tokens = counts.num_draft_tokens / max(1, counts.num_spec_steps)
    plain_seconds = plain.seconds / plain.num_steps
    drafting_seconds = beside.seconds / colocated.num_steps
    num_drafted = beside.num_tokens / colocated.num_steps / num_sequences
    share = counts.num_spec_steps / colocated.num_steps / num_sequences
    mean_seconds = colocated.seconds / colocated.num_steps - drafting_seconds
    accepted = counts.num_accepted_draft_tokens / max(1, counts.num_spec_steps)
    return SpeedModel(
        acceptance=acceptance_of(1.0 + accepted, num_draft_tokens),
        num_draft_tokens=num_draft_tokens,
        step_seconds=plain_seconds,
        token_seconds=drafting_seconds / num_drafted if num_drafted else 0.0,
        verify_seconds=max(plain_seconds, plain_seconds + (mean_seconds - plain_seconds) / share) if share else 0.0,
    )


def _figures(
    comparison: Comparison, name: str, passed: Mapping[str, Passed], measured: SpeedModel, temperature: float
) -> LineFigures:
    own, counts = passed[name], passed[name].counts
    rate, plain_rate = (each.num_tokens / each.seconds for each in (own, passed[PLAIN]))
    hit_rate = counts.num_hit_steps / counts.num_wanting_steps if counts.num_wanting_steps else 0.0
    share = counts.num_spec_steps / own.num_steps / comparison.num_sequences if name == COLOCATED else hit_rate
    own_length = replace(measured, num_draft_tokens=counts.num_draft_tokens / max(1, counts.num_spec_steps))
    num_sequence_steps = own.num_steps * comparison.num_sequences
    return LineFigures(
        line=name,
        temperature=temperature,
        tokens_per_second=rate,
        speedup=rate / plain_rate,
        predicted=_predicted(comparison.pair.speed_model(measured), name, share),
        explained=_predicted(own_length, name, share),
        acceptance_rate=counts.num_accepted_draft_tokens / max(1, counts.num_draft_tokens),
        hit_rate=hit_rate,
        tokens_per_step=own.num_tokens / num_sequence_steps,
        draft_tokens_per_step=counts.num_draft_tokens / num_sequence_steps,
        step_seconds=own.seconds / own.num_steps,
    )


def _predicted(model: SpeedModel, line: str, drafted_share: float) -> float | None:
    if line == PLAIN:
        return 1.0
    if line.startswith("both"):
        return None
    return model.colocated(drafted_share) if line == COLOCATED else model.ahead(drafted_share)


@contextlib.asynccontextmanager
async def _connected(port: int, pair: Pair, engine: Engine) -> AsyncIterator[DraftClient]:
    hello = DraftHello(
        incarnation=os.urandom(16),
        name="three-lines",
        vocab_size=pair.vocab_size,
        vocabulary_fingerprint=pair.vocabulary_fingerprint,
        max_model_len=pair.max_model_len,
        features=pair.features,
    )
    client = DraftClient([f"127.0.0.1:{port}"], hello, features=pair.feature_plane(engine))
    await client.start()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while not any(link.is_connected for link in client.links):  # noqa: ASYNC110 a thread's state
                await asyncio.sleep(0.01)
        yield client
    except TimeoutError as error:
        raise PeerLostError("the drafter does not answer", node="drafter") from error
    finally:
        await client.stop()


@contextlib.asynccontextmanager
async def _process(module: str, arguments: Sequence[str]) -> AsyncIterator[str]:
    """Runs `python -m module` until the block ends. Yields its first line of output, which has its ports."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise PeerLostError(f"{module} has ended", node=module)
        yield line.decode().strip()
    finally:
        process.stdin.close()
        await process.wait()
