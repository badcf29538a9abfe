"""A draft node with a model of its own, over the wire."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
import torch
from prometheus_client import CollectorRegistry

from decode_node.drafting.client import DraftClient
from draft_node.config import DraftNodeConfig
from draft_node.held_sequences import MAX_HELD_BYTES
from draft_node.node import DraftNode
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import DraftHello, SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.factory import ProposerSettings
from tests.decode_node.drafting.streams import PATIENCE_SECONDS, started, take
from tests.speculation.draft_trees import likeliest_path
from tests.support.tiny_model import make_tiny_model

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19] * 10


@pytest.fixture
async def node(tmp_path):
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path / "model")
    service = DraftNode(
        DraftNodeConfig(proposer="draft_model", model=str(path)),
        settings=ProposerSettings(model=ModelConfig(id=str(path)), kv_cache=KVCacheConfig(num_blocks=300)),
        registry=CollectorRegistry(),
    )
    server = grpc.aio.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start(f"127.0.0.1:{port}")
    yield service
    await server.stop(0)
    await service.stop()


@pytest.fixture
async def client(node):
    model = node.info().model
    hello = DraftHello(
        incarnation=bytes(16),
        name="decode@test",
        vocab_size=320,
        vocabulary_fingerprint=model.vocabulary_fingerprint,
        max_model_len=2048,
    )
    async with started(DraftClient([node.info().name.split("@")[1]], hello)) as client:
        yield client


async def draft_for(client, sequence_id: int, *, seed=7, min_tokens=4, takes_trees=False) -> DraftTree:
    sampling = SamplingParams(seed=seed, max_tokens=100)
    start = SequenceStart(
        options=RequestOptions(sampling=sampling), sample=0, prompt_length=len(PROMPT), takes_trees=takes_trees
    )
    client.open(sequence_id, start, PROMPT, num_wanted=4)
    tree = DraftTree(0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(tree) < min_tokens:
            taken = await take(client, sequence_id, wait_seconds=0.05)
            tree = taken.trees.get(sequence_id, tree)
    return tree


async def test_it_says_which_model_drafts_and_follows_the_requests_seed(node, client):
    assert node.info().model.proposer == "draft_model:model"
    described = node.describe()
    assert {"dtype", "numerics", "kernels", "threads"} <= set(described)
    kv_bytes = 300 * 16 * node._proposer._forward.runner._spec.bytes_per_token
    assert described["memory_bytes"] == MAX_HELD_BYTES + kv_bytes
    first, again, other = [
        (await draft_for(client, sequence_id, seed=seed)).token_ids[:4] for sequence_id, seed in enumerate((7, 7, 8))
    ]
    assert len(first) == 4
    assert again == first
    assert other != first


async def test_a_decode_node_that_takes_trees_gets_siblings(client):
    tree = await draft_for(client, 1, min_tokens=12, takes_trees=True)
    assert tree.is_well_formed
    assert 4 <= len(likeliest_path(tree)) < len(tree)
