"""Measures the milliseconds that sampling a step takes in numpy, torch and the native kernels, by logits and settings.

    python benchmarks/sampler.py [--vocab-size 49152] [--threads 2] [--rounds 200]

Prints medians over rounds in which the three take turns. Times include all Python work of a step. Run
this on a quiet machine, since sampling takes some ten microseconds, less than a time slice of another
process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.bench.machine import describe_machine
from outrider.engine.arrays import Array
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.sampler import Sampler, SampleRows
from outrider.request import SamplingParams

Logits = npt.NDArray[np.float32]

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7, top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3},
}
STEPS = ((1, 1), (1, 5), (16, 1), (16, 5))  # (number of sequences, rows per sequence)
PROMPT_TOKENS = 1000
POSITIONS_BETWEEN_ROUNDS = 5


def like_a_language_model(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    """Makes logits that give nearly all of each row's probability to about ten tokens."""
    rows = rng.standard_normal((num_rows, vocab_size)) * 2.2
    rows += np.where(rng.random(rows.shape) < 10 / vocab_size, rng.uniform(5, 14, rows.shape), 0)
    return rows.astype(np.float32)


def flat(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    """Makes logits with nearly equal probabilities: the hardest case for top_p."""
    return (rng.standard_normal((num_rows, vocab_size)) * 0.01).astype(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, int, int], Logits]] = {
    "like a model": like_a_language_model,
    "flat": flat,
}


class Timed:
    """A sampler to be timed, with the sequences of one kind of step."""

    def __init__(self, sampler: Sampler, params: dict[str, Any], num_sequences: int, num_rows: int) -> None:
        self._sampler = sampler
        self._num_rows = num_rows
        self._states = [
            sampler.start(
                SamplingParams(seed=i, max_tokens=1 << 20, **params),
                sample=0,
                prompt_token_ids=range(PROMPT_TOKENS),
            )
            for i in range(num_sequences)
        ]
        self.seconds: list[float] = []

    def decide(self, logits: Array, position: int) -> list[int]:
        draft = (1,) * (self._num_rows - 1)
        rows = [SampleRows(state, position, draft) for state in self._states]
        started = time.perf_counter()
        token_ids = self._sampler.sample(logits, rows).token_ids
        self.seconds.append(time.perf_counter() - started)
        return token_ids


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args(argv)
    choice = choose_kernels()
    if choice.library is None:
        print(choice)
        return 1
    torch.set_num_threads(arguments.threads)
    team = CpuKernels(KernelLibrary(choice.library), arguments.threads)
    known = np.ones(arguments.vocab_size, dtype=np.bool_)
    samplers = {
        name: Sampler(vocab_size=arguments.vocab_size, known_token_ids=known, kernels=kernels)
        for name, kernels in (("native", team), ("numpy", None), ("torch", None))
    }
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit}")
    print(f"{choice}, {arguments.threads} threads, {arguments.vocab_size} ids, sequences x rows; milliseconds a step")
    rng = np.random.default_rng(0)
    for kind, make in KINDS.items():
        for num_sequences, num_rows in STEPS:
            logits = make(rng, num_sequences * num_rows, arguments.vocab_size)
            given = {"native": logits, "numpy": logits, "torch": torch.from_numpy(logits)}
            for setting, params in SETTINGS.items():
                timed = {name: Timed(sampler, params, num_sequences, num_rows) for name, sampler in samplers.items()}
                for i in range(arguments.rounds):
                    position = i * POSITIONS_BETWEEN_ROUNDS
                    decided = [each.decide(given[name], position) for name, each in timed.items()]
                    if decided != decided[:1] * len(decided):
                        print(f"{', '.join(timed)} differ: {kind}, {setting}, position {position}")
                        return 1
                figures = ", ".join(f"{name} {median(each.seconds) * 1000:.3f}" for name, each in timed.items())
                print(f"{kind:13} {num_sequences:2} x {num_rows}  {setting:28} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
