"""Keys and values from one process's cache to another's, as prefill nodes push them: GB/s of each connector.

    .venv/bin/python -m benchmarks.kv_hand_off --device cuda [--to cuda:1] [--connectors cuda_ipc,shared_memory,grpc]

This process receives, and a child sends: `KvPush`, `Connector` and `KvReceiver` as in the nodes, on the layers and
heads of an 8B model in bfloat16. A rate is of whole transfers, from connecting to the commit's answer, and counts the
pushes that run at once. One JSON line for each connector and number of pushes. The first transfer, which allocates and
maps memory, is given apart. Checked at the end: the last transfer's KV in the receiver's cache is the sender's.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.cuda_ipc import open_shared_gpu
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from prefill_node.jobs import PushOutcome
from prefill_node.push import KvPush, LayerGroups

ROOT = Path(__file__).parents[1]
CONNECTORS = ("cuda_ipc", "shared_memory", "grpc")
PLANES = tuple(PlaneSpec(name, 32, 8, 128, "bfloat16") for name in ("k", "v"))  # of Llama-3.1-8B
BLOCK_SIZE = 16
NUM_TOKENS = {"cuda": 4096, "cpu": 512}
INCARNATION = b"h" * 16
CHILD_SECONDS = 120.0


def measure(
    *,
    device: str = "cuda",
    to_device: str | None = None,
    connectors: Sequence[str] = CONNECTORS,
    at_once: Sequence[int] = (1, 4),
    num_rounds: int = 5,
    num_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """A result for each connector and number of pushes at once: a failure has "error" in place of figures.

    `device`: of the sender's cache; `to_device`: of the receiver's, by default the same. `num_tokens`: of one push.
    """
    num_tokens = num_tokens or NUM_TOKENS[device.partition(":")[0]]
    for connector in connectors:
        for count in at_once:
            asked = {"connector": connector, "at_once": count, "tokens": num_tokens}
            try:
                figures = _measured(device, to_device or device, connector, count, num_rounds, num_tokens)
            except Exception as error:  # noqa: BLE001 the others go on
                figures = {"error": f"{type(error).__name__}: {error}"}
            yield asked | figures


def _measured(
    device: str, to_device: str, connector: str, count: int, num_rounds: int, num_tokens: int
) -> dict[str, Any]:
    cache = _cache(to_device, count, num_tokens)
    config = KvTransferConfig(connector=connector)
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    receiver = KvReceiver(
        incarnation=INCARNATION,
        host="127.0.0.1",
        connectors=config.accepted,
        on_complete=lambda _id, _stats: None,
        on_failed=lambda _id, reason: news.put(reason),
        gpu=open_shared_gpu(cache.copies, config),
    )
    port = receiver.start()
    arguments = [connector, device, f"127.0.0.1:{port}", str(count), str(num_tokens)]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kv_hand_off", "--send", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    deadline = threading.Timer(CHILD_SECONDS, child.kill)
    deadline.start()
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        rounds = []
        for _ in range(1 + num_rounds):
            ids = [os.urandom(16) for _ in range(count)]
            for index, transfer_id in enumerate(ids):
                receiver.inbox.open(_spec(transfer_id, num_tokens), ReservedBlocks(cache, _blocks(index, num_tokens)))
            child.stdin.write(" ".join(each.hex() for each in ids) + "\n")
            rounds.append(json.loads(child.stdout.readline() or '{"error": "the sender has ended"}'))
            for transfer_id in ids:
                receiver.close(transfer_id)
            if "error" in rounds[-1]:
                return rounds[-1]
    finally:
        deadline.cancel()
        child.kill()
        child.wait()
        receiver.stop()
    seconds = [each["seconds"] for each in rounds]
    num_bytes = rounds[-1]["bytes"]
    return {
        "used": rounds[-1]["used"],
        "gb_s": round(num_bytes / median(seconds[1:]) / 1e9, 3),
        "ms": round(1e3 * median(seconds[1:]), 2),
        "first_ms": round(1e3 * seconds[0], 2),
        "bytes": num_bytes,
        "same": _is_pattern(cache, num_tokens),
    }


def _cache(device: str, count: int, num_tokens: int) -> PagedKVCache:
    num_blocks = count * (num_tokens // BLOCK_SIZE)
    return PagedKVCache(PLANES, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)


def _blocks(index: int, num_tokens: int) -> range:
    num_blocks = num_tokens // BLOCK_SIZE
    return range(index * num_blocks, (index + 1) * num_blocks)


def _spec(transfer_id: bytes, num_tokens: int) -> TransferSpec:
    return TransferSpec(
        transfer_id=transfer_id, incarnation=INCARNATION, start_token=0, end_token=num_tokens, planes=PLANES
    )


def _pattern(layer: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of one layer's keys of `num_tokens` tokens."""
    return np.random.default_rng(layer).integers(0, 256, num_tokens * PLANES[0].bytes_per_token_per_layer, np.uint8)


def _is_pattern(cache: PagedKVCache, num_tokens: int) -> bool:
    layers = (0, PLANES[0].num_layers - 1)
    slots = np.arange(num_tokens)
    return all(
        bytes(cache.read("k", range(layer, layer + 1), slots)) == _pattern(layer, num_tokens).tobytes()
        for layer in layers
    )


def _send(connector_name: str, device: str, address: str, count: int, num_tokens: int) -> None:
    """The child: for each line of transfer ids, pushes them at once and says how it went."""
    cache = _cache(device, count, num_tokens)
    for layer in range(PLANES[0].num_layers):
        slots = np.arange(num_tokens)
        cache.write("k", range(layer, layer + 1), slots, _pattern(layer, num_tokens).data)
    config = KvTransferConfig(connector=connector_name)
    connector = Connector(config, gpu=open_shared_gpu(cache.copies, config))
    groups = LayerGroups.of(PLANES, frame_bytes=config.frame_bytes)
    for line in sys.stdin:
        outcomes: queue.SimpleQueue[PushOutcome] = queue.SimpleQueue()
        started_at = time.perf_counter()
        for index, transfer_id in enumerate(line.split()):
            push = KvPush(
                connector=connector,
                kv_cache=cache,
                address=address,
                spec=_spec(bytes.fromhex(transfer_id), num_tokens),
                block_ids=_blocks(index, num_tokens),
                on_ended=outcomes.put,
            )
            push.start()
            for layer in range(groups.num_layers):
                layers = groups.ending_at(layer, num_tokens=num_tokens)
                if layers is not None:
                    push.offer(layers, 0, num_tokens)
            push.finish()
        ended = [outcomes.get() for _ in line.split()]
        seconds = time.perf_counter() - started_at
        errors = [each.error.message for each in ended if each.error is not None]
        figures = {"error": errors[0]} if errors else {}
        num_bytes = sum(each.kv_bytes for each in ended)
        figures |= {"used": ended[0].connector, "seconds": seconds, "bytes": num_bytes}
        print(json.dumps(figures), flush=True)
    connector.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="of the sender's cache, such as cuda:0 or cpu")
    parser.add_argument("--to", help="device of the receiver's cache; by default the same")
    parser.add_argument("--connectors", default=",".join(CONNECTORS))
    parser.add_argument("--tokens", type=int, help="of one push")
    parser.add_argument("--send", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        connector, device, address, count, num_tokens = arguments.send
        _send(connector, device, address, int(count), int(num_tokens))
        return 0
    connectors = arguments.connectors.split(",")
    failed = False
    for result in measure(
        device=arguments.device, to_device=arguments.to, connectors=connectors, num_tokens=arguments.tokens
    ):
        print(json.dumps(result), flush=True)
        failed |= "error" in result
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
