"""A decode and a prefill loop on a tiny model, over real connectors: transfers that fail, samples that were moved."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import AbortedError
from outrider.kv_transfer.config import KvTransferConfig
from outrider.model_hub.config import ModelConfig
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.request import RequestOptions, SamplingParams
from outrider.rpc.peer_security import PLAINTEXT
from outrider.session import Granted, KvFailed, KvReady, SampleStart
from prefill_node.__main__ import make_build
from prefill_node.config import PrefillNodeConfig
from prefill_node.jobs import PrefillJob, Stop
from tests.decode_node.tiny_node import TinyNode

PROMPT = tuple(3 + (7 * n) % 290 for n in range(150))
PATIENCE_SECONDS = 30.0


class Prefill:
    """A prefill loop in its thread."""

    def __init__(self, model_path, connector):
        self.ended = queue.SimpleQueue()
        config = PrefillNodeConfig(
            kv_cache=KVCacheConfig(num_blocks=256),
            kv_transfer=KvTransferConfig(connector=connector, frame_bytes=8192, arena_bytes=1 << 20),
            max_rows_per_step=32,
        )
        build = make_build(config, ModelConfig(id=str(model_path), num_threads=1), PLAINTEXT)
        self.parts = build(lambda ends, stats: [self.ended.put(end.result) for end in ends])
        self.ids = itertools.count(1)
        self.thread = threading.Thread(target=self.parts.loop.run)
        self.thread.start()

    def push(self, granted, token_ids):
        self.parts.loop.submit(
            PrefillJob(
                next(self.ids),
                PrefillCall(
                    sequence_group_id=bytes(16),
                    fingerprint="",
                    request_id="r",
                    transfer_id=granted.transfer_id,
                    token_ids=tuple(token_ids),
                    kv_address=granted.kv_address,
                    decode_incarnation=bytes(16),
                    held_prefix_length=granted.held_prefix_length,
                    options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=1)),
                ),
            )
        )
        return self.ended.get(timeout=PATIENCE_SECONDS)

    def stop(self):
        self.parts.loop.submit(Stop())
        self.thread.join(PATIENCE_SECONDS)
        self.parts.connector.close()


@pytest.fixture(params=["grpc", "shared_memory"])
def sides(model_path, request):
    decode, prefill = TinyNode(model_path), Prefill(model_path, request.param)
    yield decode, prefill
    prefill.stop()
    decode.parts.ingest.stop()


def granted(node, group_id):
    node.iterate()
    return node.find(Granted, group_id)[-1]


def computed_alone(model_path, sampling):
    """The tokens of each sample, by a node that computes the prompt itself."""
    node = TinyNode(model_path, max_local_prefill_tokens=200)
    try:
        group_id = node.open(prompt=PROMPT, sampling=sampling)
        node.run()
        return [node.tokens(group_id, sample) for sample in range(sampling["n"])]
    finally:
        node.parts.ingest.stop()


def test_a_transfer_that_was_altered_is_replaced_by_another_one(sides, model_path):
    decode, prefill = sides
    inbox = decode.parts.ingest.receiver._inbox
    accept, num_frames = inbox.accept, itertools.count()

    def alter_the_fifth(header, payload):
        return accept(header, memoryview(bytes(len(payload))) if next(num_frames) == 4 else payload)

    inbox.accept = alter_the_fifth
    group_id = decode.open(prompt=PROMPT, sampling={"n": 2, "temperature": 1.0})
    first = granted(decode, group_id)
    failed = prefill.push(first, PROMPT[:-1])
    assert isinstance(failed, AbortedError)
    assert failed.message.endswith("refused a frame: CORRUPT")
    for _ in range(50):
        decode.iterate()
        if decode.find(KvFailed, group_id):
            break
    assert [event.transfer_id for event in decode.find(KvFailed, group_id)] == [first.transfer_id]
    decode.retarget(group_id, b"t" * 16)
    again = granted(decode, group_id)
    result = prefill.push(again, PROMPT[:-1])
    assert isinstance(result, PrefillFigures)
    assert result.num_cached_tokens > 0  # what it had computed is not computed again
    decode.run()
    assert [event.transfer_id for event in decode.find(KvReady, group_id)] == [b"t" * 16]
    whole = computed_alone(model_path, {"n": 2, "temperature": 1.0})
    assert [decode.tokens(group_id, sample) for sample in range(2)] == whole
    decode.assert_nothing_is_held()


def test_samples_that_were_moved_get_what_they_have_in_common_and_compute_the_rest(sides, model_path):
    decode, prefill = sides
    sampling = {"n": 3, "temperature": 1.0, "frequency_penalty": 0.5}
    whole = computed_alone(model_path, sampling)
    cuts = (35, 20, 0)
    samples = tuple(SampleStart(sample, tuple(whole[sample][:cut])) for sample, cut in enumerate(cuts))
    group_id = decode.open(prompt=PROMPT, sampling=sampling, samples=samples)
    grant = granted(decode, group_id)
    known = [*PROMPT, *whole[0][:35]]
    assert isinstance(prefill.push(grant, known[: len(known) - grant.num_tokens_to_compute]), PrefillFigures)
    decode.run()
    for sample, cut in enumerate(cuts):
        assert decode.tokens(group_id, sample) == whole[sample][cut:]
    decode.assert_nothing_is_held()
