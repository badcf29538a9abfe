"""EAGLE-3 by native kernels gives the same values as torch, and the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.tensor_planes import tensor_of
from outrider.engine.sampler import Sampler
from outrider.heads.base import HeadRows
from outrider.heads.checkpoint import Target
from outrider.heads.forms.eagle3 import Eagle3
from outrider.heads.open import open_head
from outrider.heads.packed_head import PackedHead
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import start_kernels
from outrider.request import SamplingParams
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, make_head_proposer
from outrider.speculation.proposers.native_head import NativeHeadSteps
from tests.heads.golden_files import DenseAttention
from tests.support.random_eagle3 import make_random_eagle3

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_TOKENS, VOCAB_SIZE, HIDDEN = 16, 40, 320, 64
TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (2, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(1))
FEATURES = 3 * torch.randn((2, NUM_TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
KNOWN = torch.ones(VOCAB_SIZE, dtype=torch.bool)
GREEDY = Sampler(vocab_size=VOCAB_SIZE, known_token_ids=KNOWN).start(
    SamplingParams(seed=0, max_tokens=9, temperature=0.0), sample=0, prompt_token_ids=()
)
KINDS = {
    "plain": {},
    "residual behind its norm": {"norm_before_residual": True},
    "normed states": {"norm_output": True, "draft_vocab_size": VOCAB_SIZE},
    "qwen3": {"model_type": "qwen3", "norm_before_residual": True, "norm_output": True},
    "biases": {"has_biases": True, "num_kv_heads": 1},
}


@pytest.fixture(scope="module")
def kernels():
    chosen = choose_kernels()
    if chosen.library is None:
        pytest.skip("no native kernels were built")
    return start_kernels(chosen, ModelConfig(num_threads=2))


@pytest.fixture(params=KINDS)
def folders(request, tmp_path):
    return make_random_eagle3(tmp_path, **KINDS[request.param])


def opened(folders, dtype):
    head, target = folders
    return open_head(head, Target.open(target), CPU, dtype)


class Native:
    """A head's native step over its own cache. `run` takes tuples of (sequence, first row, end)."""

    def __init__(self, head, kernels):
        self.dtype = getattr(torch, head.spec.dtype)
        cache = PagedKVCache(head.spec.planes, num_blocks=8, block_size=BLOCK_SIZE, kernels=kernels)
        self.steps = NativeHeadSteps(head.pack(kernels), kernels, cache, KNOWN.numpy())

    def run(self, *parts, num_logits=None, features=FEATURES):
        """Returns (states, logits) of each part's rows, or of its last `num_logits` rows."""
        rows = [
            SequenceRows(
                TOKEN_IDS[index, start + 1 : end + 1].tolist(),
                start,
                (1, 6, 3) if index else (4, 0, 7),
                end - start if num_logits is None else num_logits,
            )
            for index, start, end in parts
        ]
        fed = torch.cat([features[index, start:end] for index, start, end in parts]).to(self.dtype)
        fed = fed.view(torch.uint16) if self.dtype == torch.bfloat16 else fed
        batch = build_input_batch(rows, BLOCK_SIZE)
        paths = [PathRows((0,), 0, (), GREEDY, num_decisions=1)] * batch.num_logits
        drafts, logits = self.steps.draft(batch, fed.numpy(), paths, wants_logits=True)
        own = [each.state for each in drafts]
        states = tensor_of(np.stack(own)) if own else torch.empty((0, HIDDEN))
        logits = tensor_of(logits)
        sizes = [each.num_logits for each in rows]
        return list(zip(states.split(sizes), logits.split(sizes), strict=True))


def by_torch(head, index, num_rows=NUM_TOKENS, features=FEATURES):
    """Returns (states, logits) of the first rows, from one dense forward."""
    depths = torch.zeros(num_rows, dtype=torch.int64)
    rows = HeadRows(TOKEN_IDS[index, 1 : num_rows + 1], features[index, :num_rows], depths, torch.arange(num_rows))
    states = head.forward(rows, DenseAttention())
    own = head.logits(states, depths)
    if head.target_ids is None:
        return states, own
    return states, torch.full((num_rows, VOCAB_SIZE), -torch.inf).index_copy_(1, head.target_ids, own)


def assert_close(found, expected, tolerance=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf())
        is_known = ~theirs.isinf()
        difference = (ours.float()[is_known] - theirs.float()[is_known]).abs().max()
        assert float(difference) < tolerance * float(theirs[is_known].abs().max())


def test_states_and_logits_are_those_of_torch_in_float32(folders, kernels):
    native, head = Native(opened(folders, torch.float32), kernels), opened(folders, torch.float32)
    assert_close(native.run((0, 0, NUM_TOKENS))[0], by_torch(head, 0))
    native.run((1, 0, 20), num_logits=0)
    (first, second) = native.run((1, 20, 31), (0, 3, 4))
    expected = by_torch(head, 1)
    assert_close(first, [each[20:31] for each in expected])
    assert_close(second, [each[3:4] for each in by_torch(head, 0)])


def test_own_states_are_fed_back_as_by_torch(folders, kernels):
    native, head = Native(opened(folders, torch.float32), kernels), opened(folders, torch.float32)
    features = {each: FEATURES.clone() for each in (native, head)}
    ((states, _),) = native.run((0, 0, 30))
    expected, _ = by_torch(head, 0, 30)
    for place in range(30, 34):
        features[native][0, place], features[head][0, place] = states[-1], expected[-1]
        ((states, logits),) = native.run((0, place, place + 1), features=features[native])
        expected, expected_logits = by_torch(head, 0, place + 1, features[head])
        assert_close((states, logits), (expected[-1:], expected_logits[-1:]))


def test_bfloat16_is_near_and_has_the_same_bits_in_any_batch(folders, kernels):
    native = Native(opened(folders, torch.bfloat16), kernels)
    rows = [native.run((0, at, at + 1))[0] for at in range(NUM_TOKENS)]
    alone = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    assert alone[0].dtype == torch.bfloat16
    assert_close(alone, by_torch(opened(folders, torch.float32), 0), tolerance=0.05)
    native.run((0, 0, 7), num_logits=0)
    in_company = native.run((1, 0, 11), (0, 7, NUM_TOKENS))[1]
    assert all(map(torch.equal, in_company, (each[7:] for each in alone)))


@pytest.mark.parametrize(
    ("head_dim", "has_kernels", "dtype"), [(16, True, "bfloat16"), (16, False, "float32"), (8, True, "float32")]
)
def test_a_head_keeps_its_targets_dtype_where_kernels_compute_it(
    tmp_path, kernels, monkeypatch, head_dim, has_kernels, dtype
):
    head, target = make_random_eagle3(tmp_path, head_dim=head_dim)
    opened_for = HeadTarget(
        directory=target,
        device="cpu",
        dtype="bfloat16",
        known_token_ids=KNOWN,
        constraints=None,
        vocabulary_fingerprint="",
        kernels=kernels if has_kernels else None,
    )
    loaded, load = [], Eagle3.load
    monkeypatch.setattr(Eagle3, "load", lambda head, files: loaded.append(head) or load(head, files))
    model = load_head(head, opened_for)
    assert loaded == [model], "once: it may have gigabytes"
    assert model.spec.dtype == dtype
    assert isinstance(make_head_proposer(model, opened_for)._forward.model, PackedHead) == (dtype == "bfloat16")
