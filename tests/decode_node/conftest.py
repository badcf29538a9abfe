"""A decode loop on a scripted engine, without torch's arithmetic, sockets or a clock."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial

import pytest

from decode_node.admission import Admission
from decode_node.commands import SessionEnded, TransferCompleted, TransferFailed
from decode_node.decode_loop import DecodeLoop
from decode_node.drafting.gather import DraftGatherer
from decode_node.sequence_group_manager import SequenceGroupManager
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.session import Granted
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.verify.by_request import RequestVerifier
from tests.decode_node.driven_node import DrivenNode
from tests.decode_node.tiny_node import tiny_nodes
from tests.support.fake_clock import FakeClock
from tests.support.fake_device import ScriptedDevice
from tests.support.fake_engine import ScriptedEngine, ScriptedModel
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.tiny_model import make_tiny_model

INCARNATION = bytes(16)
SHORT_PROMPT = (1, 2, 3)  # short enough that the decode node computes it
PATIENCE_SECONDS = 30.0


class ScriptedIngest:
    """An Ingest without sockets. A gate can hold writes back."""

    def __init__(self, cache, loop_of, clock):
        self.cache = cache
        self.inbox = TransferInbox(
            incarnation=INCARNATION,
            on_complete=lambda transfer_id, stats: loop_of().submit(TransferCompleted(transfer_id, stats)),
            on_failed=lambda transfer_id, reason: loop_of().submit(TransferFailed(transfer_id, reason)),
            clock=clock,
        )
        self.writing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.specs = {}

    def address(self, reached_host):
        return f"{reached_host}:1"

    def open(self, transfer_id, block_ids, *, windows, start_token, end_token):
        assert not windows
        spec = TransferSpec(
            transfer_id=transfer_id,
            incarnation=INCARNATION,
            start_token=start_token,
            end_token=end_token,
            planes=self.cache.planes,
        )
        self.specs[transfer_id] = spec
        self.inbox.open(spec, GatedSink(self, ReservedBlocks(self.cache, block_ids)))

    def close(self, transfer_id):
        return self.inbox.close(transfer_id, timeout_seconds=0.0)


class GatedSink:
    def __init__(self, ingest, sink):
        self.ingest, self.sink = ingest, sink
        self.read, self.are_held = sink.read, sink.are_held

    def write(self, *args):
        self.ingest.writing.set()
        assert self.ingest.gate.wait(PATIENCE_SECONDS)
        self.sink.write(*args)


class Node(DrivenNode):
    """A driven node whose model is a hash function of the tokens."""

    prompt = SHORT_PROMPT
    max_tokens = 5
    reached_host = "decode"
    transfer_timeout_seconds = 60.0

    def __init__(
        self,
        *,
        num_blocks=64,
        num_parts=1,
        num_speculative_tokens=0,
        cpu_turns=None,
        drafts=None,
        proposers=(),
        max_wait_seconds=0.0,
        is_asynchronous=False,
        adapters=None,
    ):
        super().__init__()
        self.clock = FakeClock()
        self.model = ScriptedModel(vocab_size=64)
        self.engine = ScriptedEngine.create(self.model, num_blocks=num_blocks, num_parts=num_parts)
        if adapters is not None:
            self.engine = replace(self.engine, find_adapter=adapters.find)
        if is_asynchronous:
            self.engine = replace(self.engine, runner=ScriptedDevice(self.engine.runner))
        self.ingest = ScriptedIngest(self.engine.kv_cache, lambda: self.loop, self.clock)
        drafts = DraftGatherer(
            client=drafts,
            proposers=proposers,
            controller=DraftController(num_speculative_tokens=num_speculative_tokens),
            max_wait_seconds=max_wait_seconds,
            clock=self.clock,
        )
        self.groups = SequenceGroupManager(
            engine=self.engine,
            drafts=drafts,
            ingest=self.ingest,
            admission=Admission(self.engine.pool, max_running_sequences=16, max_model_len=200, vocab_size=64),
            max_local_prefill_tokens=4,
            transfer_timeout_seconds=self.transfer_timeout_seconds,
            clock=self.clock,
        )
        self.loop = DecodeLoop(
            engine=self.engine,
            drafts=drafts,
            groups=self.groups,
            profiler=StepProfiler(self.engine.clock),
            verifier=RequestVerifier(self.engine.sampler),
            emit=self._emit,
            cpu_turns=cpu_turns,
        )

    def granted(self, group_id):
        self.iterate()
        return self.find(Granted, group_id)[-1]

    def iterate(self):
        if not self.engine.scheduler.has_work and self.loop._inbox.is_empty:
            self.loop.submit(SessionEnded(0))  # so that an idle turn does not wait for a command
        self.loop.iterate()

    def push(self, group_id, prompt, *, transfer_id=None, until=None):
        """Pushes KV as a prefill node does. With `until`, it sends only the tokens before that and no commit."""
        spec = self.ingest.specs[transfer_id or group_id[::-1]]
        sender = InMemoryConnector({"decode:1": self.ingest.inbox}).connect("decode:1", spec)
        source = ScriptedEngine.create(num_blocks=64).kv_cache
        for slot, token_id in enumerate(prompt):
            source.write_whole_token(slot, token_id=token_id, position=slot)
        for plane in spec.planes:
            layers = range(plane.num_layers)
            tokens = range(spec.start_token, until or spec.end_token)
            payload = source.read(plane.name, layers, tokens)
            region = Region(plane.name, layers, tokens, range(plane.num_heads))
            sender.put(region, payload.data)
        if until is None:
            sender.commit()
        return sender

    @contextlib.contextmanager
    def writing(self, put, *frame, **options):
        """Stops a thread that `put`s a frame in the middle of its write, until the block ends."""
        self.ingest.gate.clear()
        self.ingest.writing.clear()
        thread = threading.Thread(target=put, args=frame, kwargs=options)
        thread.start()
        try:
            assert self.ingest.writing.wait(PATIENCE_SECONDS)
            yield
        finally:
            self.ingest.gate.set()
            thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.fixture(params=[False, True], ids=["in_the_step", "beside_the_host"])
def make_scripted_node(request):
    """A factory of `Node`s that tests drive step by step. Their model computes in a step or, like a GPU, beside it."""
    return partial(Node, is_asynchronous=request.param)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.fixture
def make_node(model_path):
    """A factory of decode loops on a tiny model."""
    with tiny_nodes() as make:
        yield partial(make, model_path)
