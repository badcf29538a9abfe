"""A group of ranks whose workers are threads of this process."""

from __future__ import annotations

import queue
import socket
import threading

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.model_spec import ModelSpec
from outrider.engine.ranks.channel import Channel
from outrider.engine.ranks.commands import Step
from outrider.engine.ranks.group import Member, RankGroup
from outrider.engine.ranks.sharded_cache import ShardedKVCache
from outrider.engine.ranks.worker import RankWorker

NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 3, 4, 6
PATIENCE_SECONDS = 30.0
FEATURES = PlaneSpec("feature-0", 1, 1, 5, "float32")
WHOLE = ModelSpec(
    architecture="",
    num_layers=NUM_LAYERS,
    num_heads=NUM_HEADS,
    num_kv_heads=NUM_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=1,
    max_model_len=1,
    dtype="float32",
    features=FEATURES,
)


class EndlessProcess:
    """A stand-in for a rank's process. It never ends."""

    pid = 0

    def kill(self):
        """Does nothing. `RankGroup.ask` calls it."""

    def poll(self):
        return None

    def wait(self, timeout=None):
        return 0


class GatedRunner:
    """A runner that waits for a gate before each layer, then writes 1 into slot 0 of this rank's heads."""

    def __init__(self, cache):
        self.cache = cache
        self.gates = queue.SimpleQueue()
        self.batches = []

    def forward(self, batch, *, on_layer_done):
        self.batches.append(batch)
        for layer in range(NUM_LAYERS):
            assert self.gates.get(timeout=PATIENCE_SECONDS)
            self.cache.keys[layer][0, 0] = 1.0
            on_layer_done(layer)


class Ranks:
    """A group of `size` ranks. Ranks other than 0 are threads.

    `layers`: of each rank, if ranks do not divide heads. `features`: further planes of rank 0.
    """

    def __init__(self, size, layers=None, features=(FEATURES,)):
        num_heads = NUM_HEADS if layers else NUM_HEADS // size
        self.caches = [
            PagedKVCache(
                (*(PlaneSpec(name, num, num_heads, HEAD_DIM, "float32") for name in ("k", "v")), *extra),
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
            )
            for num, extra in zip(
                map(len, layers) if layers else [NUM_LAYERS] * size, (features, *[()] * (size - 1)), strict=True
            )
        ]
        self.runners = [GatedRunner(cache) for cache in self.caches[1:]]
        self.threads = []
        self.group = RankGroup(answer_seconds=PATIENCE_SECONDS, on_lost=lambda _: None, release=lambda: None)
        for rank in range(1, size):
            ours, theirs = zip(*[socket.socketpair() for _ in range(3)], strict=True)
            commands, kv = (Channel(end, peer=f"rank {rank}", timeout_seconds=PATIENCE_SECONDS) for end in ours[:2])
            self.group.add(Member(rank, EndlessProcess(), commands, kv, ours[2]))
            far = [Channel(end, peer="rank 0", timeout_seconds=PATIENCE_SECONDS) for end in theirs[:2]]
            worker = RankWorker(
                runner=self.runners[rank - 1],
                kv_cache=self.caches[rank],
                commands=far[0],
                kv=far[1],
                tasks=theirs[2],
                timeout_seconds=PATIENCE_SECONDS,
            )
            self.threads.append(threading.Thread(target=worker.run, daemon=True))
            self.threads[-1].start()
        self.cache = ShardedKVCache(self.caches[0], self.group, *((WHOLE, layers) if layers else ()))

    def step(self):
        batch = build_input_batch([SequenceRows([7], 0, [0], 1)], BLOCK_SIZE)
        return self.group.running(Step((batch,)))

    def close(self):
        self.group.close()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
