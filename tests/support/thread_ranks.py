"""Threads in place of the ranks of a process group."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch

PATIENCE_SECONDS = 30.0


class ThreadRanks:
    """Has the functions of torch.distributed that divided experts call. Each rank is a thread of `run`."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self._own = threading.local()
        self._mail = defaultdict(queue.SimpleQueue)  # by sender and receiver

    def run(self, work):
        """Returns the results of `work(rank)` for each rank, computed at the same time."""

        def of_rank(rank):
            self._own.rank = rank
            with torch.inference_mode():
                return work(rank)

        with ThreadPoolExecutor(self.num_ranks) as threads:
            return list(threads.map(of_rank, range(self.num_ranks), timeout=PATIENCE_SECONDS))

    def send(self, tensor, to):
        self._mail[self._own.rank, to].put(tensor.clone())

    def recv(self, tensor, source):
        tensor.copy_(self._mail[source, self._own.rank].get(timeout=PATIENCE_SECONDS))

    def all_to_all_single(self, output, rows, output_sizes=None, input_sizes=None):
        equal = [len(rows) // self.num_ranks] * self.num_ranks
        for to, part in enumerate(rows.split(input_sizes or equal)):
            self.send(part, to)
        for source, part in enumerate(output.split(output_sizes or equal)):
            self.recv(part, source)

    def all_reduce(self, tensor):
        own = tensor.clone()
        for to in range(self.num_ranks):
            self.send(own, to)
        tensor.zero_()
        for source in range(self.num_ranks):
            tensor += self._mail[source, self._own.rank].get(timeout=PATIENCE_SECONDS)
