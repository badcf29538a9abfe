"""Captured rollouts give the same drafts as one call per token, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_forward import open_rollouts
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.model_forward import ModelForward

pytestmark = pytest.mark.gpu

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19]


def trees_of(proposer, params, *, num_sequences=3):
    """Returns the draft trees of several sequences after several commits, as sorted texts."""
    start = SequenceStart(options=RequestOptions(sampling=params), sample=0, prompt_length=12, takes_trees=True)
    texts, trees = [[key, *PROMPT] for key in range(num_sequences)], []
    for num_wanted in (5, 2, 8, 7):
        asked = [ProposalRequest(key, text, num_wanted - key % 2, start) for key, text in enumerate(texts)]
        while asked:
            proposals = proposer.propose(asked)
            trees += [each.tree for each in proposals if each.progress is Progress.DONE]
            asked = [
                request for request, each in zip(asked, proposals, strict=True) if each.progress is not Progress.DONE
            ]
        for text in texts:
            text += [3, 5]
    return sorted(map(repr, trees))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
def test_drafts_are_the_same(tiny_model, params):
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="float32"))
    found = []
    for is_rolling in (False, True):
        forward = ModelForward.of(model, kv_cache=KVCacheConfig(num_blocks=256), graphs=GraphShapes(16))
        if is_rolling:
            forward = replace(forward, rollouts=open_rollouts(forward, model.device))
            assert forward.max_tokens > 1
        proposer = DraftModelProposer(forward, ProposerInfo(name="draft_model:tiny"))
        found.append(trees_of(proposer, SamplingParams(seed=5, max_tokens=400, **params)))
    assert found[0] == found[1]
