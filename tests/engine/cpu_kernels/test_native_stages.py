"""Native decoders whose layers several runners compute: they pass rows' states on, and have the bits of one runner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.stages import Stage, cut_batch
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.support.packed_decoder import pack_decoder
from tests.support.tiny_model import make_tiny_model

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 16, 4
REDUCTION = FeatureReduction(taps=(0, 2, 4), hidden_size=64, takes_final_norm=True)


class Stages:
    """Runners of the stages of one decoder, each with its own cache. `num_stages` 1: a plain runner."""

    def __init__(self, decoder, spec, num_stages):
        self.steps, self.caches = [], []
        for rank in [*range(1, num_stages), 0]:
            stage = replace(Stage.of_rank(rank, num_stages, NUM_LAYERS), taps=REDUCTION.taps)
            is_whole = num_stages == 1
            features = REDUCTION if stage.is_last else None
            part = replace(spec.of_layers(stage.layers), features=REDUCTION.plane(spec.dtype) if features else None)
            own = decoder if is_whole else decoder.of_layers(stage.layers)
            cache = PagedKVCache(
                part.planes,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                kernels=decoder.kernels,
                layer_groups=part.layer_groups,
            )
            self.caches.append(cache)
            self.steps.append(NativeStep(own, cache, features, None if is_whole else stage))

    def forward(self, batch, num_parts):
        logits = []
        for part in cut_batch(batch, num_parts):
            passed = None
            for step in self.steps:
                passed = step.forward(part, states=passed, on_layer_done=None if num_parts == 1 else lambda _: None)
            logits.append(passed)
        return np.concatenate(logits)

    def everything(self):
        """Returns the keys and the values of all layers, in order, and the features."""
        planes = [
            np.stack([layer for cache in self.caches for layer in getattr(cache, name)]) for name in ("keys", "values")
        ]
        return [*planes, self.caches[-1].layers(REDUCTION.plane_name)[0]]


@pytest.mark.parametrize(("kind", "num_stages"), [("float32", 2), ("bfloat16", 3), ("int8", 4)])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_stages_have_the_bits_of_one_runner(kernels, tmp_path, architecture, kind, num_stages):
    """Layers of Gemma 2 normalise their output, which is added to the residual stream before the next layer."""
    path = make_tiny_model(
        tmp_path / "model", seed=2, architecture=architecture, overrides={"num_hidden_layers": NUM_LAYERS}
    )
    register_attention()
    dtype = "float32" if kind == "float32" else "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
    ).requires_grad_(requires_grad=False)
    spec, _ = describe_decoder(model, dtype=dtype, window=resolve_window(model.config))
    weights = pack_decoder(kernels, model, spec, quantise="int8" * (kind == "int8"))
    decoder = NativeDecoder(kernels, weights)
    one, several = (Stages(decoder, spec, number) for number in (1, num_stages))
    steps = [
        [SequenceRows([5 + n for n in range(50)], 0, [3, 1, 4, 2], 1), SequenceRows([9, 8, 7], 0, [0], 3)],
        [SequenceRows([11, 12, 13, 14], 50, [3, 1, 4, 2], 4, (-1, 0, -1)), SequenceRows([6], 3, [0], 1)],
        [SequenceRows([21, 22], 4, [0], 0)],
    ]
    for rows in steps:
        batch = build_input_batch(rows, BLOCK_SIZE)
        expected = one.forward(batch, 1)
        for num_parts in (1, 3):  # the second time, the same keys are written again
            assert np.array_equal(several.forward(batch, num_parts), expected)
    for found, wanted in zip(several.everything(), one.everything(), strict=True):
        assert np.array_equal(found, wanted)
