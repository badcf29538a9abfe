"""Models with outliers in norms and residual streams, as trained ones have: bfloat16 errs as in transformers."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.runnable_model import RunnableModel
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.engine.cpu_kernels import families
from tests.support.cached_runner import CachedRunner
from tests.support.packed_decoder import pack_decoder
from tests.support.tiny_model import make_tiny_model

NUM_TOKENS = 200
TOKEN_IDS = torch.randint(3, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
ALLOWED = 1.5
"""Largest difference from float32, as a multiple of that of transformers' own bfloat16."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """checkpoints(architecture) → (folder, float32 logits, largest difference of transformers' bfloat16), made once.

    The models are in bfloat16. A few weights of each norm are large, and so is what some features of its layers add.
    """

    @functools.cache
    def make(architecture):
        path = tmp_path_factory.mktemp(architecture)
        settings = families.SHAPE | {"initializer_range": 0.1} | families.FAMILIES[architecture]
        settings = {name: value for name, value in settings.items() if value}
        make_tiny_model(path, architecture=architecture, overrides=settings)
        model = AutoModelForCausalLM.from_pretrained(path)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data[torch.randint(0, parameter.numel(), (3,), generator=generator)] += 4.0
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data[:4] *= 3.0
        model.bfloat16().save_pretrained(path)
        exact, theirs = (logits_of_transformers(path, dtype, TOKEN_IDS) for dtype in (torch.float32, torch.bfloat16))
        return path, exact, float((theirs - exact).abs().max())

    return make


def load(directory, dtype, attention):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(requires_grad=False)


def logits_of_transformers(directory, dtype, token_ids):
    with torch.inference_mode():
        return load(directory, dtype, "eager")(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["whole", "by layers"])
@pytest.mark.parametrize("architecture", families.FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoints, architecture, kind, kernels):
    directory, exact, difference = checkpoints(architecture)
    register_attention()
    model = load(directory, torch.bfloat16, ATTENTION_NAME)
    spec, _ = describe_decoder(model, dtype="bfloat16", window=resolve_window(model.config))
    if kind == "whole":
        native = NativeDecoder(kernels, pack_decoder(kernels, model, spec))
        model = None
    else:
        native = NativeLayers(kernels)
        native.replace_in(model)
    node = CachedRunner(RunnableModel(model=model, native=native, device="cpu", spec=spec))
    logits = node.prefill(TOKEN_IDS, node.table(NUM_TOKENS))
    assert float((logits - exact).abs().max()) <= ALLOWED * difference
