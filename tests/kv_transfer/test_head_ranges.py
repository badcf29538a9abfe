"""Frames of some heads: sender and receiver may divide the heads among different numbers of devices."""

from __future__ import annotations

import os

import numpy as np
import pytest

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import CommitState, FrameHeader, Region, TransferSpec
from outrider.kv_transfer.frames import encode_frame
from outrider.kv_transfer.inbox import AttachState, Disposition
from tests.support.kv_messages import decode_sender_message, encode_commit

NUM_HEADS, NUM_TOKENS, NUM_LAYERS = 8, 6, 2
PLANES = (PlaneSpec("k", NUM_LAYERS, NUM_HEADS, 1, "float32"), PlaneSpec("v", NUM_LAYERS, NUM_HEADS, 1, "float32"))
KV = {
    plane.name: np.arange(NUM_LAYERS * NUM_TOKENS * NUM_HEADS, dtype=np.float32).reshape(NUM_LAYERS, NUM_TOKENS, -1)
    + at
    for at, plane in enumerate(PLANES)
}  # by plane: [layers, tokens, heads], head_dim 1


class ArraySink:
    """Writes each frame to its place in an array."""

    def __init__(self):
        self.kv = {name: np.full_like(values, np.nan) for name, values in KV.items()}

    def write(self, region, payload):
        heads = region.heads
        place = self.kv[region.plane][
            region.layers.start : region.layers.stop, region.tokens.start : region.tokens.stop, heads.start : heads.stop
        ]
        place[:] = np.frombuffer(payload, dtype=np.float32).reshape(place.shape)


class Transfer:
    """An open transfer and its sender."""

    def __init__(self, inbox, incarnation):
        self.inbox, self.sink, self.sent = inbox, ArraySink(), {}
        self.spec = TransferSpec(
            transfer_id=os.urandom(16), incarnation=incarnation, start_token=0, end_token=NUM_TOKENS, planes=PLANES
        )
        inbox.open(self.spec, self.sink)
        assert inbox.attach(self.spec.transfer_id, incarnation) is AttachState.ATTACHED

    def put(self, plane, heads=(0, NUM_HEADS), tokens=(0, NUM_TOKENS)):
        region = Region(plane, range(NUM_LAYERS), range(*tokens), range(*heads))
        payload = memoryview(KV[plane][:, slice(*tokens), slice(*heads)].tobytes())
        header = FrameHeader.of(self.spec, region, payload)
        frame = decode_sender_message(encode_frame(1, header, payload))  # as it comes over the wire
        disposition = self.inbox.accept(frame.header, frame.payload)
        if disposition is Disposition.WRITTEN:
            self.sent[region] = header.checksum
        return disposition

    def commit(self):
        _, commit = decode_sender_message(encode_commit(self.sent))
        return self.inbox.commit(self.spec.transfer_id, commit.digest, connector="test")


@pytest.fixture
def transfer(peers, inbox):
    return Transfer(inbox, peers.incarnation)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranges_that_cover_all_heads_complete_a_transfer(transfer, num_ranks):
    size = NUM_HEADS // num_ranks
    cut = [(at, at + size) for at in range(0, NUM_HEADS, size)]
    for plane in ("v", "k"):
        for heads in reversed(cut):
            for tokens in ((2, NUM_TOKENS), (0, 2)):
                assert transfer.commit().state is CommitState.INCOMPLETE
                assert transfer.put(plane, heads, tokens) is Disposition.WRITTEN
    assert transfer.commit().state is CommitState.COMMITTED
    for name, values in KV.items():
        assert np.array_equal(transfer.sink.kv[name], values)


def test_planes_may_be_cut_at_different_heads(transfer):
    assert transfer.put("k") is Disposition.WRITTEN
    for heads in ((0, 3), (3, 8)):
        assert transfer.put("v", heads) is Disposition.WRITTEN
    assert transfer.commit().state is CommitState.COMMITTED


def test_a_range_again_is_a_duplicate_and_another_cut_is_refused(transfer):
    assert transfer.put("k", (2, 6)) is Disposition.WRITTEN
    assert transfer.put("k", (2, 6)) is Disposition.DUPLICATE
    for heads in ((0, 8), (2, 4), (5, 8), (1, 3), (0, 7)):
        assert transfer.put("k", heads) is Disposition.CONFLICTING
        assert transfer.put("v", (0, 4), tokens=(0, 1)) in (Disposition.WRITTEN, Disposition.DUPLICATE)
    assert transfer.put("v", (2, 6), tokens=(3, 4)) is Disposition.CONFLICTING  # other tokens, but other cuts of heads
