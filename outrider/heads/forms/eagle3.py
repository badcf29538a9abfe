"""EAGLE-3: one or more decoder layers over a token's embedding and three taps of the target at the token before.

Source: Li et al. 2025, arXiv 2503.01840. Layouts: speculators (`speculators_model_type` eagle3), and the flat one of
SafeAILab and SpecForge (`LlamaForCausalLMEagle3`). EAGLE-3.1 adds `fc_norm` and `norm_output`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.decoder_options import HEAD_DIM_STEP, WIDTH_STEP
from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, plain_linear
from outrider.engine.cpu_kernels.packing import DecoderPacking
from outrider.engine.features import FeatureReduction, rms_norm
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.layers import DecoderLayer
from outrider.heads.layouts import Layout, check_options, check_taps
from outrider.heads.packed_head import PackedHead

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_EAGLE_CONFIG = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
"""Flags of `eagle_config` that must not be false."""


class Eagle3(HeadModel):
    """An EAGLE-3 head."""

    form = "eagle3"
    architectures: Collection[str] = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        # SafeAILab's heads name the target's class. Only their draft vocabulary tells them apart from language models.
        is_of_safe_ai_lab = config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" in config
        return is_of_safe_ai_lab or super().is_form_of(config)

    def __init__(self, files: HeadFiles) -> None:
        self._layout = Layout.read(files, *_FLAGS)
        self._shape = shape = self._layout.shape
        taps, hidden_size = _taps(files, is_nested=self._layout.is_nested), files.target.hidden_size
        size = len(taps) * hidden_size
        norm = tap_norms = None
        if files.config.get("norm_before_fc"):
            norm = files.read("input_norm.weight", size)
        if files.config.get("fc_norm"):
            tap_norms = torch.stack([files.read(f"fc_norm.{tap}.weight", hidden_size) for tap in range(len(taps))])
        self.reduction = FeatureReduction(
            taps=taps,
            hidden_size=hidden_size,
            epsilon=shape.epsilon,
            norm=norm,
            tap_norms=tap_norms,
            projection=files.read("fc.weight", shape.hidden_size, size),
        )
        widths = (shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
        self.suits_kernels = (
            files.dtype in ELEMENT_TYPES
            and not any(width % WIDTH_STEP for width in widths)
            and not shape.head_dim % HEAD_DIM_STEP
        )

    def load(self, files: HeadFiles) -> None:
        shape, hidden = self._shape, self._shape.hidden_size
        self.target_ids = files.target_ids(self._layout.draft_vocab_size)
        self._keeps_unnormed = not files.config.get("norm_before_residual")
        self._feeds_back_normed = bool(files.config.get("norm_output"))
        self._embedding = files.embedding(hidden)
        has_layers = self._layout.is_nested or "layers.0.hidden_norm.weight" in files.names
        self._prefixes = [f"layers.{index}." for index in range(shape.num_layers)]
        if not has_layers:
            self._prefixes[0] = "midlayer."
        self._hidden_norm = files.take(f"{self._prefixes[0]}hidden_norm.weight", hidden)
        self._layers = [
            DecoderLayer(files, prefix, shape, index, width=0 if index else 2 * hidden)
            for index, prefix in enumerate(self._prefixes)
        ]
        self._norm = files.take("norm.weight", hidden)
        self._output = files.output_layer(hidden, self.target_ids)
        self._rotation = self._layout.rotation(files)
        self._places = files.places
        self.spec = self._layout.spec(files, self.form)

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions)
        normed = rms_norm(rows.features, self._hidden_norm, self._shape.epsilon)
        hidden = rows.features if self._keeps_unnormed else normed
        first, *others = self._layers
        needed, embeddings = slice(rows.first_needed, None), first.normed(self._embedding[rows.token_ids])
        hidden = first(hidden[needed], angles, attend, torch.cat([embeddings, normed], -1), places=needed)
        for layer in others:
            hidden = layer(hidden, angles, attend)
        return rms_norm(hidden, self._norm, self._shape.epsilon) if self._feeds_back_normed else hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        normed = hidden if self._feeds_back_normed else rms_norm(hidden, self._norm, self._shape.epsilon)
        return self._output(normed).float()

    def pack(self, kernels: CpuKernels) -> PackedHead:
        shape, element_type = self._shape, ELEMENT_TYPES[self._embedding.dtype]
        # Most of a draft token's time is spent on reading weights. Quantising them changes few drafts and no answer.
        packing = DecoderPacking(kernels, quantise="int8" if self._embedding.dtype == torch.bfloat16 else "")
        for index, prefix in enumerate(self._prefixes):
            of_layer = {name: place for name, place in self._places.items() if name.startswith(prefix)}
            tensors = {name: words_of(place.weight[place.rows]) for name, place in of_layer.items()}
            packing.add_layer(index, tensors, prefix)
        packing.add_rotation(self._rotation.frequencies.numpy(), self.spec.max_model_len, self._rotation.scale)
        packing.add("embedding", words_of(self._embedding))
        packing.add_norm("feature_norm", words_of(self._hidden_norm))
        packing.add_norm("final_norm", words_of(self._norm))
        packing.add_matrix("head", [plain_linear(self._output.weight, self._output.bias)])
        packing.add("target_ids", None if self.target_ids is None else self.target_ids.numpy())
        del self._layers, self._output, self._places
        weights = DecoderWeights(
            DecoderShape(
                **asdict(shape),
                rotary_dim=shape.head_dim,
                scaling=shape.head_dim**-0.5,
                element_type=element_type,
                sliding_windows=(0,) * shape.num_layers,
                rotations=(0,) * shape.num_layers,
                matrix_sizes=packing.matrix_sizes,
                begins_normalised=not self._keeps_unnormed,
                keeps_normalised=self._feeds_back_normed,
            ),
            packing.blobs,
        )
        return PackedHead(self.spec, self.reduction.pack(kernels, element_type), weights)


def _taps(files: HeadFiles, *, is_nested: bool) -> tuple[int, ...]:
    """Returns the taps. As in speculators, each has the number of the layer whose input it is.

    In the flat layout's configuration, it has the number of the layer whose output it is.
    """
    eagle_config = files.config.get("eagle_config") or {}
    check_options(files, eagle_config, _OF_EAGLE_CONFIG)
    for flag in _OF_EAGLE_CONFIG:
        if eagle_config.get(flag) is False:
            raise files.refusal(f"eagle_config.{flag}", False, "True")
    ids = files.config.get(_IDS)
    if not is_nested:
        if ids:
            raise files.refusal(_IDS, ids, f"eagle_config.{_IDS} in this layout")
        ids = [tap + 1 for tap in eagle_config.get(_IDS) or ()]
    num_layers = files.target.num_layers
    return check_taps(files, _IDS, tuple(ids or (2, num_layers // 2, num_layers - 3)))
