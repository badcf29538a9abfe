"""Transfers KV of Llama-3.1-8B between two processes of this machine, by each connector.

Both sides are the nodes' own classes: a `KvPush` for one cache, a `KvReceiver` for the other. Rates are for whole
pushes, from connecting to the reply to the commit. Afterwards the receiver's keys and values must equal the sender's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import xxhash

from checks.gpu_stages.day import Day
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import ConfigError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import CONNECTORS, KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.cuda_ipc import open_shared_gpu
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from prefill_node.jobs import PushOutcome
from prefill_node.push import KvPush, LayerGroups

PLANES = tuple(PlaneSpec(name, 32, 8, 128, "bfloat16") for name in ("k", "v"))
INCARNATION = b"g" * 16
BLOCK_SIZE = 16
AT_ONCE = (1, 4)
"""Numbers of concurrent pushes."""
NUM_ROUNDS = 5
PUSH_SECONDS = 20.0
"""Time limit of one round, in seconds."""


def run(day: Day) -> None:
    targets = [day.device]
    if day.is_gpu and torch.cuda.device_count() > 1:
        targets.append("cuda:1")
    for target in targets:
        for line in measure(day.device, target, num_tokens=4096 if day.is_gpu else 64):
            day.tell("handoff", to=target, **line)
            day.expect(f"{line['connector']}: {line.get('error')}", "error" not in line)
            day.expect(f"{line['connector']}: other keys and values arrive", line.get("same", True))


def measure(
    device: str,
    to_device: str,
    *,
    connectors: Sequence[str] = CONNECTORS,
    at_once: Sequence[int] = AT_ONCE,
    num_rounds: int = NUM_ROUNDS,
    num_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Yields figures for each connector and number of concurrent pushes, as JSON values.

    Instead of figures, "unavailable" says why this machine lacks a connector, or "error" says what went wrong.

    Args:
        device: the device of the sender's cache.
        to_device: the device of the receiver's cache, in another process.
        connectors: as in settings, without "auto".
        at_once: numbers of prompts that are pushed concurrently.
        num_rounds: measured rounds, after one that connects and allocates memory.
        num_tokens: number of tokens of each prompt, a multiple of BLOCK_SIZE.
    """
    cache = _open_cache(device, max(at_once) * num_tokens)
    for plane in cache.planes:
        for layer in cache.layers(plane.name):
            layer.normal_()
    with _receiving_process(to_device, cache.num_blocks) as peer:
        address = f"127.0.0.1:{peer.recv()}"
        for name in connectors:
            config = KvTransferConfig(connector=name)
            try:
                connector = Connector(config, gpu=open_shared_gpu(cache.copies, config))
            except ConfigError as error:
                yield {"connector": name, "unavailable": str(error)}
                continue
            for num_pushes in at_once:
                asked = {"connector": name, "at_once": num_pushes, "tokens": num_tokens}
                try:
                    figures = _measure_pushes(
                        connector, config, cache, peer, address, num_pushes, num_rounds, num_tokens
                    )
                except (queue.Empty, EOFError, BrokenPipeError) as error:
                    figures = {"error": f"the receiver is silent: {error!r}"}
                yield asked | figures
            connector.close()


def _measure_pushes(
    connector: Connector,
    config: KvTransferConfig,
    cache: PagedKVCache,
    peer: Connection,
    address: str,
    num_pushes: int,
    num_rounds: int,
    num_tokens: int,
) -> dict[str, Any]:
    times = []
    for _ in range(1 + num_rounds):
        specs = [_new_spec(num_tokens) for _ in range(num_pushes)]
        peer.send(specs)
        peer.recv()  # after this reply, the receiver expects the pushes
        outcomes, seconds = _push_all(connector, config, cache, address, specs)
        if errors := [each.error for each in outcomes if each.error is not None]:
            return {"error": str(errors[0])}
        times.append(seconds)
    peer.send(None)
    num_bytes = sum(each.kv_bytes for each in outcomes)
    return {
        "used": outcomes[0].connector,
        "mib": num_bytes >> 20,
        "ms": round(1e3 * median(times[1:]), 2),
        "first_ms": round(1e3 * times[0], 2),
        "gb_s": round(num_bytes / median(times[1:]) / 1e9, 2),
        "same": peer.recv() == [_digest(cache, _blocks(place, num_tokens)) for place in range(num_pushes)],
    }


def _push_all(
    connector: Connector, config: KvTransferConfig, cache: PagedKVCache, address: str, specs: Sequence[TransferSpec]
) -> tuple[list[PushOutcome], float]:
    """Runs the pushes of all `specs` together. Returns their outcomes, and the seconds until the last was committed."""
    outcomes: queue.SimpleQueue[PushOutcome] = queue.SimpleQueue()
    groups = LayerGroups.of(PLANES, frame_bytes=config.frame_bytes)
    started = time.perf_counter()
    for place, spec in enumerate(specs):
        push = KvPush(
            connector=connector,
            kv_cache=cache,
            address=address,
            spec=spec,
            block_ids=_blocks(place, spec.end_token),
            on_ended=outcomes.put,
        )
        push.start()
        for layer in range(groups.num_layers):  # as a node does after the forward pass of a whole prompt
            if (layers := groups.ending_at(layer, num_tokens=spec.end_token)) is not None:
                push.offer(layers, 0, spec.end_token)
        push.finish()
    ended = [outcomes.get(timeout=PUSH_SECONDS) for _ in specs]
    return ended, time.perf_counter() - started


def _open_cache(device: str, num_tokens: int) -> PagedKVCache:
    return PagedKVCache(PLANES, num_blocks=num_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE, device=device)


def _new_spec(num_tokens: int) -> TransferSpec:
    return TransferSpec(
        transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=0, end_token=num_tokens, planes=PLANES
    )


def _blocks(place: int, num_tokens: int) -> range:
    """Returns the block ids of the push at index `place`, which are the same in both caches."""
    num_blocks = num_tokens // BLOCK_SIZE
    return range(place * num_blocks, (place + 1) * num_blocks)


def _digest(cache: PagedKVCache, blocks: range) -> str:
    """Returns a digest of all keys and values in these blocks."""
    digest, slots = xxhash.xxh3_64(), slots_of(blocks, len(blocks) * BLOCK_SIZE, BLOCK_SIZE)
    for plane in cache.planes:
        for layer in range(plane.num_layers):
            digest.update(cache.read(plane.name, range(layer, layer + 1), slots).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _receiving_process(device: str, num_blocks: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, device, num_blocks), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _receive(peer: Connection, device: str, num_blocks: int) -> None:
    """Runs the receiving process. It sends its port, opens transfers that it gets, and answers None with digests."""
    cache = _open_cache(device, num_blocks * BLOCK_SIZE)
    receiver = KvReceiver(
        incarnation=INCARNATION,
        host="127.0.0.1",
        on_complete=lambda *_: None,
        on_failed=lambda *_: None,
        gpu=open_shared_gpu(cache.copies, KvTransferConfig()),
    )
    peer.send(receiver.start())
    specs: list[TransferSpec] = []
    while True:
        message: list[TransferSpec] | None = peer.recv()
        if message is None:
            peer.send([_digest(cache, _blocks(place, each.end_token)) for place, each in enumerate(specs)])
            continue
        for each in specs:
            receiver.close(each.transfer_id)
        specs = message
        for plane in cache.planes:
            for layer in cache.layers(plane.name):
                layer.zero_()
        if cache.copies is not None:
            torch.cuda.synchronize(device)  # since frames are written in another CUDA stream
        for place, each in enumerate(specs):
            receiver.inbox.open(each, ReservedBlocks(cache, _blocks(place, each.end_token)))
        peer.send(len(specs))
