"""A decode loop on a tiny model, driven by hand."""

from __future__ import annotations

import contextlib

from decode_node.__main__ import make_build
from decode_node.config import DecodeNodeConfig
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.rpc.tls import PLAINTEXT
from outrider.service.config import ServerConfig
from tests.decode_node.driven_node import DrivenNode

PROMPT = (11, 12, 13, 14, 15, 11, 12, 13, 14, 15, 11, 12)


class TinyNode(DrivenNode):
    prompt = PROMPT
    max_tokens = 40
    reached_host = "127.0.0.1"

    def __init__(self, model_path, *, drafts=None, head="", adapters=(), **config):
        super().__init__()
        config = DecodeNodeConfig(**{"kv_cache": KVCacheConfig(num_blocks=256), "local_lookup": "none", **config})
        model = ModelConfig(id=str(model_path), head=head, num_threads=1, adapters=adapters)
        build = make_build(config, model, ServerConfig(), PLAINTEXT)
        self.parts = build(bytes(16), "decode", self._emit)
        self.loop, self.groups, self.engine = self.parts.loop, self.parts.groups, self.parts.engine
        self.parts.ingest.start()
        self.loop._drafts._loop_clock = None  # the engine runs in the main thread here
        if drafts is not None:
            self.loop._drafts._client = drafts

    def iterate(self):
        self.loop.iterate()

    def close(self):
        self.parts.ingest.receiver.stop()


@contextlib.contextmanager
def tiny_nodes():
    """Yields a factory of `TinyNode`s, which are closed at the end."""
    with contextlib.ExitStack() as opened:

        def make(model_path, **config):
            node = TinyNode(model_path, **config)
            opened.callback(node.close)
            return node

        yield make


def generate(node, **fields):
    group_id = node.open(**fields)
    node.run()
    return node.tokens(group_id)
