"""Plain decoding, a drafter beside the target, a drafter across a network: interleaved, on the same prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass

from decode_node.drafts import DraftClient, NoDrafts
from outrider.bench.delayed_link import delayed_link
from outrider.bench.speed_model import SpeedModel
from outrider.cli.three_lines.decode_side import ColocatedDrafts, Passed, SimulatedDecodeNode
from outrider.cli.three_lines.simulation import MAX_MODEL_LEN, Simulation, simulated_drafter
from outrider.engine.simulated_model import noise_for
from outrider.errors import InternalError, PeerLostError
from outrider.speculation.draft_stream import DraftHello

PLAIN, COLOCATED = "plain", "colocated"
CONNECT_SECONDS = 30.0
PROMPT_TOKENS = 24
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is run: all lines in each round, for each temperature."""

    simulation: Simulation
    round_trips_ms: tuple[float, ...] = (0.0, 1.0, 5.0, 20.0)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_rounds: int = 1
    num_sequences: int = 1
    max_tokens: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFigures:
    """One line at one temperature."""

    line: str
    temperature: float
    tokens_per_second: float
    speedup: float  # over the plain line
    predicted: float  # the same, by the speed model
    acceptance_rate: float
    hit_rate: float
    tokens_per_step: float  # of one sequence
    draft_tokens_per_step: float  # of one sequence, verified
    step_seconds: float  # from one step to the next


def remote(round_trip_ms: float) -> str:
    return f"remote_{round_trip_ms:g}ms"


async def compare_lines(comparison: Comparison) -> list[LineFigures]:
    """Raises: InternalError where two lines have generated different tokens; PeerLostError without a drafter."""
    figures: list[LineFigures] = []
    for temperature in comparison.temperatures:
        figures += await _at_temperature(comparison, temperature)
    return figures


async def _at_temperature(comparison: Comparison, temperature: float) -> list[LineFigures]:
    simulation = comparison.simulation
    noise = noise_for(simulation.acceptance, temperature=temperature, vocab_size=simulation.vocab_size)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(_drafter_process(simulation, noise=noise))
        nodes = {
            PLAIN: SimulatedDecodeNode(simulation, NoDrafts()),
            COLOCATED: SimulatedDecodeNode(simulation, ColocatedDrafts(simulated_drafter(simulation, noise=noise))),
        }
        for round_trip_ms in comparison.round_trips_ms:
            link = await stack.enter_async_context(delayed_link(port, round_trip_seconds=round_trip_ms / 1000.0))
            client = await stack.enter_async_context(_connected(link, simulation))
            nodes[remote(round_trip_ms)] = SimulatedDecodeNode(simulation, client)
        for node in nodes.values():  # a process is slow at first
            await asyncio.to_thread(
                node.answer, _prompts(comparison, -1), temperature=temperature, max_tokens=WARM_UP_TOKENS
            )
            node.passed = Passed()
        for number in range(comparison.num_rounds):
            prompts = _prompts(comparison, number)
            answers = {
                name: await asyncio.to_thread(
                    node.answer, prompts, temperature=temperature, max_tokens=comparison.max_tokens
                )
                for name, node in (list(nodes.items()) if number % 2 == 0 else reversed(nodes.items()))
            }
            if any(answer != answers[PLAIN] for answer in answers.values()):
                raise InternalError(f"tokens depend on drafts in round {number} at temperature {temperature:g}")
    return [_figures(comparison, name, node, nodes[PLAIN], temperature) for name, node in nodes.items()]


def as_text(comparison: Comparison, figures: Sequence[LineFigures]) -> str:
    """A table and the summary line, without an end of line at the end."""
    simulation = comparison.simulation
    title = (
        f"simulated: target step {1000 * simulation.step_seconds:g} ms, draft token "
        f"{1000 * simulation.token_seconds:g} ms, acceptance {simulation.acceptance:g}, at most "
        f"{simulation.num_speculative_tokens} draft tokens; sequences: {comparison.num_sequences}, "
        f"rounds: {comparison.num_rounds}, tokens: {comparison.max_tokens}"
    )
    rows = [
        (
            "line",
            "temperature",
            "tokens/s",
            "speedup",
            "predicted",
            "acceptance",
            "hit rate",
            "tokens/step",
            "drafted/step",
            "ms/step",
        )
    ]
    rows += [
        (
            each.line,
            f"{each.temperature:g}",
            f"{each.tokens_per_second:.1f}",
            f"{each.speedup:.2f}",
            f"{each.predicted:.2f}",
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
            title,
            *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
            summary(comparison, figures),
        ]
    )


def summary(comparison: Comparison, figures: Sequence[LineFigures]) -> str:
    """The last line of the output: speedups over plain decoding, means over the temperatures."""
    means = {
        name: (
            _mean(each.speedup for each in figures if each.line == name),
            _mean(each.predicted for each in figures if each.line == name),
        )
        for name in (PLAIN, COLOCATED, *map(remote, comparison.round_trips_ms))
    }
    parts = [f"{name}={speedup:.2f}" for name, (speedup, _) in means.items()]
    if (name := remote(1.0)) in means:
        parts.append(f"predicted_1ms={means[name][1]:.2f}")
    return "three-lines: " + " ".join(parts)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _figures(
    comparison: Comparison, name: str, node: SimulatedDecodeNode, plain: SimulatedDecodeNode, temperature: float
) -> LineFigures:
    simulation, num_sequences = comparison.simulation, comparison.num_sequences
    counts = node.passed.counts
    rate, plain_rate = (each.passed.num_tokens / each.passed.seconds for each in (node, plain))
    hit_rate = counts.num_hit_steps / counts.num_wanting_steps if counts.num_wanting_steps else 0.0
    model = SpeedModel(
        acceptance=simulation.acceptance,
        num_draft_tokens=simulation.num_speculative_tokens,
        step_seconds=simulation.step_seconds,
        token_seconds=simulation.token_seconds,
    )
    predicted = {PLAIN: 1.0, COLOCATED: model.colocated()}.get(name)
    return LineFigures(
        line=name,
        temperature=temperature,
        tokens_per_second=rate,
        speedup=rate / plain_rate,
        predicted=model.ahead(hit_rate) if predicted is None else predicted,
        acceptance_rate=counts.num_accepted_draft_tokens / max(1, counts.num_draft_tokens),
        hit_rate=hit_rate,
        tokens_per_step=node.passed.num_tokens / node.passed.num_steps / num_sequences,
        draft_tokens_per_step=counts.num_draft_tokens / node.passed.num_steps / num_sequences,
        step_seconds=node.passed.seconds / node.passed.num_steps,
    )


def _prompts(comparison: Comparison, number: int) -> list[list[int]]:
    chosen = random.Random(number)  # noqa: S311 prompts, no secret
    vocab_size = comparison.simulation.vocab_size
    return [[chosen.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(comparison.num_sequences)]


@contextlib.asynccontextmanager
async def _connected(port: int, simulation: Simulation) -> AsyncIterator[DraftClient]:
    hello = DraftHello(
        incarnation=os.urandom(16),
        name="three-lines",
        vocab_size=simulation.vocab_size,
        vocabulary_fingerprint="",
        max_model_len=MAX_MODEL_LEN,
    )
    client = DraftClient([f"127.0.0.1:{port}"], hello)
    await client.start()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while not any(target.is_connected for target in client.status().targets):  # noqa: ASYNC110 a thread's state
                await asyncio.sleep(0.01)
        yield client
    except TimeoutError as error:
        raise PeerLostError("the simulated drafter does not answer", node="drafter") from error
    finally:
        await client.stop()


@contextlib.asynccontextmanager
async def _drafter_process(simulation: Simulation, *, noise: float) -> AsyncIterator[int]:
    """The port of a draft node that ends with this block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli.three_lines.drafter", str(noise), json.dumps(asdict(simulation))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise PeerLostError("the simulated drafter has ended", node="drafter")
        yield int(line)
    finally:
        process.stdin.close()
        await process.wait()
