"""A head's proposer as a draft node makes it, from the head's folder and the target's files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from outrider.heads.of_target import TargetHead
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import SamplingParams
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.path_tree import NUM_GRADES
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer
from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, make_head_proposer
from tests.speculation.asking import proposals_of, start_of
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.tiny_model import make_tiny_model

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19, 4, 8, 15, 16, 23, 42]


class RandomFeatures:
    """Random float32 features as a target would send them; they do not depend on the text."""

    def __init__(self, num_tokens: int, *, scale: float = 1.0) -> None:
        values = torch.randn((num_tokens, 64), generator=torch.Generator().manual_seed(2)) * scale
        self._values = values.numpy()

    def __len__(self) -> int:
        return len(self._values) - 1

    def read(self, start: int, end: int) -> np.ndarray:
        return self._values[start:end]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_model(folder / "model")
    head, _ = make_random_eagle3(folder, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return ModelConfig(id=str(target), head=str(head), num_threads=1)


def tree_of(proposer, text, num_wanted, *, key=1, scale=1.0, min_reach=0.0) -> DraftTree:
    start = start_of(SamplingParams(seed=1, max_tokens=99, temperature=0.0), prompt_length=len(PROMPT))
    features = RandomFeatures(len(text), scale=scale)
    request = ProposalRequest(key, text, num_wanted, start, features=features, min_reach=min_reach)
    return proposals_of(proposer, request)[0].tree


def drafts_of(proposer, text, num_wanted, **options) -> tuple[int, ...]:
    return tree_of(proposer, text, num_wanted, **options).token_ids


def test_a_draft_node_opens_a_head_beside_its_targets_files(config):
    proposer, model = make_proposer("head", ProposerSettings(model=config)), load_model(config)
    assert proposer.info.name == "eagle3:head"
    assert proposer.info.can_look_ahead
    assert proposer.info.vocabulary_fingerprint == model.info.vocabulary_fingerprint
    assert proposer.info.features == TargetHead(config).reduction(model).format(model.spec.dtype)
    assert proposer.info.memory_bytes > 0
    assert len(drafts_of(proposer, PROMPT, 6)) == 6


def proposer_of(folder, target):
    return make_head_proposer(load_head(folder, target), target)


def test_a_draft_ends_where_the_head_is_no_longer_sure(config):
    """With random weights, no token's probability reaches one half."""
    target = HeadTarget.locate(config)
    whole = tree_of(proposer_of(config.head, target), PROMPT, 6)
    short = tree_of(proposer_of(config.head, target), PROMPT, 6, min_reach=0.5)
    assert len(whole) == 6
    assert short.token_ids == whole.token_ids[:1]
    assert short.grade == whole.grade
    assert 0 < whole.grade < NUM_GRADES


def test_it_drafts_the_same_from_any_cache_and_by_native_kernels_as_by_torch(config):
    target = HeadTarget.locate(config)
    text = [*PROMPT, 9, 10, 11]
    drafts = []
    for kernels in {target.kernels, None}:
        warm, cold = (proposer_of(config.head, dataclasses.replace(target, kernels=kernels)) for _ in range(2))
        drafts_of(warm, PROMPT, 5)
        drafts += [drafts_of(warm, text, 5), drafts_of(cold, text, 5)]
    assert len(drafts[0]) == 5
    assert len(set(drafts)) == 1


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_features_that_are_no_numbers_spoil_no_other_sequence_whose_blocks_they_were_in(config, scale):
    target = HeadTarget.locate(config)
    for kernels in {target.kernels, None}:
        proposer, clean = (proposer_of(config.head, dataclasses.replace(target, kernels=kernels)) for _ in range(2))
        used = []
        for key in (1, 2):  # the blocks that were freed last are allocated first
            drafts_of(proposer, list(range(90)), 5, key=key, scale=scale)
            used += proposer._trees[key].main.kv.block_ids
        proposer.forget(1)
        assert drafts_of(proposer, PROMPT, 5, key=3) == drafts_of(clean, PROMPT, 5)
        assert set(proposer._trees[3].main.kv.block_ids) <= set(used)


def test_it_looks_ahead_by_whole_drafts_in_a_few_calls(config, monkeypatch):
    target = HeadTarget.locate(config)
    if target.kernels is None:
        pytest.skip("native kernels draft several tokens in a call")
    found, num_calls = [], []
    for max_tokens in (16, 1):
        proposer = proposer_of(config.head, target)
        monkeypatch.setattr(type(proposer._forward), "max_tokens", max_tokens)
        start = start_of(SamplingParams(seed=1, max_tokens=99, temperature=0.0), prompt_length=len(PROMPT))
        request = ProposalRequest(1, PROMPT, 4, start, max_alternatives=5, features=RandomFeatures(len(PROMPT)))
        proposals_of(proposer, request)
        ahead, calls, has_more = {}, 0, True
        while has_more:
            (proposal,) = proposer.propose([request._replace(looks_ahead=True)])
            ahead |= {branch.assumed_token_ids: branch.tree.token_ids for branch in proposal.ahead}
            calls, has_more = calls + 1, proposal.has_more
        found.append(ahead)
        num_calls.append(calls)
    whole, single = found
    assert sum(len(each) >= 4 for each in whole.values()) >= 6
    assert all(single[key][: len(ids)] == ids[: len(single[key])] for key, ids in whole.items() if key in single)
    assert num_calls[0] <= 5 < num_calls[1]
