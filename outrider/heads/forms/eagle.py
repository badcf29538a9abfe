"""EAGLE: a decoder layer over the embedding of a token, joined with the target's last hidden state at the token before.

The target's own output layer computes logits from the layer's output. EAGLE-2 drafts trees with the same head, and HASS
trains it differently.

Source: Li et al. 2024, arXiv 2401.15077. Layouts: SafeAILab's flat one, and that of speculators before 0.3
(`speculators_model_type` eagle).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.layers import DecoderLayer
from outrider.heads.layouts import Layout

_FLAGS = ("fusion_bias",)  # the tensors show whether there is a bias


class Eagle(HeadModel):
    """An EAGLE head."""

    form = "eagle"
    architectures = ("LlamaForCausalLM", "EagleLlamaForCausalLM")

    def __init__(self, files: HeadFiles) -> None:
        self._layout = Layout.read(files, *_FLAGS)
        self.reduction = files.target.last_hidden_state()

    def load(self, files: HeadFiles) -> None:
        is_nested, shape, hidden = self._layout.is_nested, self._layout.shape, self._layout.shape.hidden_size
        self._embedding = files.embedding(hidden)
        self._fusion = files.take_linear({"fusion_fc" if is_nested else "fc": hidden}, 2 * hidden)
        # The nested layout repeats the target's configuration, so num_layers is the target's; the head has one layer.
        prefixes = ["transformer."] if is_nested else [f"layers.{index}." for index in range(shape.num_layers)]
        self._layers = [
            DecoderLayer(files, prefix, shape, index, is_normed=index > 0) for index, prefix in enumerate(prefixes)
        ]
        self._output = files.output_layer(hidden)
        self._rotation = self._layout.rotation(files)
        self.spec = self._layout.spec(files, self.form, num_layers=len(self._layers))

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions)
        hidden = self._fusion(torch.cat([self._embedding[rows.token_ids], rows.features], -1))
        for layer in self._layers:
            hidden = layer(hidden, angles, attend)
        return hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return self._output(hidden).float()
