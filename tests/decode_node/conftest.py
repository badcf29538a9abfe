"""A decode loop on a scripted engine, without torch's arithmetic, sockets or a clock."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import partial

import pytest

from decode_node.admission import Admission
from decode_node.commands import (
    GroupCancelled,
    GroupOpened,
    GroupRetargeted,
    SessionEnded,
    TransferCompleted,
    TransferFailed,
)
from decode_node.decode_loop import DecodeLoop
from decode_node.draft_gathering import DraftGatherer
from decode_node.drafts import NoDrafts
from decode_node.group_desk import GroupDesk
from decode_node.ingest import ReservedBlocks
from outrider.engine.fake_device import ScriptedDevice
from outrider.engine.fakes import FakeClock, ScriptedEngine, ScriptedModel
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.kv_transfer.in_memory import InMemoryConnector
from outrider.kv_transfer.inbox import TransferInbox
from outrider.request import SamplingParams
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    OpenSequenceGroup,
    RetargetSequenceGroup,
    SampleStart,
    SampleTokens,
)
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.verify.by_request import RequestVerifier

SESSION = 1
INCARNATION = bytes(16)
SHORT_PROMPT = (1, 2, 3)  # computed here
PATIENCE_SECONDS = 30.0


class ScriptedIngest:
    """An Ingest without sockets; writes can be held back by a gate."""

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

    def has_seen(self, transfer_id):
        return self.inbox.state(transfer_id) is not None or self.inbox.was_committed(transfer_id)

    def open(self, transfer_id, block_ids, *, start_token, end_token):
        spec = TransferSpec(
            transfer_id=transfer_id,
            incarnation=INCARNATION,
            start_token=start_token,
            end_token=end_token,
            planes=self.cache.planes,
        )
        self.specs[transfer_id] = spec
        self.inbox.open(spec, GatedSink(self, ReservedBlocks(self.cache, block_ids)))

    def last_frame_at(self, transfer_id):
        return self.inbox.last_frame_at(transfer_id)

    def close(self, transfer_id):
        return self.inbox.close(transfer_id, timeout_seconds=0.0)


class GatedSink:
    def __init__(self, ingest, sink):
        self.ingest, self.sink = ingest, sink

    def write(self, *args):
        self.ingest.writing.set()
        assert self.ingest.gate.wait(PATIENCE_SECONDS)
        self.sink.write(*args)


class Node:
    """A decode loop driven by hand, over a model that is a hash."""

    transfer_timeout_seconds = 60.0

    def __init__(self, *, num_blocks=64, num_speculative_tokens=0, cpu_turns=None, drafts=None, is_asynchronous=False):
        self.clock = FakeClock()
        self.model = ScriptedModel(vocab_size=64)
        self.engine = ScriptedEngine.create(self.model, num_blocks=num_blocks)
        if is_asynchronous:
            self.engine = replace(self.engine, runner=ScriptedDevice(self.engine.runner))
        self.ingest = ScriptedIngest(self.engine.kv_cache, lambda: self.loop, self.clock)
        drafts = DraftGatherer(
            client=drafts or NoDrafts(),
            fallback=None,
            controller=DraftController(num_speculative_tokens=num_speculative_tokens),
            max_wait_seconds=0.0,
        )
        self.desk = GroupDesk(
            engine=self.engine,
            drafts=drafts,
            ingest=self.ingest,
            admission=Admission(self.engine.pool, max_running_sequences=16, max_model_len=200, vocab_size=64),
            max_local_prefill_tokens=4,
            transfer_timeout_seconds=self.transfer_timeout_seconds,
            clock=self.clock,
        )
        self.events = []
        self.num_preempted = 0
        self.loop = DecodeLoop(
            engine=self.engine,
            drafts=drafts,
            desk=self.desk,
            profiler=StepProfiler(self.engine.clock),
            verifier=RequestVerifier(self.engine.sampler),
            emit=self._emit,
            cpu_turns=cpu_turns,
        )
        self.ids = itertools.count(1)

    def _emit(self, events, stats):
        self.events += itertools.chain.from_iterable(events.values())
        self.num_preempted += stats.num_preempted if stats else 0

    def open(self, *, prompt=SHORT_PROMPT, session=SESSION, transfer_id=None, sampling=None, samples=None, **fields):
        group_id = next(self.ids).to_bytes(16, "big")
        group = OpenSequenceGroup(
            sequence_group_id=group_id,
            transfer_id=transfer_id or group_id[::-1],
            request_id="r",
            prompt_token_ids=prompt,
            samples=samples or tuple(map(SampleStart, range((sampling or {}).get("n", 1)))),
            sampling=SamplingParams(**{"seed": 7, "max_tokens": 5, "temperature": 0.0, **(sampling or {})}),
            **fields,
        )
        self.loop.submit(GroupOpened(session, group, "decode"))
        return group_id

    def cancel(self, group_id, *samples, session=SESSION):
        cancel = CancelSequenceGroup(sequence_group_id=group_id, samples=samples)
        self.loop.submit(GroupCancelled(session, cancel))

    def retarget(self, group_id, transfer_id):
        retarget = RetargetSequenceGroup(sequence_group_id=group_id, transfer_id=transfer_id)
        self.loop.submit(GroupRetargeted(SESSION, retarget))

    def granted(self, group_id):
        self.iterate()
        return self.find(Granted, group_id)[-1]

    def iterate(self):
        if not self.engine.scheduler.has_work and self.loop._inbox.is_empty:
            self.loop.submit(SessionEnded(0))  # so that an idle turn need not wait for one
        self.loop.iterate()

    def run(self):
        self.iterate()
        for _ in range(1000):
            if not self.engine.scheduler.has_work:
                return
            self.iterate()
        raise AssertionError("the loop does not end")

    def push(self, group_id, prompt, *, transfer_id=None):
        """What a prefill node does."""
        spec = self.ingest.specs[transfer_id or group_id[::-1]]
        sender = InMemoryConnector({"decode:1": self.ingest.inbox}).connect("decode:1", spec)
        source = ScriptedEngine.create(num_blocks=64).kv_cache
        for slot, token_id in enumerate(prompt):
            for layer in range(source.num_layers):
                source.write_token(layer, slot, token_id=token_id, position=slot)
        for plane in spec.planes:
            layers = range(plane.num_layers)
            payload = source.read(plane.name, layers, range(spec.start_token, spec.end_token))
            region = Region(
                plane=plane.name,
                start_layer=0,
                end_layer=plane.num_layers,
                start_token=spec.start_token,
                end_token=spec.end_token,
            )
            sender.put(region, payload.data)
        sender.commit()

    def find(self, kind, group_id):
        return [event for event in self.events if isinstance(event, kind) and event.sequence_group_id == group_id]

    def tokens(self, group_id, sample=0):
        tokens = [event for event in self.find(SampleTokens, group_id) if event.sample == sample]
        return [token_id for event in tokens for token_id in event.token_ids]

    def assert_nothing_is_held(self):
        pool = self.engine.pool
        pool.check_integrity(())
        assert pool.num_free_blocks == pool.num_blocks
        assert self.desk.num_groups == 0
        assert len(self.desk._reservations) == 0


@pytest.fixture(params=[False, True], ids=["in_the_step", "beside_the_host"])
def make_scripted_node(request):
    """A factory of `Node`s, driven by hand. Their model computes in the step, or as a device does."""
    return partial(Node, is_asynchronous=request.param)
