"""`python -m benchmarks.three_lines`: compares plain decoding, a drafter beside the target, and remote drafters.

Each of these ways to decode is a line. All lines run the same prompts, interleaved. With --simulated, target and
drafter have fixed step times, since on one machine a real drafter may have to share the target's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.prompts import DEFAULT_PROMPTS
from outrider.errors import OutriderError
from outrider.speculation.proposers.factory import DRAFT_CHOICES

if TYPE_CHECKING:
    from benchmarks.three_lines.pair import Pair

DEFAULT_ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0)
NUM_BLOCKS = 1024


def main(argv: list[str] | None = None) -> int:
    """Prints the figures, with the summary as the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.three_lines", description=__doc__)
    drafter = parser.add_mutually_exclusive_group(required=True)
    drafter.add_argument("--simulated", action="store_true", help="a target and a drafter of set step times")
    drafter.add_argument("--draft", metavar="PROPOSER", help=f"one of {', '.join(DRAFT_CHOICES[:-1])}")
    simulated = parser.add_argument_group("with --simulated")
    simulated.add_argument(
        "--acceptance",
        type=_shares,
        default=(0.8,),
        metavar="A,A",
        help="of a draft token after right ones, by depth; the last one for all further tokens; default 0.8",
    )
    simulated.add_argument("--step-ms", type=float, default=30.0, metavar="MS", help="of the target, of one row")
    simulated.add_argument("--row-ms", type=float, default=0.0, metavar="MS", help="of each further row")
    simulated.add_argument("--draft-ms", type=float, default=2.0, metavar="MS", help="of a draft token")
    simulated.add_argument("--head", dest="is_head", action="store_true", help="the drafter is fed with features")
    simulated.add_argument(
        "--draft-tokens", dest="num_speculative_tokens", type=int, default=8, metavar="N", help="at most, in a step"
    )
    parser.add_argument("--model", metavar="ID", help="as for `outrider up`")
    parser.add_argument("--dtype", default="auto", help="as for `outrider up`")
    parser.add_argument(
        "--added-layers",
        type=int,
        default=0,
        metavar="N",
        help="append N layers to the target that add nothing, for longer steps with the same text",
    )
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, metavar="FILE", help="JSONL file")
    parser.add_argument(
        "--draft-cpus",
        type=_numbers,
        default=(),
        metavar="N,N",
        help="processors of the remote drafter and of the network between, which the target's process leaves to them; "
        "default: shared",
    )
    parser.add_argument(
        "--draft-rtt-ms",
        type=_milliseconds,
        default=DEFAULT_ROUND_TRIPS_MS,
        metavar="MS,MS",
        help="round trips to the drafter; default 0,1,5,20",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="default: 0 and 1")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    parser.add_argument(
        "--sequences", type=_numbers, default=(1,), metavar="N,N", help="at a time; one comparison for each"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--both", action="store_true", help="also lines with a drafter beside the target and a remote one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.added_layers < 0 or (arguments.simulated and arguments.added_layers):
        parser.error(f"--added-layers {arguments.added_layers}: give a number of layers for a real target")
    with tempfile.TemporaryDirectory() as directory:
        try:
            pair = _pair(arguments, Path(directory))
        except OutriderError as error:
            parser.error(str(error))
        found = _compare(pair, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _compare(pair: Pair, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the figures of each comparison, and returns them."""
    from benchmarks.three_lines.lines import Comparison, as_text, compare_lines

    found = []
    for num_sequences in arguments.sequences:
        comparison = Comparison(
            pair=pair,
            round_trips_ms=arguments.draft_rtt_ms,
            temperatures=(0.0, 1.0) if arguments.temperature is None else (arguments.temperature,),
            num_rounds=arguments.rounds,
            num_sequences=num_sequences,
            max_tokens=arguments.max_tokens,
            has_both=arguments.both,
        )
        figures = asyncio.run(compare_lines(comparison))
        found.append({"comparison": comparison.description, "lines": [asdict(each) for each in figures]})
        print(as_text(comparison, figures), flush=True)
    return found


def _pair(arguments: argparse.Namespace, directory: Path) -> Pair:
    """Opens the models or their simulation. `directory`: for a target that is made. Raises: OutriderError."""
    if arguments.simulated:
        from benchmarks.three_lines.simulation import SimulatedPair, Simulation

        return SimulatedPair(
            Simulation(
                step_seconds=arguments.step_ms / 1000.0,
                row_seconds=arguments.row_ms / 1000.0,
                token_seconds=arguments.draft_ms / 1000.0,
                acceptance=arguments.acceptance,
                is_head=arguments.is_head,
                num_speculative_tokens=arguments.num_speculative_tokens,
            )
        )
    from outrider.engine.processor import prepare_environment, usable_cpus

    cpus = tuple(cpu for cpu in usable_cpus() if cpu not in arguments.draft_cpus)
    prepare_environment(cpus if arguments.draft_cpus else ())
    # Imported only after `prepare_environment`, since these modules import torch.
    from benchmarks.three_lines.models import ModelPair
    from outrider.engine.kv_cache.config import KVCacheConfig
    from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
    from outrider.model_hub.locate import locate_model

    config = ModelConfig(id=arguments.model or DEFAULT_MODEL_ID, dtype=arguments.dtype)
    if arguments.added_layers:
        from benchmarks.three_lines.slower_target import write_slower_target

        location = locate_model(config)
        made = directory / f"{location.name}-and-{arguments.added_layers}-layers"
        write_slower_target(location.directory, made, num_added_layers=arguments.added_layers)
        config = replace(config, id=str(made))
    return ModelPair.open(
        config,
        arguments.draft,
        kv_cache=KVCacheConfig(num_blocks=NUM_BLOCKS),
        prompts_file=arguments.prompts,
        draft_cpus=arguments.draft_cpus,
    )


def _shares(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if any(not 0.0 < value < 1.0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} are no shares between 0 and 1")
    return values


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _milliseconds(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if any(not 0.0 <= value <= 10_000.0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} are no round trips of 0 to 10000 ms")
    return values


if __name__ == "__main__":
    sys.exit(main())
