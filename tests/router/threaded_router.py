"""A router on its own event loop, so that the router's stalls are not mixed up with the client's."""

from __future__ import annotations

import gc

import grpc

from tests.router.conftest import Cluster
from tests.support.loop_thread import CALL_SECONDS, WatchedLoop

SERVICE = "/outrider.v1.RouterService/"


class ThreadedRouter(WatchedLoop):
    """A router with fake nodes on an event loop in a thread. It measures the longest stall of that loop."""

    def __init__(self, *, decode_max_running=64, tokenizer_files=None, model=None, reasoning_parser="", **config):
        gc.collect()
        gc.freeze()  # garbage collection must not stall the router for objects of earlier tests
        super().__init__()
        self.cluster = Cluster()
        self.cluster.decode.max_running = decode_max_running
        self.cluster.reasoning_parser = reasoning_parser
        for node in self.cluster.nodes:
            node.tokenizer_files = tokenizer_files or node.tokenizer_files
            node.model = model or node.model
        self.run(self.cluster.serve(**config))
        self.longest_stall_seconds = 0.0  # the start does not count
        self.channel = grpc.insecure_channel(self.cluster.address)

    def stop(self):
        self.channel.close()
        self.run(self.cluster.stack.aclose())
        super().stop()
        gc.unfreeze()

    def call(self, method, data):
        """Sends these bytes, and returns (status, messages). `method`: a method of RouterService, or a whole path."""
        path = method if method.startswith("/") else SERVICE + method
        answers = self.channel.unary_stream(path)(data, timeout=CALL_SECONDS)
        try:
            return grpc.StatusCode.OK, list(answers)
        except grpc.RpcError as error:
            return error.code(), []
