"""EAGLE-3: one or more decoder layers over the embedding of a token and three taps of the target before it.

Source: Li et al. 2025, arXiv 2503.01840. Layouts: speculators (`speculators_model_type` eagle3), and the flat one of
SafeAILab and SpecForge (`LlamaForCausalLMEagle3`). EAGLE-3.1 adds `fc_norm` and `norm_output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.cpu_kernels.decoder_packing import WIDTH_STEP, DecoderPacking
from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.matrices import ELEMENT_TYPES
from outrider.engine.cpu_kernels.operators import HEAD_DIM_STEP
from outrider.engine.features import FeatureReduction, rms_norm
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.checkpoint import Checkpoint, Target, refuse
from outrider.heads.form import HeadForm
from outrider.heads.layers import DecoderLayer, Rotation, as_float32
from outrider.heads.layouts import Layout, architectures, check_flags, check_taps
from outrider.heads.weights import Weights, take_embedding, take_output_layer, take_target_ids

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FLAT = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_EAGLE_CONFIG = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
"""Flags of `eagle_config` that say what every EAGLE-3 head does."""


def _is_form_of(config: Mapping[str, Any]) -> bool:
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = architectures(config)
    # SafeAILab's own name the target's class; no language model has a vocabulary to draft from.
    return bool(named & _FLAT) or (named == {"LlamaForCausalLM"} and "draft_vocab_size" in config)


def read_reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    """Taps, their norms or norm, and `fc`. Raises: ConfigError, ModelError."""
    layout = Layout.read(checkpoint, target, *FLAGS)
    taps = _taps(layout, target)
    num_taps, width = len(taps), layout.target_hidden_size
    norm = tap_norms = None
    if layout.options.get("norm_before_fc"):
        norm = checkpoint.tensor("input_norm.weight", (num_taps * width,))
    if layout.options.get("fc_norm"):
        tap_norms = torch.stack([checkpoint.tensor(f"fc_norm.{tap}.weight", (width,)) for tap in range(num_taps)])
    return FeatureReduction(
        taps=taps,
        hidden_size=width,
        epsilon=layout.shape.epsilon,
        norm=norm,
        tap_norms=tap_norms,
        projection=checkpoint.tensor("fc.weight", (layout.shape.hidden_size, num_taps * width)),
    )


def _taps(layout: Layout, target: Target) -> tuple[int, ...]:
    """By inputs of layers, as speculators counts; the flat layout counts outputs."""
    eagle_config = layout.options.get("eagle_config") or {}
    check_flags(layout.folder, eagle_config, _OF_EAGLE_CONFIG)
    for flag in _OF_EAGLE_CONFIG:
        if eagle_config.get(flag) is False:
            raise refuse(layout.folder, f"eagle_config.{flag}", False, "True")
    ids = layout.options.get(_IDS)
    if not layout.is_nested:
        if ids:
            raise refuse(layout.folder, _IDS, ids, f"eagle_config.{_IDS} in this layout")
        ids = [tap + 1 for tap in eagle_config.get(_IDS) or ()]
    num_layers = target.num_layers
    return check_taps(layout.folder, _IDS, tuple(ids or (2, num_layers // 2, num_layers - 3)), target)


class Eagle3(HeadModel):
    """A loaded EAGLE-3 head."""

    form = "eagle3"

    def __init__(self, checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> None:
        layout = Layout.read(checkpoint, target, *FLAGS)
        shape = layout.shape
        self.reduction = read_reduction(checkpoint, target)
        self.spec = layout.head_spec(self.form, checkpoint, target, dtype)
        weights = Weights(checkpoint, device, dtype)
        weights.drop(
            "fc.weight", "input_norm.weight", *(f"fc_norm.{tap}.weight" for tap in range(len(self.reduction.taps)))
        )
        self.target_ids = take_target_ids(weights, layout.draft_vocab_size, layout.vocab_size)
        self._shape = shape
        self._epsilon = shape.epsilon
        self._keeps_unnormed = not layout.options.get("norm_before_residual")
        self._feeds_back_normed = bool(layout.options.get("norm_output"))
        self._embedding = take_embedding(weights, target, layout.vocab_size, shape.hidden_size)
        first = "layers.0." if layout.is_nested or weights.has("layers.0.hidden_norm.weight") else "midlayer."
        self._hidden_norm = weights.take(f"{first}hidden_norm.weight", shape.hidden_size)
        self._layers = [
            DecoderLayer(
                weights,
                f"layers.{index}." if index else first,
                shape,
                index,
                width=0 if index else 2 * shape.hidden_size,
            )
            for index in range(shape.num_layers)
        ]
        self._norm = weights.take("norm.weight", shape.hidden_size)
        self._output = take_output_layer(weights, target, self.target_ids, layout.vocab_size, shape.hidden_size)
        self._rotation = Rotation(layout.folder, layout.layer_config, shape.head_dim, device)
        self._read_more(layout, weights)
        weights.check_all_read()

    def _read_more(self, layout: Layout, weights: Weights) -> None:
        """Of a form that has more."""

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions, rows.features.dtype)
        normed = rms_norm(rows.features, self._hidden_norm, self._epsilon)
        hidden = rows.features if self._keeps_unnormed else normed
        first, *others = self._layers
        embeddings = first.normed(self._embedding[rows.token_ids])
        hidden = first(hidden, angles, attend, torch.cat([embeddings, normed], -1))
        for layer in others:
            hidden = layer(hidden, angles, attend)
        return rms_norm(hidden, self._norm, self._epsilon) if self._feeds_back_normed else hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        normed = hidden if self._feeds_back_normed else rms_norm(hidden, self._norm, self._epsilon)
        return self._output(normed).float()

    @property
    def suits_kernels(self) -> bool:
        shape = self._shape
        widths = (shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
        return (
            type(self) is Eagle3  # other forms feed rows in other ways
            and self._embedding.dtype in ELEMENT_TYPES
            and not any(width % WIDTH_STEP for width in widths)
            and not shape.head_dim % HEAD_DIM_STEP
        )

    def native_step(self, kernels: CpuKernels, kv_cache: PagedKVCache) -> NativeStep:
        shape = self._shape
        # A draft token takes as long as reading the weights. Rounding them changes few drafts, and no answer.
        packing = DecoderPacking(kernels, quantise=self._embedding.dtype == torch.bfloat16)
        for index, layer in enumerate(self._layers):
            layer.pack(packing, str(index))
        positions = torch.arange(self.spec.max_model_len)
        for name, table in zip(("cosines", "sines"), self._rotation.at(positions, torch.float32), strict=True):
            packing.add(name, table)
        packing.add("embedding", self._embedding)
        packing.add("feature_norm", as_float32(self._hidden_norm))
        packing.add("final_norm", as_float32(self._norm))
        packing.add_matrix("head", [self._output])
        del self._layers, self._output
        weights = DecoderWeights(
            DecoderShape(
                num_layers=shape.num_layers,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                scaling=shape.head_dim**-0.5,
                epsilon=shape.epsilon,
                element_type=ELEMENT_TYPES[self._embedding.dtype],
                sliding_windows=(0,) * shape.num_layers,
                matrix_sizes=packing.matrix_sizes,
            ),
            packing.blobs,
        )
        decoder = NativeDecoder(
            kernels,
            weights,
            begins_normalised=not self._keeps_unnormed,
            keeps_normalised=self._feeds_back_normed,
        )
        return NativeStep(decoder, kv_cache)


FORM = HeadForm(name=Eagle3.form, is_form_of=_is_form_of, reduction=read_reduction, open=Eagle3)
