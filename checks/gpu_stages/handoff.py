"""Transfers KV of Llama-3.1-8B between two processes of this machine, by each connector.

Both sides are the nodes' own classes: a `KvPush` for one cache, a `KvReceiver` for the other. Rates are for whole
pushes, from connecting to the reply to the commit. Afterwards the receiver's keys and values must equal the sender's.

A line's `sender_ms` and `receiver_ms` say where the last round's time went: the sums over all frames of the times in
some functions, which include their waits for the GPU. `put` and `handle` contain others.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from unittest import mock

import torch
import xxhash

from checks.gpu_stages.day import Day
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.tensor_planes import DeviceBytes, DeviceRows
from outrider.errors import ConfigError
from outrider.kv_transfer.arena import ArenaMapping
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import CONNECTORS, CUDA_IPC, KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.cuda_ipc import open_shared_gpu
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.receiver_stream import ReceiverStream
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.kv_transfer.sender import Sender
from outrider.kv_transfer.sender_stream import SenderStream
from prefill_node.jobs import PushOutcome
from prefill_node.push import KvPush, LayerGroups

PLANES = tuple(PlaneSpec(name, 32, 8, 128, "bfloat16") for name in ("k", "v"))
INCARNATION = b"g" * 16
BLOCK_SIZE = 16
AT_ONCE = (1, 4)
"""Numbers of concurrent pushes."""
FRAME_MIB = (4, 16, 64)
"""Sizes of frames by CUDA IPC, in MiB, that are measured besides the nodes' own."""
NUM_SLOTS = 8
"""Number of such frames in an arena."""
NUM_ROUNDS = 5
PUSH_SECONDS = 20.0
"""Time limit of one round, in seconds."""
PARTS: Mapping[str, Mapping[str, tuple[type, str]]] = {
    "sender": {
        "read": (ReservedBlocks, "read"),
        "gather": (DeviceRows, "gather"),
        "checksum": (DeviceBytes, "checksum"),
        "room": (SenderStream, "wait_for_room"),
        "put": (Sender, "put"),
        "commit": (Sender, "commit"),
    },
    "receiver": {
        "copy": (ArenaMapping, "copy"),
        "checksum": (DeviceBytes, "checksum"),
        "write": (ReservedBlocks, "write"),
        "handle": (ReceiverStream, "handle"),
    },
}
"""Timed functions, as class and method, by process and name."""


def run(day: Day) -> None:
    targets = [day.device]
    if day.is_gpu and torch.cuda.device_count() > 1:
        targets.append("cuda:1")
    for target in targets:
        size: dict[str, Any] = {"num_tokens": 4096, "frame_mib": FRAME_MIB} if day.is_gpu else {"num_tokens": 64}
        for line in measure(day.device, target, **size):
            day.tell("handoff", to=target, **line)
            day.expect(f"{line['connector']}: {line.get('error')}", "error" not in line)
            day.expect(f"{line['connector']}: other keys and values arrive", line.get("same", True))


def measure(
    device: str,
    to_device: str,
    *,
    connectors: Sequence[str] = CONNECTORS,
    at_once: Sequence[int] = AT_ONCE,
    frame_mib: Sequence[int] = (),
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
        frame_mib: sizes of frames in MiB with which the first of these numbers is measured by CUDA IPC, too.
        num_rounds: measured rounds, after one that connects and allocates memory.
        num_tokens: number of tokens of each prompt, a multiple of BLOCK_SIZE.
    """
    cache = _open_cache(device, max(at_once) * num_tokens)
    for plane in cache.planes:
        for layer in cache.layers(plane.name):
            layer.normal_()
    with _receiving_process(to_device, cache.num_blocks) as peer:
        address = f"127.0.0.1:{peer.recv()}"
        asked_for = [(KvTransferConfig(connector=name), at_once) for name in connectors]
        asked_for += [(_with_frames(mib << 20), at_once[:1]) for mib in frame_mib]
        for config, numbers in asked_for:
            name = config.connector
            try:
                connector = Connector(config, gpu=open_shared_gpu(cache.copies, config))
            except ConfigError as error:
                yield {"connector": name, "unavailable": str(error)}
                continue
            for num_pushes in numbers:
                asked = {"connector": name, "at_once": num_pushes, "tokens": num_tokens}
                try:
                    figures = _measure_pushes(
                        connector, config, cache, peer, address, num_pushes, num_rounds, num_tokens
                    )
                except (queue.Empty, EOFError, BrokenPipeError) as error:
                    figures = {"error": f"the receiver is silent: {error!r}"}
                yield asked | figures
            connector.close()


def _with_frames(num_bytes: int) -> KvTransferConfig:
    return KvTransferConfig(connector=CUDA_IPC, device_frame_bytes=num_bytes, device_arena_bytes=NUM_SLOTS * num_bytes)


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
        with _timed("sender") as spent:
            outcomes, seconds = _push_all(connector, config, cache, address, specs)
        if errors := [each.error for each in outcomes if each.error is not None]:
            return {"error": str(errors[0])}
        times.append(seconds)
    peer.send(None)
    digests, receiver_ms = peer.recv()
    num_bytes, used = sum(each.kv_bytes for each in outcomes), outcomes[0].connector
    return {
        "used": used,
        "frame_mib": (config.device_frame_bytes if used == CUDA_IPC else config.frame_bytes) / (1 << 20),
        "mib": num_bytes >> 20,
        "ms": round(1e3 * median(times[1:]), 2),
        "first_ms": round(1e3 * times[0], 2),
        "gb_s": round(num_bytes / median(times[1:]) / 1e9, 2),
        "same": digests == [_digest(cache, _blocks(place, num_tokens)) for place in range(num_pushes)],
        "sender_ms": _rounded(spent),
        "receiver_ms": receiver_ms,
    }


def _push_all(
    connector: Connector, config: KvTransferConfig, cache: PagedKVCache, address: str, specs: Sequence[TransferSpec]
) -> tuple[list[PushOutcome], float]:
    """Runs the pushes of all `specs` together. Returns their outcomes, and the seconds until the last was committed."""
    outcomes: queue.SimpleQueue[PushOutcome] = queue.SimpleQueue()
    groups = LayerGroups.of(cache, frame_bytes=config.frame_bytes)
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


@contextlib.contextmanager
def _timed(process: str) -> Iterator[Counter[str]]:
    """Yields the milliseconds spent in each of the PARTS of "sender" or "receiver", summed over threads and calls."""
    spent: Any = Counter()

    def timing(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[name] += 1e3 * (time.perf_counter() - started)

        return call

    with contextlib.ExitStack() as replaced:
        for name, (owner, method) in PARTS[process].items():
            timing_one = timing(name, getattr(owner, method))
            replaced.enter_context(mock.patch.object(owner, method, timing_one))
        yield spent


def _rounded(spent: Mapping[str, float]) -> dict[str, float]:
    return {name: round(milliseconds, 2) for name, milliseconds in spent.items()}


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
    """Runs the receiving process. It sends its port, opens transfers that it gets, and answers None with
    the digests of the last ones and the PARTS' milliseconds.
    """
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
    with _timed("receiver") as spent:
        while True:
            message: list[TransferSpec] | None = peer.recv()
            if message is None:
                digests = [_digest(cache, _blocks(place, each.end_token)) for place, each in enumerate(specs)]
                peer.send((digests, _rounded(spent)))
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
            spent.clear()
            peer.send(len(specs))
