"""Nodes without engines, for tests: the whole wire contract in one process, in milliseconds.

A fake decode node answers the session as a real one does, with a scripted target instead of
a model; a fake prefill node "pushes KV" by telling the decode node that it is complete.
Both count what they hold, so that a test can see that nothing is left.
"""

from tests.support.router_fakes.decode_node import FakeDecodeNode, FakeGroup, Script, letters
from tests.support.router_fakes.model import EOS_TOKEN_ID, VOCAB_SIZE, fake_model_info, fake_tokenizer_files
from tests.support.router_fakes.node import FakeNode
from tests.support.router_fakes.prefill_node import FakePrefillNode

__all__ = [
    "EOS_TOKEN_ID",
    "VOCAB_SIZE",
    "FakeDecodeNode",
    "FakeGroup",
    "FakeNode",
    "FakePrefillNode",
    "Script",
    "fake_model_info",
    "fake_tokenizer_files",
    "letters",
]
