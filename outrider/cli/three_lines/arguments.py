"""The flags of `outrider bench --three-lines`."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict

from outrider.errors import InvalidRequestError

DEFAULT_ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0)
DEFAULT_MAX_TOKENS = 128


def add_three_lines_arguments(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group(
        "three lines",
        "plain decoding, a drafter beside the target, and one across a network that drafts ahead; takes --rounds, "
        "--concurrency (one number), --max-tokens, --temperature (default: 0 and 1) and --json",
    )
    lines.add_argument("--three-lines", action="store_true", help="compare them on the same prompts, interleaved")
    lines.add_argument(
        "--simulated",
        action="store_true",
        help="with a target and a drafter of set step times: needed, as on one machine a real drafter would take the "
        "target's processors",
    )
    lines.add_argument(
        "--draft-rtt-ms", type=_milliseconds, metavar="MS,MS", help="round trips to the drafter; default 0,1,5,20"
    )


def is_three_lines(arguments: argparse.Namespace) -> bool:
    """Raises: InvalidRequestError for flags that do not go together."""
    for flag in ("simulated", "draft_rtt_ms"):
        if getattr(arguments, flag) and not arguments.three_lines:
            raise InvalidRequestError(f"--{flag.replace('_', '-')} needs --three-lines", field=flag)
    if arguments.three_lines and not arguments.simulated:
        raise InvalidRequestError(
            "--three-lines needs --simulated: on one machine a real drafter takes the target's processors",
            field="three_lines",
        )
    return bool(arguments.three_lines)


def run_three_lines(arguments: argparse.Namespace) -> int:
    """Prints the figures; the last line is the summary."""
    from outrider.cli.three_lines.lines import Comparison, as_text, compare_lines
    from outrider.cli.three_lines.simulation import Simulation

    comparison = Comparison(
        simulation=Simulation(),
        round_trips_ms=arguments.draft_rtt_ms or DEFAULT_ROUND_TRIPS_MS,
        temperatures=(arguments.temperature,) if "temperature" in arguments else (0.0, 1.0),
        num_rounds=arguments.rounds,
        num_sequences=(arguments.concurrency or (1,))[0],
        max_tokens=getattr(arguments, "max_tokens", DEFAULT_MAX_TOKENS),
    )
    figures = asyncio.run(compare_lines(comparison))
    if arguments.json:
        value = {"comparison": asdict(comparison), "lines": [asdict(each) for each in figures]}
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(as_text(comparison, figures))
    return 0


def _milliseconds(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not values or any(not 0.0 <= value <= 10_000.0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} are no round trips of 0 to 10000 ms")
    return values
