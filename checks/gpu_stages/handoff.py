"""KV of the 8B shape from one process to another on the same machine, by each connector that this build has.

Both sides are what nodes have: a `KvPush` over one cache, a `KvReceiver` over the other. Keys and values are compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import xxhash

from checks.gpu_stages.day import Day
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import ConfigError, NotSupportedError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import CONNECTORS, KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from prefill_node.jobs import PushOutcome
from prefill_node.push import KvPush, LayerGroups

INCARNATION = b"g" * 16
BLOCK_SIZE = 16
TRANSFERS = (1, 4)
"""At once."""
TRANSFER_SECONDS = 20.0
"""At most."""


def run(day: Day) -> None:
    num_tokens = 4096 if day.is_gpu else 2048
    cache = open_cache(day.device, num_tokens)
    for plane in cache.planes:
        for layer in cache.layers(plane.name):
            layer.normal_()
    with _receiving_process(day.device, num_tokens) as peer:
        port = peer.recv()
        for name in ("auto", *CONNECTORS):
            config = KvTransferConfig(connector=name)
            try:
                connector = Connector(config, **_shared_gpu(cache, config))
            except ConfigError as error:
                day.tell("handoff", asked_for=name, unavailable=str(error))
                continue
            for num_transfers in TRANSFERS:
                specs = [_spec(cache, num_tokens // num_transfers) for _ in range(num_transfers)]
                _push_all(connector, cache, f"127.0.0.1:{port}", _opened(peer, specs))  # connects, and takes memory
                specs = [_spec(cache, num_tokens // num_transfers) for _ in range(num_transfers)]
                outcomes, seconds = _push_all(connector, cache, f"127.0.0.1:{port}", _opened(peer, specs))
                _report(day, peer, cache, name, specs, outcomes, seconds)
            connector.close()


def _report(
    day: Day,
    peer: Connection,
    cache: PagedKVCache,
    name: str,
    specs: Sequence[TransferSpec],
    outcomes: Sequence[PushOutcome],
    seconds: float,
) -> None:
    if errors := [each.error for each in outcomes if each.error is not None]:
        day.tell("handoff", asked_for=name, transfers=len(specs), unavailable=str(errors[0]))
        day.expect(f"{name}: {errors[0]}", isinstance(errors[0], NotSupportedError))
        return
    peer.send(None)
    arrived, sent = peer.recv(), [_digest(cache, _blocks(place, each)) for place, each in enumerate(specs)]
    day.expect(f"{name}: keys and values arrive as they were", arrived == sent)
    num_bytes = sum(each.kv_bytes for each in outcomes)
    day.tell(
        "handoff",
        asked_for=name,
        connector=outcomes[0].connector,
        transfers=len(specs),
        mib=num_bytes >> 20,
        ms=round(1e3 * seconds, 2),
        gb_s=round(num_bytes / seconds / 1e9, 2),
    )


def _push_all(
    connector: Connector, cache: PagedKVCache, address: str, specs: Sequence[TransferSpec]
) -> tuple[list[PushOutcome], float]:
    """All at once; (how each ended, seconds until the last one was committed)."""
    config = KvTransferConfig()
    outcomes: queue.SimpleQueue[PushOutcome] = queue.SimpleQueue()
    groups = LayerGroups.of(cache.planes, frame_bytes=config.frame_bytes)
    started = time.perf_counter()
    for place, spec in enumerate(specs):
        push = KvPush(
            connector=connector,
            kv_cache=cache,
            address=address,
            spec=spec,
            block_ids=_blocks(place, spec),
            on_ended=outcomes.put,
        )
        push.start()
        for layer in range(groups.num_layers):  # as after the forward of a whole prompt
            if (layers := groups.ending_at(layer, num_tokens=spec.end_token)) is not None:
                push.offer(layers, 0, spec.end_token)
        push.finish()
    done = [outcomes.get(timeout=TRANSFER_SECONDS) for _ in specs]
    return done, time.perf_counter() - started


def open_cache(device: str, num_tokens: int) -> PagedKVCache:
    num_layers, num_heads = (32, 8) if device != "cpu" else (4, 2)
    planes = [PlaneSpec(name, num_layers, num_heads, 128, "bfloat16") for name in ("k", "v")]
    return PagedKVCache(planes, num_blocks=num_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE, device=device)


def _shared_gpu(cache: PagedKVCache, config: KvTransferConfig) -> dict[str, Any]:
    """What a connector and a receiver are given for CUDA IPC, where this build has it."""
    if importlib.util.find_spec("outrider.kv_transfer.cuda_ipc") is None:
        return {}
    cuda_ipc: Any = importlib.import_module("outrider.kv_transfer.cuda_ipc")
    return {"gpu": cuda_ipc.open_shared_gpu(cache.copies, config)}


def _spec(cache: PagedKVCache, num_tokens: int) -> TransferSpec:
    return TransferSpec(
        transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=0, end_token=num_tokens, planes=cache.planes
    )


def _blocks(place: int, spec: TransferSpec) -> range:
    """Of the transfer in this place of those that run at once, in either cache."""
    num_blocks = spec.end_token // BLOCK_SIZE
    return range(place * num_blocks, (place + 1) * num_blocks)


def _digest(cache: PagedKVCache, blocks: range) -> str:
    """Of all keys and values in these blocks."""
    digest, slots = xxhash.xxh3_64(), slots_of(blocks, len(blocks) * BLOCK_SIZE, BLOCK_SIZE)
    for plane in cache.planes:
        for layer in range(plane.num_layers):
            digest.update(cache.read(plane.name, range(layer, layer + 1), slots).data)
    return digest.hexdigest()


def _opened(peer: Connection, specs: list[TransferSpec]) -> list[TransferSpec]:
    """The same, which the receiving process expects now."""
    peer.send(specs)
    peer.recv()
    return specs


@contextlib.contextmanager
def _receiving_process(device: str, num_tokens: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, device, num_tokens), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def receive(peer: Connection, device: str, num_tokens: int) -> None:
    """The receiving process: sends its port, opens the transfers that it is sent, and sends digests when sent None."""
    cache = open_cache(device, num_tokens)
    receiver = KvReceiver(
        incarnation=INCARNATION,
        host="127.0.0.1",
        on_complete=lambda *_: None,
        on_failed=lambda *_: None,
        **_shared_gpu(cache, KvTransferConfig()),
    )
    peer.send(receiver.start())
    specs: list[TransferSpec] = []
    while True:
        message: Any = peer.recv()
        if message is None:
            peer.send([_digest(cache, _blocks(place, each)) for place, each in enumerate(specs)])
            continue
        for each in specs:
            receiver.close(each.transfer_id)
        specs = message
        for layer in (layer for plane in cache.planes for layer in cache.layers(plane.name)):
            layer.zero_()
        for place, each in enumerate(specs):
            receiver.inbox.open(each, ReservedBlocks(cache, _blocks(place, each)))
        peer.send(len(specs))
