"""A session: one start of a peer in one mode, measured at every level of concurrency."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from peer import Peer, Server, Setup
from process import PeerError

from outrider.bench.load import Level, LoadGenerator, Pass
from outrider.bench.machine import CpuMeter, others_cpu_share
from outrider.bench.measure import figures_of, stream_rate
from outrider.bench.prompts import BenchPrompt

WARM_UP_PROMPTS = 2
PROMPTS_PER_CLIENT = 2
SINGLE_PROMPTS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """The figures of `num_clients` clients, each of which sends its next prompt when its previous answer has ended."""

    num_clients: int
    num_requests: int
    tokens_per_second: float  # tokens of all answers divided by the wall time, which includes prefill
    stream_tokens_per_second: float  # speed of one answer after its first token, as the median over answers
    stream_by_kind: dict[str, float]  # `stream_tokens_per_second` by kind of prompt
    ttft_p50_milliseconds: float
    ttft_by_kind: dict[str, float]  # median over answers in milliseconds, by kind of prompt
    others_cpu_share: float  # share of all cores used by processes other than the peer and the client


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """The result of a session. `error` is empty if every answer of every level was complete."""

    peer: str
    dtype: str
    speculation: bool
    round: int
    error: str = ""
    start_seconds: float = 0.0
    resident_mib: float = 0.0  # memory of all of the peer's processes, after the last level
    load_average: float = 0.0  # over the minute before the session
    levels: dict[int, LevelResult] = field(default_factory=dict)
    first_answer: tuple[int, ...] = ()  # token ids, to check that all peers compute the same answer


def run_session(
    peer: Peer,
    setup: Setup,
    prompts: Sequence[BenchPrompt],
    *,
    number: int,
    levels: Sequence[int],
    session_seconds: float,
) -> SessionResult:
    """Starts, warms up, measures and ends a peer. Returns failures in `error`, and leaves no process behind."""
    result = SessionResult(
        peer=peer.name,
        dtype=setup.dtype,
        speculation=setup.speculation,
        round=number,
        load_average=os.getloadavg()[0],
    )
    started_at = time.monotonic()
    try:
        with peer.start(setup) as server:
            result = replace(result, start_seconds=time.monotonic() - started_at)
            fitting = [level for level in levels if not peer.max_clients or level <= peer.max_clients]
            measured = asyncio.run(_bounded(_measure(server, setup, prompts, fitting), session_seconds))
            return replace(result, resident_mib=server.process.resident_bytes() / 2**20, **measured)
    except TimeoutError:
        return replace(result, error=f"not done after {session_seconds:g} s")
    except (PeerError, OSError) as error:
        return replace(result, error=str(error))


async def _bounded(work: Any, seconds: float) -> dict[str, Any]:
    async with asyncio.timeout(seconds):
        return dict(await work)


async def _measure(
    server: Server, setup: Setup, prompts: Sequence[BenchPrompt], levels: Sequence[int]
) -> dict[str, Any]:
    """Returns fields of a SessionResult. Raises: PeerError if an answer fails."""
    load = LoadGenerator(server.asker)
    await _pass(load, server, setup, prompts[:WARM_UP_PROMPTS], 1)
    found: dict[int, LevelResult] = {}
    first_answer: tuple[int, ...] = ()
    for level in levels:
        count = SINGLE_PROMPTS if level == 1 else PROMPTS_PER_CLIENT * level
        chosen = [prompts[index % len(prompts)] for index in range(min(count, len(prompts)) if level == 1 else count)]
        done, share = await _pass(load, server, setup, chosen, level)
        found[level] = _figures(done, level, share)
        first_answer = first_answer or done.records[0].token_ids
    return {"levels": found, "first_answer": first_answer}


async def _pass(
    load: LoadGenerator, server: Server, setup: Setup, prompts: Sequence[BenchPrompt], num_clients: int
) -> tuple[Pass, float]:
    meter = CpuMeter((server.process.pid,))
    done = await load.run(prompts, Level(is_open_loop=False, value=num_clients), speculation=setup.speculation)
    failed = [record for record in done.records if record.error]
    if failed:
        raise PeerError(f"{len(failed)} of {len(prompts)} answers failed: {failed[0].error_message}")
    return done, others_cpu_share([meter.stop()])


def _figures(done: Pass, num_clients: int, others_share: float) -> LevelResult:
    figures = figures_of(Level(is_open_loop=False, value=num_clients), [done], speculation=False)
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for record in done.records:
        rates.setdefault(record.kind, []).append(stream_rate(record) or 0.0)
        waits.setdefault(record.kind, []).append(1000 * (record.token_times[0][0] - record.sent_at))
    assert figures.ttft_seconds is not None
    return LevelResult(
        num_clients=num_clients,
        num_requests=figures.num_requests,
        tokens_per_second=figures.tokens_per_second,
        stream_tokens_per_second=figures.stream_tokens_per_second,
        stream_by_kind={kind: median(values) for kind, values in rates.items()},
        ttft_p50_milliseconds=1000 * figures.ttft_seconds.p50,
        ttft_by_kind={kind: median(values) for kind, values in waits.items()},
        others_cpu_share=others_share,
    )
