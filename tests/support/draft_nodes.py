"""Draft nodes for synchronous clients: the fixture `nodes`."""

from __future__ import annotations

import contextlib

import pytest

from outrider.drafting import Client
from tests.decode_node.drafting.streams import serving
from tests.support.loop_thread import LoopThread
from tests.support.waiting import wait_for

VOCAB_SIZE = 100


class Nodes:
    """Draft nodes in an event loop's thread, and clients of them, which all end with the test."""

    def __init__(self, clients: contextlib.ExitStack) -> None:
        self._thread = LoopThread()
        self._clients = clients
        self._serving = {}

    def serve(self, servicer_or_service, port=0):
        """Returns the port of a node, or of an impostor."""
        context = serving(servicer_or_service, port)
        bound = self._thread.run(context.__aenter__())
        self._serving[bound] = context
        return bound

    def end(self, port):
        self._thread.run(self._serving.pop(port).__aexit__(None, None, None))

    def client(self, *ports, **options):
        values = {"vocabulary": "ours", "vocab_size": VOCAB_SIZE, "max_model_len": 4096, "name": "test", **options}
        return self._clients.enter_context(Client([f"127.0.0.1:{port}" for port in ports], **values))

    def connected(self, *ports, **options):
        client = self.client(*ports, **options)
        wait_for(lambda: len(client.status().connected) == len(ports))
        return client

    def stop(self):
        for port in tuple(self._serving):
            self.end(port)
        self._thread.stop()


@pytest.fixture
def nodes():
    with contextlib.ExitStack() as clients:
        served = Nodes(clients)
        clients.callback(served.stop)
        yield served
