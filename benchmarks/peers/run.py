"""Compares other servers with ours on the same machine, with the same prompts, one at a time, in several rounds.

    python benchmarks/peers/run.py --peers ours,vllm,llama_cpp,openvino,transformers --rounds 3
    python benchmarks/peers/run.py --peers all:int8,all:int4
    python benchmarks/peers/run.py --peers ours,llama_cpp --model model.gguf

Each peer is first installed in its own environment (benchmarks/peers/README.md). If a peer
fails, the table says so, and the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import reference.py

from contestants import ALL, PEERS, Contestant, choose, install
from environment import peers_directory
from machine import BYTES_PER_WEIGHT, count_weights, machine_facts, measure_floor
from peer import Setup
from reference import encode
from session import SessionResult, run_session
from table import as_text

from outrider.bench.prompts import DEFAULT_PROMPTS, BenchPrompt, load_prompts
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.gguf.directory import find_files
from outrider.model_hub.locate import is_gguf, locate_model

MODES = {"plain": False, "lookup": True}
TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Returns the exit status: 1 if a session failed."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # unwinds the stack, which ends the peer
    model, tokenizer = locate(arguments.model)
    prompts = load_prompts(DEFAULT_PROMPTS)
    token_ids = encode(tokenizer, prompts)
    prompts = tuple(replace(one, content=tuple(ids)) for one, ids in zip(prompts, token_ids, strict=True))
    if arguments.prompt_tokens:
        prompts, arguments.levels = long_prompts(prompts, arguments.prompt_tokens), (1,)
    contestants, sessions = install(choose(arguments.peers.split(","), model), model, tell=tell)
    facts = machine_facts()
    print(f"{facts['processor']}, {facts['num_cores']} cores, {' '.join(facts['cpu_flags'])}, commit {facts['commit']}")
    print(
        f"load {facts['load_average'][0]:.1f}; {sum(map(len, token_ids)) / len(prompts):.0f} prompt tokens on average"
    )
    floors = []
    if not arguments.install_only:
        num_weights = count_weights(model)
        for number in range(arguments.rounds):
            floors.append(measure_floor(num_weights, num_threads=arguments.threads))
            sessions += run_round(contestants, model, prompts, arguments, number=number)
            save(arguments.json, machine=facts, floors=floors, sessions=sessions, command=sys.argv)
        best = max(floors, key=lambda floor: floor["bandwidth_bytes_per_second"])
        print("floor, tokens/s:", ", ".join(f"{best[dtype]:.0f} in {dtype}" for dtype in BYTES_PER_WEIGHT), "\n")
    print(as_text(sessions, arguments.prompt_tokens) if sessions else "installed")
    return 1 if any(session.error for session in sessions) else 0


def locate(name: str) -> tuple[Path, Path]:
    """Returns the model, a directory or a GGUF file, and a directory with its tokenizer."""
    directory = locate_model(ModelConfig(id=name)).directory
    path = Path(name).expanduser()
    return find_files(path)[0] if is_gguf(path) else directory, directory


def long_prompts(prompts: Sequence[BenchPrompt], lengths: Sequence[int]) -> tuple[BenchPrompt, ...]:
    """Makes a prompt of each length, cut from the joined texts at a different place. A prompt's kind is its length."""
    ids = [token_id for prompt in prompts for token_id in prompt.content]
    return tuple(
        replace(prompts[0], kind=str(length), content=tuple(islice(cycle(ids), 97 * place, 97 * place + length)))
        for place, length in enumerate(lengths)
    )


def run_round(
    contestants: Sequence[Contestant],
    model: Path,
    prompts: Sequence[BenchPrompt],
    arguments: argparse.Namespace,
    *,
    number: int,
) -> list[SessionResult]:
    """Measures each contestant once in each mode. Each round begins with a different contestant."""
    sessions = []
    logs = peers_directory() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first = number % max(len(contestants), 1)
    for contestant in (*contestants[first:], *contestants[:first]):
        for mode in arguments.modes.split(","):
            peer, speculation = contestant.peer, MODES[mode]
            if speculation and not peer.has_lookup:
                continue
            setup = Setup(
                model=model,
                dtype=contestant.dtype,
                speculation=speculation,
                max_tokens=arguments.max_tokens,
                max_prompt_tokens=max(len(prompt.content) for prompt in prompts),
                num_threads=arguments.threads,
                log=logs / f"{peer.name}-{contestant.dtype}-{mode}-{number}.log",
                start_seconds=arguments.start_timeout,
                answer_seconds=arguments.session_timeout,
            )
            setup.log.unlink(missing_ok=True)
            tell(f"round {number + 1}: {peer.name} {contestant.dtype} {mode}")
            session = run_session(
                peer,
                setup,
                prompts[: arguments.prompts],
                number=number,
                levels=arguments.levels,
                session_seconds=arguments.session_timeout,
            )
            tell(f"  {session.error or ', '.join(summary(session))}")
            sessions.append(session)
    return sessions


def summary(session: SessionResult) -> list[str]:
    return [f"{level.num_clients}: {level.tokens_per_second:.1f} tokens/s" for level in session.levels.values()]


def save(path: Path | None, *, sessions: Sequence[SessionResult], **others: Any) -> None:
    if path is not None:
        value = {**others, "sessions": [asdict(session) for session in sessions]}
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="NAME or NAME:DTYPE, separated by commas; all:DTYPE")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--levels", default="1,4,8,16", type=_numbers, help="clients at a time (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="only the first N (default: all)")
    parser.add_argument(
        "--prompt-tokens",
        type=_numbers,
        metavar="N,N",
        help="instead of them, prompts of these lengths, one after the other, and a table of their times",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens for each prompt (default: 128)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument(
        "--model", default=ModelConfig().id, help="as for `outrider up`: a GGUF file, … (default: %(default)s)"
    )
    parser.add_argument("--start-timeout", type=float, default=1200.0, metavar="SECONDS")
    parser.add_argument("--session-timeout", type=float, default=1800.0, metavar="SECONDS", help="of all levels")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each round")
    arguments = parser.parse_args()
    known = [entry.partition(":")[0] for entry in arguments.peers.split(",")]
    if unknown := sorted({*known} - {*PEERS, ALL}) + sorted({*arguments.modes.split(",")} - {*MODES}):
        parser.error(f"{', '.join(unknown)}: peers are {', '.join(PEERS)}, {ALL}; modes are {', '.join(MODES)}")
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
