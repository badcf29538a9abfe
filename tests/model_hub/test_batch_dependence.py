"""The check at load that numerics are exact: it compares rows in different batches, contexts and draft trees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.engine import module_steps
from outrider.engine.attention.native import NativeAttention
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.linear import replace_norms
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.support import SPLIT_CONTEXT, depends_on_batch
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory):
    if choose_kernels().library is None:
        pytest.skip("no native kernels were built")
    path = make_tiny_model(
        tmp_path_factory.mktemp("model"), architecture="glm4", overrides={"max_position_embeddings": 2048}
    )
    return load_model(ModelConfig(id=str(path)))


def attention_that_errs_in(monkeypatch, is_wrong):
    """Changes attention by a thousandth in batches for which `is_wrong` returns True."""

    class Erring(NativeAttention):
        def attend(self, plan, query, *arguments):
            _, batch = plan
            output = super().attend(plan, query, *arguments)
            return output * 1.001 if is_wrong(batch) else output

    monkeypatch.setattr(module_steps, "NativeAttention", Erring)


def test_kernels_with_one_order_of_sums_are_exact(exact_model):
    assert not depends_on_batch(exact_model, num_tokens=SPLIT_CONTEXT)


def test_a_kernel_that_splits_long_contexts_of_few_rows_in_another_order_is_noticed(exact_model, monkeypatch):
    attention_that_errs_in(monkeypatch, lambda batch: batch.num_rows == 1 and max(batch.arrays.seq_lens) > 512)
    assert depends_on_batch(exact_model, num_tokens=SPLIT_CONTEXT)
    assert not depends_on_batch(exact_model)  # a short context is never split


def test_a_kernel_that_reads_the_paths_of_trees_in_another_order_is_noticed(exact_model, monkeypatch):
    attention_that_errs_in(monkeypatch, lambda batch: batch.has_trees)
    assert depends_on_batch(exact_model)


class Norm(nn.Module):
    def __init__(self, weight, epsilon, _rounds_once):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, rows):
        values = rows.double()
        return (self.weight * values * (values.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_every_dtype_are_replaced(dtype):
    """Torch's norms add in an order that may depend on the batch."""
    model = nn.Sequential(LlamaRMSNorm(96), nn.LayerNorm(96)).to(dtype)
    with torch.no_grad():
        model[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    replace_norms(model, Norm)
    assert [type(module) for module in model] == [Norm, nn.LayerNorm]
