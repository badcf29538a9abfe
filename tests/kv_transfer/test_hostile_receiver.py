"""A receiver that sends an answer to a request that was not made."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.errors import PeerLostError
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.frames import METHOD_NAME, NOT_HELD, SERVICE_NAME
from outrider.kv_transfer.inbox import AttachState
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.kv_transfer.shared_window import SharedWindow
from tests.kv_transfer.conftest import Peers
from tests.support.kv_messages import encode_welcome

PATIENCE_SECONDS = 30.0


@pytest.fixture
def address():
    def push(requests, _context):
        next(requests)
        yield encode_welcome(AttachState.ATTACHED)
        yield NOT_HELD
        for _ in requests:
            pass

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.stream_stream_rpc_method_handler(push)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, {METHOD_NAME: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(PATIENCE_SECONDS)


def test_kv_that_was_not_asked_for_ends_the_stream(address):
    """It would fill the sender's memory, frame by frame."""
    with grpc.insecure_channel(address) as channel:
        stream = SenderStream(
            channel,
            address=address,
            window=SharedWindow(1 << 20),
            config=KvTransferConfig(connect_seconds=PATIENCE_SECONDS, progress_seconds=PATIENCE_SECONDS),
        )
        has_ended = threading.Event()
        stream.when_ended(has_ended.set)
        stream.hello(Peers.spec())
        assert has_ended.wait(PATIENCE_SECONDS)
        with pytest.raises(PeerLostError, match="not requested"):
            stream.raise_if_ended()
        stream.close()
