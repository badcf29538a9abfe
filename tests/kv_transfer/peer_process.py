"""The process that tests freeze and kill: `peer_process.py receive|send …`.

It prints lines on stdout and ends when stdin is closed. With a directory in the environment
variable FAKE_GPU, it has a fake GPU.
"""

from __future__ import annotations

import os
import sys
import threading

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import OutriderError
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver

INCARNATION = b"i" * 16
PLANES = (PlaneSpec("k", 1, 1, 16, "float32"),)
NUM_TOKENS = 4096
FRAME_TOKENS = 64


def spec_of(transfer_id):
    return TransferSpec(
        transfer_id=transfer_id, incarnation=INCARNATION, start_token=0, end_token=NUM_TOKENS, planes=PLANES
    )


def say(*words):
    print(*words, flush=True)


def open_gpu():
    if "FAKE_GPU" not in os.environ:
        return None
    import pytest

    from tests.support.fake_cuda_driver import fake_shared_gpu

    return fake_shared_gpu(pytest.MonkeyPatch(), os.environ["FAKE_GPU"])[0]


class NullSink:
    def write(self, region, payload):
        pass


def receive(transfer_id):
    receiver = KvReceiver(
        incarnation=INCARNATION,
        host="127.0.0.1",
        on_complete=lambda _id, stats: say("complete", stats.payload_bytes),
        on_failed=lambda _id, reason: say("failed", reason),
        gpu=open_gpu(),
    )
    port = receiver.start()
    receiver.inbox.open(spec_of(transfer_id), NullSink())
    say("port", port)
    sys.stdin.read()
    receiver.stop()


def send(transfer_id, address, connector_name):
    """For each line on stdin, puts a frame and prints "put" or the error. Meanwhile, sends keep-alives."""
    gpu = open_gpu()
    if gpu:
        from tests.support.fake_cuda_driver import device_rows
    sizes = {"frame_bytes": 4096, "device_frame_bytes": 4096, "arena_bytes": 1 << 20, "device_arena_bytes": 1 << 20}
    connector = Connector(KvTransferConfig(connector=connector_name, progress_seconds=5, **sizes), gpu=gpu)
    sender = connector.connect(address, spec_of(transfer_id))
    stop = threading.Event()

    def live():
        while not stop.wait(0.2):
            try:
                sender.keep_alive()
            except OutriderError:
                return

    threading.Thread(target=live, daemon=True).start()
    say("connected", sender.connector)
    for index, _ in enumerate(sys.stdin):
        start = index * FRAME_TOKENS
        region = Region("k", range(1), range(start, start + FRAME_TOKENS), range(1))
        try:
            payload = bytes(FRAME_TOKENS * 64)
            sender.put(region, device_rows(gpu, payload) if gpu else payload)
            say("put")
        except OutriderError as error:
            say("error", type(error).__name__)
    stop.set()
    connector.close()


if __name__ == "__main__":
    mode, identifier, *rest = sys.argv[1:]
    {"receive": receive, "send": send}[mode](bytes.fromhex(identifier), *rest)
