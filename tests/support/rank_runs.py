"""Steps and hand-offs of a model that runs in one or several ranks, to compare."""

from __future__ import annotations

import os
import queue
import signal
import time

import numpy as np
import pytest
import torch

from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.ranks.channel import RankLostError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.model_hub.compute import ModelRuntime, open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.ranks import open_ranks
from prefill_node.push import KvPush

BLOCK_SIZE = 4
PROMPT = [3 + (7 * n) % 290 for n in range(41)]
CHUNKS = [(0, 16), (16, 32), (32, len(PROMPT) - 1)]
TABLE, OTHER_TABLE, THIRD_TABLE = [9, 2, 17, 30, 4, 21, 8, 0, 13, 26, 11, 5], list(range(31, 43)), list(range(43, 55))
NUM_BLOCKS = 64
KV_CACHE = KVCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
PATIENCE_SECONDS = 60.0
FEATURES = FeatureReduction(taps=(2, 3), hidden_size=64, takes_final_norm=True)


def open_divided(path, on_rank_lost=print, *, features=None, timeout_seconds=PATIENCE_SECONDS, **settings):
    """Opens a model in as many processes as `settings`, those of the section `model`, say."""
    config = ModelConfig(**{"id": str(path), "num_threads": 1, "max_model_len": 128, **settings})
    named = {"max_rows_per_step": 64, "features": features, "on_rank_lost": on_rank_lost}
    if config.num_ranks == 1:
        return open_model_runtime(config, KV_CACHE, **named)
    parts = open_ranks(config, KV_CACHE, timeout_seconds=timeout_seconds, **named)
    return ModelRuntime(*parts, max_rows_per_step=64, adapters=None)


def forward(compute, *rows):
    return torch.as_tensor(compute.runner.forward(build_input_batch(rows, BLOCK_SIZE))).clone()


def run(compute):
    """Returns the logits of a prompt in chunks, of greedy steps and of verification steps, and the greedy tokens."""
    logits, tokens = [], list(PROMPT)
    for start, end in CHUNKS:
        logits.append(forward(compute, SequenceRows(PROMPT[start:end], start, TABLE, end - start)))
    assert forward(compute, SequenceRows(PROMPT[:9], 0, OTHER_TABLE, 0)).shape[0] == 0
    for _ in range(4):
        logits.append(forward(compute, SequenceRows(tokens[-1:], len(tokens) - 1, TABLE, 1)))
        tokens.append(int(logits[-1].argmax()))
    compute.kv_cache.copy_blocks([(31, 43), (32, 44), (33, 45)])
    rows = [
        SequenceRows([tokens[-1], 5, 6, 7], len(tokens) - 1, TABLE, 4),
        SequenceRows([11, 12, 13], 9, OTHER_TABLE, 3),
        SequenceRows([11, 21, 12, 22], 9, THIRD_TABLE, 4, parents=(-1, -1, 1)),
    ]
    logits.append(forward(compute, *rows))
    compute.kv_cache.move_slots([(45 * BLOCK_SIZE + 3, 45 * BLOCK_SIZE + 2)])
    logits.append(forward(compute, SequenceRows([31], 11, THIRD_TABLE, 1)))
    return torch.cat(logits), tokens


def features_of(compute):
    """Returns the features of the prompt's tokens."""
    slots = slots_of(TABLE, len(PROMPT) - 1, BLOCK_SIZE)
    return compute.kv_cache.read(FEATURES.plane_name, range(1), slots).view(np.float32)


def push(source, destination, table, *, source_table=TABLE, max_frame_bytes=700):
    """Pushes the KV of the prompt, without its last token, like a prefill node to a decode node."""
    ended, failed = queue.SimpleQueue(), []
    receiver = KvReceiver(
        incarnation=bytes(16),
        host="127.0.0.1",
        on_complete=lambda *_: None,
        on_failed=lambda _, reason: failed.append(reason),
        connectors=("grpc",),
    )
    connector = Connector(KvTransferConfig(connector="grpc", frame_bytes=max_frame_bytes))
    spec = TransferSpec(
        transfer_id=os.urandom(16),
        incarnation=bytes(16),
        start_token=0,
        end_token=len(PROMPT) - 1,
        planes=destination.kv_cache.planes,
    )
    receiver.inbox.open(spec, ReservedBlocks(destination.kv_cache, table))
    kv_push = KvPush(
        connector=connector,
        kv_cache=source.kv_cache,
        address=f"127.0.0.1:{receiver.start()}",
        spec=spec,
        block_ids=source_table,
        on_ended=ended.put,
    )
    kv_push.start()
    for start, end in CHUNKS:
        source.runner.forward(
            build_input_batch([SequenceRows(PROMPT[start:end], start, source_table, 0)], BLOCK_SIZE),
            on_layer_done=lambda layer, start=start, end=end: kv_push.offer(range(layer, layer + 1), start, end),
        )
        kv_push.offer(None, start, end)
    kv_push.finish()
    outcome = ended.get(timeout=PATIENCE_SECONDS)
    connector.close()
    receiver.stop()
    assert (outcome.error, failed) == (None, [])
    for plane in spec.planes:
        layers = range(plane.num_layers)
        sent = source.kv_cache.read(plane.name, layers, slots_of(source_table, len(PROMPT) - 1, BLOCK_SIZE))
        came = destination.kv_cache.read(plane.name, layers, slots_of(table, len(PROMPT) - 1, BLOCK_SIZE))
        assert np.array_equal(sent, came)


def assert_that_a_hang_ends_the_step(several, *, slot):
    """Rank 1 stops: a step, and then a read of a slot that it holds, end in bounded time. Its timeout must be short."""
    process = several.ranks.members[0].process
    try:
        with several.ranks:
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                forward(several, SequenceRows(PROMPT[:5], 0, TABLE, 1))
            assert time.monotonic() - started < PATIENCE_SECONDS
            with pytest.raises(RankLostError, match="rank 1 sends nothing"):
                several.kv_cache.read("k", range(1), np.array([slot]))
    finally:
        assert process.poll() == -9


def assert_that_a_kill_ends_the_step(several, lost):
    """Rank 1 is killed: a step fails, and the loss is told to `lost`, the queue of `on_rank_lost`."""
    assert lost.empty()
    several.ranks.members[0].process.kill()
    with pytest.raises(RankLostError, match=r"rank 1 .* ended with status -9"):
        forward(several, SequenceRows(PROMPT[-1:], len(PROMPT) - 1, TABLE, 1))
    assert "status -9" in str(lost.get(timeout=PATIENCE_SECONDS))
