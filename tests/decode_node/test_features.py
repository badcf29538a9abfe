"""Features in a decode node's cache, for tokens from prefix hits, forks and accepted drafts."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache.base import slots_of
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.heads.of_target import TargetHead
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.speculation.draft_tree import DraftTree
from tests.decode_node.tiny_node import PROMPT, TinyNode, generate
from tests.support.cached_runner import CachedRunner
from tests.support.fake_drafts import TextDrafts
from tests.support.tiny_head import make_tiny_head
from tests.support.tiny_model import make_tiny_model

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path, head = make_tiny_model(folder / "model", dtype="bfloat16"), make_tiny_head(folder / "head")
    return ModelConfig(id=str(path), head=str(head), num_threads=1)


def features_of_one_pass(config, token_ids):
    model = load_model(config)
    reduction = TargetHead(config).reduction(model)
    model = model.with_features(reduction)
    if not model.info.numerics.startswith("exact ("):
        pytest.skip("rows have other bits in other batches")
    blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    node = CachedRunner(model, num_blocks=len(blocks), block_size=BLOCK_SIZE, features=reduction)
    node.prefill(token_ids, blocks, num_logits=0)
    return bytes(node.cache.read(reduction.plane_name, range(1), slots_of(blocks, len(token_ids), BLOCK_SIZE)))


def test_features_of_drafted_and_shared_rows_are_those_of_one_pass(config):
    """Prompts are in the prefix cache, samples diverge, and the right branch of a draft is not its first one."""
    plain = TinyNode(config.id)
    greedy = [*PROMPT, *generate(plain)]
    plain.close()

    def bush(token_ids, num_wanted):
        right = greedy[len(token_ids) :][:2] if token_ids == greedy[: len(token_ids)] else []
        if len(right) < 2 or num_wanted < 4:
            return None
        wrong = [(right[0] + 1) % 299, (right[1] + 1) % 299]
        return DraftTree(len(token_ids), token_ids=(wrong[0], right[0], wrong[1], right[1]), parents=(-1, -1, 1, 1))

    node = TinyNode(
        config.id,
        drafts=TextDrafts(bush),
        head=config.head,
        local_head=False,
        draft_rows="all",
        num_speculative_tokens=4,
    )
    (features,) = (plane for plane in node.engine.kv_cache.planes if plane.is_feature)
    texts = {
        node.open(sampling=sampling): PROMPT
        for sampling in ({"n": 1}, {"n": 2, "temperature": 0.4}, {"n": 2, "max_tokens": 25})
    }
    node.run()
    texts[node.open(prompt=tuple(greedy[:29]))] = greedy[:29]
    node.run()
    assert node.num_accepted > 0
    for group, prompt in texts.items():
        text = [*prompt, *node.tokens(group)]
        kv = SequenceKV.create(node.engine.pool, text, max_cached_tokens=len(text))
        assert kv.num_tokens >= 32
        slots = slots_of(kv.block_ids, kv.num_tokens, node.engine.kv_cache.block_size)
        found = bytes(node.engine.kv_cache.read(features.name, range(1), slots))
        assert found == features_of_one_pass(config, text[: kv.num_tokens])
        kv.free()
    node.close()
