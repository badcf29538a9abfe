"""Mixed load on a cluster with a random fault every five seconds: `make soak`. Tokens and memory are checked."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import psutil

from tests.faults.faulty_cluster import FaultyCluster
from tests.faults.matrix import assert_same
from tests.faults.requests import KINDS, Request
from tests.support.tiny_model import make_tiny_model

FAULT_SECONDS = 5.0
NUM_CLIENTS = 4
NUM_REQUESTS = 48
PROMPT_LENGTHS = (40, 150, 500)
ANSWER_SECONDS = 90.0
RESUME_SECONDS = 60.0
SLOW_SECONDS = 0.02
FAULTS = ("kill", "stop", "close", "slow", "partition")
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "draft-0")
WARM_SECONDS = 60.0
GROWTH_BYTES = 32 << 20
"""Bytes by which a warm process may grow, from the median of its first third of samples to that of its last third."""


class Soak:
    def __init__(self, cluster: FaultyCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.failures: list[str] = []
        self.num_answers: Counter[str] = Counter()
        self.num_attempts = 0
        self.longest_gap_seconds = 0.0
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)  # (name, pid) → (time, bytes)

    def run(self, seconds: float) -> None:
        asked = [(self._random.choice(list(KINDS)), number) for number in range(NUM_REQUESTS)]
        undisturbed = {one: self._send(*one).join(timeout_seconds=ANSWER_SECONDS) for one in asked}
        clients = [
            threading.Thread(target=self._ask, args=(random.Random(index), asked, undisturbed), daemon=True)
            for index in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.failures:
            self._fault()
        self._is_over.set()
        for client in clients:
            client.join(2 * ANSWER_SECONDS)
        self._cluster.wait_until_whole()

    def _send(self, kind: str, number: int) -> Request:
        return Request(
            self._cluster.client,
            kind,
            number,
            num_prompt_tokens=PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)],
            resume_window_seconds=RESUME_SECONDS,
        )

    def _ask(self, chance: random.Random, asked: list, undisturbed: dict) -> None:
        while not self._is_over.is_set():
            one = chance.choice(asked)
            request = self._send(*one)
            try:
                assert_same(request.join(timeout_seconds=ANSWER_SECONDS), undisturbed[one])
            except AssertionError as error:
                with self._lock:
                    self.failures.append(f"{one}: {str(error)[:2000]}")
                return
            with self._lock:
                self.num_answers[one[0]] += 1
                self.num_attempts += request.attempts
                self.longest_gap_seconds = max(self.longest_gap_seconds, request.longest_gap_seconds)

    def _fault(self) -> None:
        cluster = self._cluster
        action = self._random.choice(FAULTS)
        names = NODES if action == "kill" else (*NODES, "router")
        name = self._random.choice(names)
        seconds = self._random.uniform(0.2, 4.0)
        print(f"{action} {name}" + ("" if action in ("kill", "close") else f" for {seconds:.1f} s"), flush=True)
        started = time.monotonic()
        if action in ("kill", "stop"):
            cluster.wait_serving(name)
        cluster.inflict(action, name, slow_seconds=SLOW_SECONDS)
        self._is_over.wait(seconds)
        cluster.undo()
        self._is_over.wait(max(started + FAULT_SECONDS - time.monotonic(), 0.0))
        self._weigh()

    def _weigh(self) -> None:
        for node in self._cluster.cluster.nodes:
            if node.pid and psutil.pid_exists(node.pid):
                self.memory[node.name, node.pid].append((time.monotonic(), psutil.Process(node.pid).memory_info().rss))

    def growths(self) -> dict[str, int]:
        """Returns the growth in bytes of each process that lived long enough."""
        found = {}
        for (name, pid), samples in self.memory.items():
            warm = [num_bytes for at, num_bytes in samples if at >= samples[0][0] + WARM_SECONDS]
            third = len(warm) // 3
            if third:
                found[f"{name} ({pid})"] = int(median(warm[-third:]) - median(warm[:third]))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as directory:
        model = make_tiny_model(Path(directory) / "model")
        with FaultyCluster(model, Path(directory)) as cluster:
            soak = Soak(cluster, seed)
            soak.run(arguments.seconds)
    growths = soak.growths()
    answers = ", ".join(f"{kind}: {num}" for kind, num in sorted(soak.num_answers.items()))
    print(f"{soak.num_answers.total()} answers in {soak.num_attempts} attempts ({answers})")
    print(f"longest time between two deltas: {soak.longest_gap_seconds:.1f} s")
    for process, growth in growths.items():
        print(f"{process}: {growth / (1 << 20):+.1f} MiB")
    for failure in soak.failures:
        print(f"FAILED {failure}")
    too_much = [process for process, growth in growths.items() if growth > GROWTH_BYTES]
    if too_much:
        print(f"FAILED more than {GROWTH_BYTES >> 20} MiB: {', '.join(too_much)}")
    return 1 if soak.failures or too_much else 0


if __name__ == "__main__":
    sys.exit(main())
