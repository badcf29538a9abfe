from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider.engine.kv_cache.base import slots_of
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.inbox import TransferInbox
from outrider.prefill import PrefillCall
from outrider.request import RequestOptions, SamplingParams
from prefill_node.jobs import PrefillJob, Stop
from prefill_node.prefill_loop import PrefillLoop
from tests.support.adapters import ScriptedAdapters
from tests.support.fake_device import SteppedDevice
from tests.support.fake_engine import ScriptedEngine
from tests.support.fake_kv_cache import FEATURES, ScriptedKVCache
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.pool_integrity import check_pool
from tests.support.waiting import PATIENCE_SECONDS

BLOCK_SIZE = 4
ADDRESS = "decode:1"
OTHER_ADDRESS = "decode:2"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch):
    """Makes a stopping loop wait for pushes for as long as a busy machine needs."""
    monkeypatch.setattr("prefill_node.prefill_loop.STOP_SECONDS", PATIENCE_SECONDS / 2)


@dataclass
class DecodeSide:
    """A decode node's ingest with one scripted cache, which hands out blocks in order."""

    address: str
    incarnation: bytes = field(default_factory=lambda: os.urandom(16))
    cache: ScriptedKVCache = field(default_factory=lambda: ScriptedKVCache(num_blocks=1024, block_size=BLOCK_SIZE))
    completed: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)

    def __post_init__(self):
        self.inbox = TransferInbox(
            incarnation=self.incarnation,
            on_complete=self.completed.__setitem__,
            on_failed=self.failed.__setitem__,
        )
        self._next_block = itertools.count()
        self.gate = threading.Event()  # writes wait for it
        self.gate.set()
        self.is_writing = threading.Event()
        self.read_gate = threading.Event()  # reads wait for it
        self.read_gate.set()
        self.is_reading = threading.Event()
        self.regions = []

    def expect(self, token_ids, *, held=0):
        """Opens a transfer. Returns its id and block table, which has the first `held` tokens' KV."""
        blocks = [next(self._next_block) for _ in range(-(-len(token_ids) // BLOCK_SIZE))]
        spec = TransferSpec(
            transfer_id=os.urandom(16),
            incarnation=self.incarnation,
            start_token=held,
            end_token=len(token_ids),
            planes=self.cache.planes,
        )
        for slot, token_id in zip(slots_of(blocks, held, BLOCK_SIZE).tolist(), token_ids, strict=False):
            self.cache.write_whole_token(slot, token_id=token_id, position=list(token_ids).index(token_id))
        self.inbox.open(spec, BlockSink(self, blocks))
        return spec.transfer_id, blocks


@dataclass
class BlockSink:
    side: DecodeSide
    blocks: list

    def write(self, region, payload):
        self.side.is_writing.set()
        assert self.side.gate.wait(60)
        self.side.regions.append((region.plane, region.layers, region.tokens.start, region.tokens.stop))
        self.side.cache.write(region.plane, region.layers, self._slots_of(region), payload)

    def read(self, region):
        self.side.is_reading.set()
        assert self.side.read_gate.wait(60)
        return self.side.cache.read(region.plane, region.layers, self._slots_of(region)).data

    def are_held(self):
        return True

    def _slots_of(self, region):
        return slots_of(self.blocks, region.tokens.stop, BLOCK_SIZE)[region.tokens.start :]


def job_of(job_id, token_ids, *, transfer_id, address, incarnation, held=0, may_read_held=False, **options):
    """Returns a job. `options`: options of the request."""
    call = PrefillCall(
        sequence_group_id=bytes(16),
        fingerprint="",
        request_id="r",
        transfer_id=transfer_id,
        token_ids=tuple(token_ids),
        kv_address=address,
        decode_incarnation=incarnation,
        held_prefix_length=held,
        may_read_held=may_read_held,
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=1), **options),
    )
    return PrefillJob(job_id, call)


class Rig:
    """A prefill loop on a scripted engine, in its thread, and the decode nodes that it pushes to."""

    def __init__(
        self,
        *,
        num_blocks=64,
        max_running=8,
        max_rows_per_step=8,
        frame_bytes=4096,
        max_frame_bytes=1 << 20,
        connector=None,
        features=FEATURES,
        on_device=False,
        **turns,
    ):
        """`frame_bytes`: for groups of layers. `max_frame_bytes`: of the senders.

        `on_device`: forward passes are computed when the test calls `device.compute`.
        """
        engine = ScriptedEngine.create(num_blocks=num_blocks, block_size=BLOCK_SIZE, features=features)
        scheduler = Scheduler(
            engine.pool, max_running=max_running, max_rows_per_step=max_rows_per_step, reserve_blocks_per_running=0
        )
        self.runner = engine.runner
        if on_device:
            self.runner = self.device = SteppedDevice(engine.runner)
            engine = replace(engine, kv_cache=self.device.cache)
        self.is_asynchronous = on_device
        self.adapters = ScriptedAdapters()
        self.engine = replace(engine, scheduler=scheduler, runner=self, find_adapter=self.adapters.find)
        self.decode = DecodeSide(ADDRESS)
        self.other_decode = DecodeSide(OTHER_ADDRESS)
        self.ended = {}
        self.changed = threading.Condition()
        self.before_layer = lambda layer: None
        self.chunks = []  # for each forward, (start, number of rows) of each sequence
        self.computed = []  # the first token of every chunk
        self.stats = []
        self.loop = PrefillLoop(
            engine=self.engine,
            connector=connector
            or InMemoryConnector(
                {side.address: side.inbox for side in (self.decode, self.other_decode)}, max_frame_bytes=max_frame_bytes
            ),
            frame_bytes=frame_bytes,
            profiler=StepProfiler(self.engine.clock),
            emit=self.emit,
            **turns,
        )
        self._ids = itertools.count(1)
        self.thread = threading.Thread(target=self.loop.run)

    def forward(self, rows, *, on_layer_done):
        """Runs a forward pass in place of the engine's runner."""
        self.computed += [row.token_ids[0] for row in rows]
        self.chunks.append([(row.start_position, len(row.token_ids)) for row in rows])

        def layer_done(layer):
            self.before_layer(layer)
            on_layer_done(layer)

        return self.runner.forward(rows, on_layer_done=layer_done)

    def emit(self, ended, stats):
        with self.changed:
            self.ended.update({end.job_id: end.result for end in ended})
            self.stats += [stats] if stats else []
            self.changed.notify_all()

    def submit(self, token_ids, *, held=0, transfer_id=None, to=None, **options):
        """Returns (job, block table). `to`: a decode side, by default the first. `options`: see `job_of`."""
        side, blocks = to or self.decode, None
        if transfer_id is None:
            transfer_id, blocks = side.expect(token_ids, held=held)
        where = {"transfer_id": transfer_id, "address": side.address, "incarnation": side.incarnation}
        job = job_of(next(self._ids), token_ids, held=held, **where, **options)
        self.loop.submit(job)
        return job, blocks

    def result(self, job):
        with self.changed:
            assert self.changed.wait_for(lambda: job.job_id in self.ended, PATIENCE_SECONDS), "the job did not end"
            return self.ended[job.job_id]

    def prefill(self, token_ids, **options):
        job, blocks = self.submit(token_ids, **options)
        return self.result(job), blocks

    def start(self):
        self.thread.start()
        return self

    def stop(self):
        self.decode.gate.set()
        self.decode.read_gate.set()
        self.loop.submit(Stop())
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()

    def wait_until_idle(self):
        """Stops the loop, so that it has seen everything, and checks that no job and no block is left."""
        self.stop()
        assert not self.loop._tasks
        check_pool(self.engine.pool, [])


@pytest.fixture
def make_rig():
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.thread.is_alive():
            rig.wait_until_idle()


@pytest.fixture
def rig(make_rig):
    return make_rig().start()
