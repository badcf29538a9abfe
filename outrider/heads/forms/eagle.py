"""EAGLE: a decoder layer over the embedding of a token, joined with the target's last hidden state before it.

What the layer gives is read by the target's own output layer, as the target's last hidden state is. EAGLE-2 drafts
trees with the same head, and HASS trains it otherwise.

Source: Li et al. 2024, arXiv 2401.15077. Layouts: SafeAILab's flat one, and that of speculators before 0.3
(`speculators_model_type` eagle).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.features import FeatureReduction
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.form import HeadForm
from outrider.heads.layers import DecoderLayer, Rotation
from outrider.heads.layouts import Layout, architectures
from outrider.heads.weights import Weights, take_embedding, take_output_layer

_FLAGS = ("fusion_bias",)  # told by its tensor
_FLAT = ({"LlamaForCausalLM"}, {"EagleLlamaForCausalLM"})


def _is_form_of(config: Mapping[str, Any]) -> bool:
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle")
    return architectures(config) in _FLAT


def _reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    layout = Layout.read(checkpoint, target, *_FLAGS)
    return FeatureReduction(taps=(target.num_layers,), hidden_size=layout.shape.hidden_size, takes_final_norm=True)


class Eagle(HeadModel):
    """A loaded EAGLE head."""

    def __init__(self, checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> None:
        layout = Layout.read(checkpoint, target, *_FLAGS)
        shape = layout.shape
        self.reduction = _reduction(checkpoint, target)
        weights = Weights(checkpoint, device, dtype)
        self._embedding = take_embedding(weights, target, layout.vocab_size, shape.hidden_size)
        fusion = "fusion_fc" if layout.is_nested else "fc"
        self._fusion = weights.take_rows("", (fusion,), (shape.hidden_size,), 2 * shape.hidden_size)
        prefixes = ["transformer."] if layout.is_nested else [f"layers.{i}." for i in range(shape.num_layers)]
        self._layers = [
            DecoderLayer(weights, prefix, shape, index, is_normed=index > 0) for index, prefix in enumerate(prefixes)
        ]
        # Of the nested layout the target's own configuration is kept, with all its layers.
        self.spec = replace(layout.head_spec("eagle", checkpoint, target, dtype), num_layers=len(self._layers))
        self._output = take_output_layer(weights, target, None, layout.vocab_size, shape.hidden_size)
        self._rotation = Rotation(layout.folder, layout.layer_config, shape.head_dim, device)
        weights.check_all_read()

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions, rows.features.dtype)
        hidden = self._fusion(torch.cat([self._embedding[rows.token_ids], rows.features], -1))
        for layer in self._layers:
            hidden = layer(hidden, angles, attend)
        return hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return self._output(hidden).float()


FORM = HeadForm(name="eagle", is_form_of=_is_form_of, reduction=_reduction, open=Eagle)
