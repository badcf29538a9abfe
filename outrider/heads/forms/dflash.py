"""DFlash: a block of tokens by one forward, whose rows see each other.

The target's features are the context: each layer makes keys and values of them alone. The newest token and a mask
token for each drafted one are the parallel rows, which attend to the context and to all of each other. So rows of
depth 0 give keys and values here, and no hidden state of use.

Layouts: speculators (`speculators_model_type` dflash), and z-lab's flat one (`DFlashDraftModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.features import FeatureReduction, rms_norm
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.checkpoint import Checkpoint, Target, check_parallel, refuse
from outrider.heads.form import HeadForm
from outrider.heads.layers import DecoderLayer, Rotation
from outrider.heads.layouts import Layout, architectures, check_flags, check_taps
from outrider.heads.weights import Weights, take_embedding, take_output_layer, take_target_ids

_FLAGS = ("sample_from_anchor", "sliding_window_non_causal")  # the latter of layers that are refused


def _is_form_of(config: Mapping[str, Any]) -> bool:
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "dflash")
    return architectures(config) == {"DFlashDraftModel"}


def _reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    layout = Layout.read(checkpoint, target, *_FLAGS)
    taps, hidden_size = _taps(layout, target), layout.target_hidden_size
    return FeatureReduction(
        taps=taps,
        hidden_size=hidden_size,
        takes_final_norm=not layout.is_nested,  # z-lab reads transformers' hidden states
        projection=checkpoint.tensor("fc.weight", (layout.shape.hidden_size, len(taps) * hidden_size)),
    )


def _taps(layout: Layout, target: Target) -> tuple[int, ...]:
    """By inputs of layers, as speculators counts; z-lab counts outputs."""
    if layout.is_nested:
        name, ids = "aux_hidden_state_layer_ids", layout.options.get("aux_hidden_state_layer_ids")
    else:
        name, ids = "dflash_config.target_layer_ids", _block_option(layout, "target_layer_ids")
        ids = ids and [tap + 1 for tap in ids]
    return check_taps(layout.folder, name, tuple(ids or ()), target)


def _block_option(layout: Layout, name: str) -> Any:
    """z-lab's are in `dflash_config`, or beside it."""
    within = layout.options.get("dflash_config") or {}
    check_flags(layout.folder, within, _FLAGS)
    value = within.get(name)
    return layout.options.get(name) if value is None else value


class DFlash(HeadModel):
    """A loaded DFlash head."""

    def __init__(self, checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> None:
        layout = Layout.read(checkpoint, target, *_FLAGS)
        shape = layout.shape
        self.reduction = _reduction(checkpoint, target)
        self._block_size, mask_token_id = _block_option(layout, "block_size"), _block_option(layout, "mask_token_id")
        for name, value in (("block_size", self._block_size), ("mask_token_id", mask_token_id)):
            if value is None:
                raise refuse(layout.folder, name, value, "a number")
        self._mask_token_id = int(mask_token_id)
        num_parallel = int(self._block_size) - (not _block_option(layout, "sample_from_anchor"))
        check_parallel(layout.folder, num_parallel, self._mask_token_id, layout.vocab_size)
        self.spec = replace(
            layout.head_spec("dflash", checkpoint, target, dtype),
            num_parallel=num_parallel,
            attends_both_ways=True,
        )
        weights = Weights(checkpoint, device, dtype)
        weights.drop("fc.weight")
        self.parallel_feature = torch.zeros(shape.hidden_size, device=device, dtype=dtype)  # of no consequence
        self.target_ids = take_target_ids(weights, layout.draft_vocab_size, layout.vocab_size)
        self._epsilon = shape.epsilon
        self._embedding = take_embedding(weights, target, layout.vocab_size, shape.hidden_size)
        self._context_norm = weights.take("hidden_norm.weight", shape.hidden_size)
        self._layers = [DecoderLayer(weights, f"layers.{index}.", shape, index) for index in range(shape.num_layers)]
        self._norm = weights.take("norm.weight", shape.hidden_size)
        self._output = take_output_layer(weights, target, self.target_ids, layout.vocab_size, shape.hidden_size)
        self._rotation = Rotation(layout.folder, layout.layer_config, shape.head_dim, device)
        weights.check_all_read()

    def parallel_tokens(self, token_id: int) -> tuple[int, ...]:
        return (token_id, *(self._mask_token_id,) * (self._block_size - 1))

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions, rows.features.dtype)
        context = rms_norm(rows.features, self._context_norm, self._epsilon)
        is_parallel = (rows.depths > 0)[:, None]
        hidden = torch.where(is_parallel, self._embedding[rows.token_ids], context)
        for layer in self._layers:
            hidden = layer(hidden, angles, attend, torch.where(is_parallel, layer.normed(hidden), context))
        return hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return self._output(rms_norm(hidden, self._norm, self._epsilon)).float()


FORM = HeadForm(name="dflash", is_form_of=_is_form_of, reduction=_reduction, open=DFlash)
