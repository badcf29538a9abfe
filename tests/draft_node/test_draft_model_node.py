"""A draft node with its own model, over the wire."""

from __future__ import annotations

import asyncio

import pytest
import torch
from prometheus_client import CollectorRegistry

from decode_node.drafting.client import DraftClient
from draft_node.config import DraftNodeConfig
from draft_node.held_sequences import max_held_bytes
from draft_node.node import DraftNode
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer
from tests.decode_node.drafting.streams import serving, started, take
from tests.speculation.draft_trees import likeliest_path
from tests.support.draft_messages import hello_of, start_of
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import PATIENCE_SECONDS

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19] * 10


@pytest.fixture
async def node(tmp_path):
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path / "model")
    settings = ProposerSettings(model=ModelConfig(id=str(path)), kv_cache=KVCacheConfig(num_blocks=300))
    service = DraftNode(DraftNodeConfig(), lambda: make_proposer("draft_model", settings), registry=CollectorRegistry())
    async with serving(service):
        yield service


@pytest.fixture
async def client(node):
    model = node.info().model
    hello = hello_of(vocab_size=320, vocabulary_fingerprint=model.vocabulary_fingerprint)
    async with started(DraftClient([node.info().name.split("@")[1]], hello)) as client:
        yield client


async def draft_for(client, sequence_id: int, *, seed=7, min_tokens=4, takes_trees=False) -> DraftTree:
    client.open(sequence_id, start_of(len(PROMPT), seed=seed, takes_trees=takes_trees), PROMPT, num_wanted=4)
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
    kv_bytes = 300 * 16 * sum(plane.bytes_per_token for plane in node._proposer._forward.kv_cache.planes)
    assert described["memory_bytes"] == max_held_bytes(has_head=False) + kv_bytes
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
