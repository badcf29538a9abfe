"""The flags of `outrider bench --three-lines`."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from outrider.cli.three_lines.pair import Pair

DEFAULT_ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0)
DEFAULT_MAX_TOKENS = 128
NUM_BLOCKS = 1024


def add_three_lines_arguments(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group(
        "three lines",
        "plain decoding, a drafter beside the target, and one across a network that drafts ahead; takes --rounds, "
        "--concurrency (one number), --max-tokens, --temperature (default: 0 and 1) and --json; without --simulated "
        "also --model, --dtype, --draft and --prompts",
    )
    lines.add_argument("--three-lines", action="store_true", help="compare them on the same prompts, interleaved")
    lines.add_argument(
        "--simulated",
        action="store_true",
        help="with a target and a drafter of set step times, in place of --model and --draft: on one machine a real "
        "drafter may have to share the target's processors",
    )
    lines.add_argument(
        "--draft-cpus", type=_processors, metavar="N,N", help="processors of the remote drafter alone; default: shared"
    )
    lines.add_argument(
        "--draft-rtt-ms", type=_milliseconds, metavar="MS,MS", help="round trips to the drafter; default 0,1,5,20"
    )


def is_three_lines(arguments: argparse.Namespace) -> bool:
    """Raises: InvalidRequestError for flags that do not go together."""
    for flag in ("simulated", "draft_rtt_ms", "draft_cpus"):
        if getattr(arguments, flag) and not arguments.three_lines:
            raise InvalidRequestError(f"--{flag.replace('_', '-')} needs --three-lines", field=flag)
    if arguments.three_lines and not arguments.simulated and arguments.draft in (None, "none"):
        raise InvalidRequestError("--three-lines needs --draft or --simulated", field="three_lines")
    return bool(arguments.three_lines)


def run_three_lines(arguments: argparse.Namespace, *, default_prompts: Path) -> int:
    """Prints the figures; the last line is the summary."""
    pair = _pair(arguments, default_prompts)
    from outrider.cli.three_lines.lines import Comparison, as_text, compare_lines

    comparison = Comparison(
        pair=pair,
        round_trips_ms=arguments.draft_rtt_ms or DEFAULT_ROUND_TRIPS_MS,
        temperatures=(arguments.temperature,) if "temperature" in arguments else (0.0, 1.0),
        num_rounds=arguments.rounds,
        num_sequences=(arguments.concurrency or (1,))[0],
        max_tokens=getattr(arguments, "max_tokens", DEFAULT_MAX_TOKENS),
    )
    figures = asyncio.run(compare_lines(comparison))
    if arguments.json:
        value = {"comparison": comparison.description, "lines": [asdict(each) for each in figures]}
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(as_text(comparison, figures))
    return 0


def _pair(arguments: argparse.Namespace, default_prompts: Path) -> Pair:
    """Raises: ConfigError."""
    if arguments.simulated:
        from outrider.cli.three_lines.simulation import SimulatedPair, Simulation

        return SimulatedPair(Simulation())
    from outrider.engine.processor import SPIN_LONG, prepare_environment, usable_cpus

    draft_cpus = arguments.draft_cpus or ()
    cpus = tuple(cpu for cpu in usable_cpus() if cpu not in draft_cpus)
    if not cpus:
        raise InvalidRequestError("--draft-cpus leaves the target none", field="draft_cpus")
    prepare_environment(spin_count=SPIN_LONG, cpus=cpus if draft_cpus else ())
    # After that: it imports torch.
    from outrider.cli.three_lines.models import ModelPair
    from outrider.engine.kv_cache.config import KVCacheConfig
    from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig

    return ModelPair.open(
        ModelConfig(id=arguments.model or DEFAULT_MODEL_ID, dtype=arguments.dtype or "auto"),
        arguments.draft,
        kv_cache=KVCacheConfig(num_blocks=NUM_BLOCKS),
        prompts_file=arguments.prompts or default_prompts,
        draft_cpus=draft_cpus,
    )


def _processors(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _milliseconds(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not values or any(not 0.0 <= value <= 10_000.0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} are no round trips of 0 to 10000 ms")
    return values
