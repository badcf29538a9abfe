"""Runs vLLM with drafts of our draft nodes beside plain vLLM (docs/drafting.md), in its own environment.

    OUTRIDER_PEERS_DIR=DIR python benchmarks/vllm_proposer.py --rounds 5

vLLM computes on the first core, draft nodes on the second one. Servers stay up, and cases are measured in turns. A case
with drafts is the same vLLM; its draft node is another one, stopped (SIGSTOP), dead, or just started again. In the case
"switched off" its proposer does nothing.

Fails if that vLLM without a working draft node is slower than 98 % of itself switched off, which only a quiet machine
shows. Plain vLLM is another server, and two servers with equal arguments differ by up to 6 %. With `--dtype float32`
it also fails if tokens at temperature 0 differ. In bfloat16 they do, probably by rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks" / "peers"))
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from environment import peers_directory
from peer import Server, Setup
from peer_vllm import LOOKUP, Vllm
from process import PeerError, ServerProcess, free_port
from reference import encode
from switched_proposer import SWITCH_VARIABLE

from outrider.bench.load import Level, LoadGenerator, Pass
from outrider.bench.measure import stream_rate
from outrider.bench.prompts import DEFAULT_PROMPTS, BenchPrompt, load_prompts
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.locate import locate_model

MIN_SHARE_WITHOUT_DRAFTS = 0.98
"""Minimum speed with a draft node that does not work, as a share of the same server's with its proposer off."""

PLAIN, DRAFTED, AHEAD, OWN_LOOKUP = "plain", "drafted", "plain, a step ahead", "its own lookup"
"""Ways to start vLLM. By default it schedules a step ahead, which it does not do with a custom class: so it does not
where it is compared with one, either.
"""
SWITCHED_OFF = "switched off"
WITHOUT_DRAFTS = ("ngram, stopped", "dead")
FIGURES = ("tokens_per_second", "engine_milliseconds")

START_SECONDS = 600.0
WARM_UP_PROMPTS = 2
PROPOSER = "switched_proposer.SwitchedProposer"
PACKAGES = ("xxhash",)
"""What the proposer needs beside vLLM's own packages."""


class VllmWith(Vllm):
    """vLLM with further arguments, which finds this checkout and its packages."""

    def __init__(self, *arguments: str, node_port: int, switch: Path) -> None:
        super().__init__()
        self._more = arguments
        self._variables_of_proposer = {
            "OUTRIDER_DRAFT_NODES": f"127.0.0.1:{node_port}",
            SWITCH_VARIABLE: str(switch),
        }
        self._packages = peers_directory() / "vllm-proposer"

    def install(self, model: Path, dtype: str) -> None:
        super().install(model, dtype)
        if not self._packages.exists():
            self._environment.run(
                *(str(self._environment.python), "-m", "pip", "install", "--no-deps", "--target", str(self._packages)),
                *PACKAGES,
            )

    def _arguments(self, setup: Setup) -> Sequence[str]:
        return self._more

    def _variables(self, setup: Setup) -> Mapping[str, str]:
        folders = f"{self._packages}:{REPOSITORY}:{REPOSITORY / 'benchmarks'}"
        ours = {"PYTHONPATH": folders, "VLLM_CPU_KVCACHE_SPACE": "1"}  # several servers are up at a time
        return {**super()._variables(setup), **ours, **self._variables_of_proposer}


@contextmanager
def stopped(process: ServerProcess) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Measured:
    """One pass over the prompts."""

    tokens_per_second: float  # of one answer after its first token, as the median over answers
    engine_milliseconds: float  # processor time of vLLM's engine for a token
    answers: dict[str, tuple[int, ...]]
    num_drafted: int
    num_accepted: int


class Contender:
    """A running vLLM."""

    def __init__(self, server: Server, port: int) -> None:
        self._port = port
        self._load = LoadGenerator(server.asker)
        names = ("EngineCore", "Worker")
        self._engine = [each for each in server.process.processes() if any(name in each.name() for name in names)]

    def measure(self, prompts: Sequence[BenchPrompt], num_clients: int) -> Measured:
        """Raises: PeerError if an answer fails."""
        before, drafted = self._cpu_seconds(), self._drafted()
        done: Pass = asyncio.run(
            self._load.run(prompts, Level(is_open_loop=False, value=num_clients), speculation=False)
        )
        failed = [record for record in done.records if record.error]
        if failed:
            raise PeerError(failed[0].error_message)
        seconds = self._cpu_seconds() - before
        num_tokens = sum(len(record.token_ids) for record in done.records)
        now = self._drafted()
        return Measured(
            median(stream_rate(record) or 0.0 for record in done.records) * num_clients,
            1000 * seconds / num_tokens,
            {record.prompt_id: record.token_ids for record in done.records},
            now[0] - drafted[0],
            now[1] - drafted[1],
        )

    def gets_drafts(self, prompts: Sequence[BenchPrompt]) -> bool:
        return self.measure(prompts[:1], 1).num_drafted > 0

    def _cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._engine)

    def _drafted(self) -> tuple[int, int]:
        """Returns the numbers of draft tokens that vLLM has verified and accepted."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as response:
            text = response.read().decode()
        numbers = [
            re.search(rf"^vllm:spec_decode_num_{kind}_tokens_total{{[^}}]*}} (\S+)", text, re.MULTILINE)
            for kind in ("draft", "accepted")
        ]
        return tuple(0 if found is None else int(float(found[1])) for found in numbers)  # type: ignore[return-value]


@contextmanager
def slowed(process: ServerProcess) -> Iterator[None]:
    """Lets the process run a fifth of the time only, in turns of 20 ms."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.wait(0.02):
            with stopped(process):
                ended.wait(0.08)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Cases:
    """The cases of a round, by name. Each returns what was measured."""

    def __init__(self, arguments: argparse.Namespace, started: ExitStack) -> None:
        model = locate_model(ModelConfig(id=arguments.model)).directory
        prompts = load_prompts(DEFAULT_PROMPTS)[:: arguments.every]
        encoded = zip(prompts, encode(model, prompts), strict=True)
        self._prompts = [replace(prompt, content=tuple(token_ids)) for prompt, token_ids in encoded]
        self._num_clients = arguments.clients
        self._node_port = free_port()
        self._switch = Path(started.enter_context(tempfile.TemporaryDirectory())) / "off"
        self._logs = peers_directory() / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._model = model
        speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": arguments.tokens}
        own_lookup = {**LOOKUP, "num_speculative_tokens": arguments.tokens}
        options = {
            PLAIN: ("--no-async-scheduling",),
            DRAFTED: ("--speculative-config", json.dumps(speculative)),
            AHEAD: (),
            OWN_LOOKUP: ("--speculative-config", json.dumps(own_lookup)),
        }
        chosen = (PLAIN, DRAFTED, *([AHEAD, OWN_LOOKUP] if arguments.all else []))
        self._engines = {name: self._start(name, options[name], arguments, started) for name in chosen}
        for engine in self._engines.values():
            engine.measure(self._prompts[:WARM_UP_PROMPTS], 1)

    def _start(self, name: str, options: Sequence[str], arguments: argparse.Namespace, started: ExitStack) -> Contender:
        vllm = VllmWith(*options, node_port=self._node_port, switch=self._switch)
        vllm.install(self._model, arguments.dtype)
        setup = Setup(
            model=self._model,
            dtype=arguments.dtype,
            speculation=False,
            max_tokens=arguments.max_tokens,
            max_prompt_tokens=max(len(prompt.content) for prompt in self._prompts),
            num_threads=1,
            log=self._logs / f"vllm-proposer-{name.replace(' ', '-')}.log",
            start_seconds=START_SECONDS,
            answer_seconds=START_SECONDS,
        )
        setup.log.unlink(missing_ok=True)
        print(f"starting vLLM, {name}", file=sys.stderr, flush=True)
        return Contender(started.enter_context(vllm.start(setup)), vllm.port)

    def run(self) -> Iterator[tuple[str, Measured]]:
        for name in self._engines.keys() - {DRAFTED}:
            yield name, self._measure(name)
        lookup, model = (
            ("draft_node.proposer=ngram",),
            ("draft_node.proposer=draft_model", f"draft_node.model={self._model}"),
        )
        with self._node(*lookup) as node:
            yield "ngram", self._measure(DRAFTED)
            with slowed(node):
                yield "ngram, slow", self._measure(DRAFTED)
            with stopped(node):
                yield "ngram, stopped", self._measure(DRAFTED)
        self._switch.touch()
        yield SWITCHED_OFF, self._measure(DRAFTED)
        self._switch.unlink()
        yield "dead", self._measure(DRAFTED)
        with self._node(*lookup, is_awaited=False):
            yield "ngram, restarted", self._measure(DRAFTED)
        with self._node("draft_node.proposer=suffix"):
            yield "suffix", self._measure(DRAFTED)
        with self._node(*model):
            yield "draft model (the target itself)", self._measure(DRAFTED)

    def _measure(self, engine: str) -> Measured:
        return self._engines[engine].measure(self._prompts, self._num_clients)

    @contextmanager
    def _node(self, *settings: str, is_awaited: bool = True) -> Iterator[ServerProcess]:
        """Runs a draft node on the second core. `is_awaited`: returns once vLLM can have drafts of it."""
        cpus = sorted(os.sched_getaffinity(0))[1]
        sets = [f"server.port={self._node_port}", f"model.cpus={cpus}", *settings]
        command = [sys.executable, "-m", "draft_node", *(part for each in sets for part in ("--set", each))]
        log = self._logs / "vllm-proposer-node.log"
        with ServerProcess(command, environment={"PYTHONPATH": str(REPOSITORY)}, log=log) as process:
            if is_awaited:
                process.wait_until(lambda: self._engines[DRAFTED].gets_drafts(self._prompts), seconds=START_SECONDS)
            yield process


def main() -> int:
    """Returns the exit status: 1 if tokens differ or vLLM was slowed down."""
    arguments = parse_arguments()
    measured: dict[str, list[Measured]] = defaultdict(list)
    with ExitStack() as started:
        cases = Cases(arguments, started)
        for number in range(arguments.rounds):
            for name, found in cases.run():
                measured[name].append(found)
                print(f"round {number + 1}: {name}: {found.tokens_per_second:.1f}", file=sys.stderr, flush=True)
    return report(measured, must_be_equal=arguments.dtype == "float32")


def report(measured: Mapping[str, Sequence[Measured]], *, must_be_equal: bool) -> int:
    """Prints a table and what is wrong. Returns the exit status."""
    right = measured[PLAIN][0].answers
    print(f"{'vLLM':36} tokens/s  of plain  of off  engine ms/token  accepted/drafted  equal answers")
    faults = []
    for name, found in measured.items():
        speed, busy = (median(getattr(each, field) for each in found) for field in FIGURES)
        accepted, drafted = sum(each.num_accepted for each in found), sum(each.num_drafted for each in found)
        num_equal = sum(each.answers[key] == right[key] for each in found for key in right)
        num_all = len(found) * len(right)
        of_plain, of_off = (_shares(found, measured[baseline]) for baseline in (PLAIN, SWITCHED_OFF))
        print(
            f"{name:36} {speed:8.1f}  {of_plain:8.3f}  {of_off:6.3f}  {busy:15.2f}  "
            f"{accepted:7} / {drafted:<6}  {num_equal} / {num_all}"
        )
        if must_be_equal and num_equal < num_all:
            faults.append(f"{name}: {num_all - num_equal} of {num_all} answers have other tokens than plain vLLM's")
        if name in WITHOUT_DRAFTS and of_off < MIN_SHARE_WITHOUT_DRAFTS:
            faults.append(f"{name}: {of_off:.3f} of the same server's speed with its proposer off")
    print(*faults, sep="\n")
    return 1 if faults else 0


def _shares(found: Sequence[Measured], baseline: Sequence[Measured]) -> float:
    """Returns the median over rounds of a case's speed, as a share of the baseline's in the same round."""
    return median(one.tokens_per_second / other.tokens_per_second for one, other in zip(found, baseline, strict=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default=ModelConfig().id)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="also vLLM a step ahead, and with its own lookup (16 GB)")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--every", type=int, default=4, help="use every Nth prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
