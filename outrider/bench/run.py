"""Runs a benchmark from warm-up to figures: levels in sequence, modes interleaved within each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.bench.load import Level, LoadGenerator, Pass, RouterAnswerSource
from outrider.bench.machine import CpuMeter, CpuReading
from outrider.bench.measure import BenchResult, Comparison, LevelFigures, compare, figures_of
from outrider.bench.prompts import AnswerOptions, BenchPrompt
from outrider.bench.report import LineProgress
from outrider.client import AsyncClient

WARM_UP_TOKENS = 16
WARM_UP_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The passes of a benchmark. Mode True is with speculation, False without."""

    prompts: tuple[BenchPrompt, ...]
    levels: tuple[Level, ...]
    modes: tuple[bool, ...]
    rounds: int = 1
    # Whether both modes get identical prompts. Answers can then be compared, but the second mode finds the
    # prompts in the prefix caches. If false, each prompt is new.
    same_prompts: bool = False
    # A prefix of every prompt, so that prompts are new to a router that has seen an earlier run.
    run_mark: str = ""


async def run_bench(
    client: AsyncClient,
    plan: BenchPlan,
    options: AnswerOptions,
    *,
    cluster_pids: tuple[int, ...],
    progress: LineProgress,
) -> BenchResult:
    """Runs the plan. Passes of one level alternate between the modes, which take turns in going first."""
    await _warm_up(client, plan, options, progress=progress)
    load = LoadGenerator(RouterAnswerSource(client, options), seed=options.seed)
    figures: list[LevelFigures] = []
    comparisons: list[Comparison] = []
    for level in plan.levels:
        passes: dict[bool, list[Pass]] = {mode: [] for mode in plan.modes}
        cpu: dict[bool, list[CpuReading]] = {mode: [] for mode in plan.modes}
        groups = [group for _ in range(plan.rounds) for group in prompt_groups(plan, level)]
        for number, group in enumerate(groups):
            for mode in plan.modes if number % 2 == 0 else reversed(plan.modes):
                prompts = [prompt.salted(_salt(plan, level, number, speculation=mode)) for prompt in group]
                progress.pass_started(level, speculation=mode, num_requests=len(prompts))
                meter = CpuMeter(cluster_pids) if cluster_pids else None
                passes[mode].append(await load.run(prompts, level, speculation=mode, on_done=progress.request_done))
                cpu[mode] += [] if meter is None else [meter.stop()]
                progress.pass_ended()
        figures += [figures_of(level, passes[mode], speculation=mode, cpu=cpu[mode]) for mode in plan.modes]
        if len(plan.modes) == 2:
            comparisons.append(compare(level, passes[False], passes[True], are_answers_comparable=plan.same_prompts))
    return BenchResult(figures=tuple(figures), comparisons=tuple(comparisons))


def prompt_groups(plan: BenchPlan, level: Level) -> list[tuple[BenchPrompt, ...]]:
    """Cuts the prompts into passes: small ones if modes are interleaved and few clients run.

    A pass has at least four prompts per client, so that its ragged end, when fewer clients run
    than asked for, is short compared to the whole.
    """
    if len(plan.modes) == 1 or level.is_open_loop:
        return [plan.prompts]
    num_groups = max(1, len(plan.prompts) // (4 * int(level.value)))
    # Every num_groups-th prompt, so that each pass has all kinds.
    return [plan.prompts[first::num_groups] for first in range(num_groups)]


async def _warm_up(client: AsyncClient, plan: BenchPlan, options: AnswerOptions, *, progress: LineProgress) -> None:
    """Runs a few short requests concurrently in every mode. They are not counted."""
    short = replace(options, max_tokens=min(WARM_UP_TOKENS, options.max_tokens))
    load = LoadGenerator(RouterAnswerSource(client, short), seed=options.seed)
    level = Level(is_open_loop=False, value=WARM_UP_PROMPTS)
    for mode in plan.modes:
        prompts = [prompt.salted(f"[{plan.run_mark}warm-up {int(mode)}]") for prompt in plan.prompts[:WARM_UP_PROMPTS]]
        progress.pass_started(level, speculation=mode, num_requests=len(prompts), is_warm_up=True)
        await load.run(prompts, level, speculation=mode, on_done=progress.request_done)
        progress.pass_ended()


def _salt(plan: BenchPlan, level: Level, number: int, *, speculation: bool) -> str:
    mode = "same" if plan.same_prompts else ("spec" if speculation else "plain")
    return f"[{plan.run_mark}{level.name} {number} {mode}]"
