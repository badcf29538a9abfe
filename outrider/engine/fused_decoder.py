"""A GPU decoder built from joined products and our own kernels, for Llama, Mistral, Qwen2, Qwen3 and Gemma 3.

A layer takes nine kernels: four products (queries, keys and values; the attention output; gate and up; down); rotation,
which also stores keys and values in their slots; attention, with a tenth kernel if it is split; activation; and two
sums, each with the norm that follows it. transformers' modules launch more than forty kernels. At load, the logits are
compared with those of the original model (see outrider.model_hub.support).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.gpu_kernels import activation_of
from outrider.engine.gpu_kernels import layers as deterministic
from outrider.engine.gpu_kernels.decoder import Norm, activate, add_rms_norm, rms_norm, rotate_and_store
from outrider.engine.graph_shapes import MAX_BUCKET_ROWS
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.feature_writer import FeatureWriter
    from outrider.engine.torch_adapter import AdapterRows


LAYERS: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The model's own linear layers in each product of a layer, by the product's field of `_Layer`."""

_Linear = tuple[Tensor, Tensor | None]
"""Weight [out_features, in_features] and bias [out_features] or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear
    sizes: Mapping[str, Sequence[int]]  # of the outputs of the model's own layers, by the field of their product
    head_norms: tuple[Norm, Norm] | None  # norms of each query head and of each key head
    post_attention_norm: Norm | None  # applied to the output of attention before it is added to the residual stream
    mlp_norm: Norm  # applied to the residual stream after that addition
    post_mlp_norm: Norm | None  # applied to the output of the MLP before it is added to the residual stream
    next_norm: Norm  # the next layer's first norm, or the final one, applied after that addition
    angles: tuple[Tensor, Tensor]  # cosines and sines, [num_positions, head_dim / 2] each
    options: AttentionOptions


class FusedDecoder:
    """The weights of one model, and its forward pass. It holds no state of a step, so several runners can share it."""

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, layers: Sequence[AttentionOptions], *, is_deterministic: bool
    ) -> None:
        """Joins the weights of `model`, for which `gpu_kernels.why_not_fused` must return an empty string.

        The model's modules keep views of the joined weights, so the weights are in memory only once, and transformers
        can still run the model.

        Args:
            model: the model, on its device.
            spec: its sizes.
            layers: each layer's attention options.
            is_deterministic: whether our own kernels compute products, so that a row has the same bits in any batch.
        """
        base: Any = model.base_model
        head: Any = model.get_output_embeddings()
        config = model.config
        self._prefix = f"{model.base_model_prefix}.layers"
        self._embed: nn.Module = base.embed_tokens
        self._head: _Linear = (head.weight, head.bias)
        self._multiply = deterministic.linear if is_deterministic else nn.functional.linear
        self._activation = activation_of(config)
        self._epsilon: float = config.rms_norm_eps
        self._is_gemma = config.model_type.startswith("gemma")
        kinds = config.layer_types if self._is_gemma else [None] * spec.num_layers
        # Enough for the rows that pad a batch, and for the probe at load, which may exceed a small context window.
        num_positions = max(spec.max_model_len, MAX_BUCKET_ROWS)
        angles = {kind: _angles(base.rotary_emb, num_positions, head.weight, kind) for kind in set(kinds)}
        norms = [self._norm(norm) for norm in (*(layer.input_layernorm for layer in base.layers), base.norm)]
        self._first_norm = norms[0]
        self._layers = [
            self._layer(layer, norm, angles[kind], options)
            for layer, norm, kind, options in zip(base.layers, norms[1:], kinds, layers, strict=True)
        ]
        torch.cuda.empty_cache()  # returns the memory of the separate weights to the GPU

    def _norm(self, module: Any) -> Norm:
        weight = module.weight.detach()
        return Norm(1.0 + weight.float() if self._is_gemma else weight, self._epsilon, not self._is_gemma)

    def _layer(self, layer: Any, next_norm: Norm, angles: tuple[Tensor, Tensor], options: AttentionOptions) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        sizes = {field: [layer.get_submodule(name).out_features for name in names] for field, names in LAYERS.items()}
        after_attention = self._norm(layer.post_attention_layernorm)
        return _Layer(
            qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
            output=(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=_join(mlp.gate_proj, mlp.up_proj),
            down=(mlp.down_proj.weight, mlp.down_proj.bias),
            sizes=sizes,
            head_norms=(
                (self._norm(attention.q_norm), self._norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
            ),
            post_attention_norm=after_attention if self._is_gemma else None,
            mlp_norm=self._norm(layer.pre_feedforward_layernorm) if self._is_gemma else after_attention,
            post_mlp_norm=self._norm(layer.post_feedforward_layernorm) if self._is_gemma else None,
            next_norm=next_norm,
            angles=angles,
            options=options,
        )

    def forward(
        self,
        batch: InputBatch,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        features: FeatureWriter | None = None,
        on_layer_done: Callable[[int], None] | None = None,
        *,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Does what `ModelRunner.forward` does. `features` must be in its `writing` context for this batch."""
        fields, groups = batch.on(kv_cache.device), range(batch.num_groups)
        plans = [attention.prepare(batch, group) for group in groups]
        slots = [batch.slots_on(kv_cache.device, group) for group in groups]

        def multiply(rows: Tensor, index: int, product: str) -> Tensor:
            layer = self._layers[index]
            output = self._multiply(rows, *getattr(layer, product))
            if adapters is not None:
                names = [f"{self._prefix}.{index}.{name}" for name in LAYERS[product]]
                adapters.add_joined(names, layer.sizes[product], rows, output)
            return output

        residual: Tensor = self._embed(fields.token_ids)
        rows = rms_norm(residual, self._first_norm)
        for index, layer in enumerate(self._layers):
            if features is not None:
                features.record_tap(index, residual)
            keys, values = kv_cache.keys[index], kv_cache.values[index]
            group = kv_cache.group_of[index] if len(groups) > 1 else 0
            query = rotate_and_store(
                multiply(rows, index, "qkv"),
                keys,
                values,
                cosines=layer.angles[0],
                sines=layer.angles[1],
                positions=fields.positions,
                slots=slots[group],
                norms=layer.head_norms,
            )
            if on_layer_done is not None:
                on_layer_done(index)
            attended = attention.attend(plans[group], query, keys, values, layer.options).flatten(1)
            added = multiply(attended, index, "output")
            residual, rows = add_rms_norm(residual, added, layer.mlp_norm, layer.post_attention_norm)
            activated = activate(multiply(rows, index, "gate_up"), self._activation)
            added = multiply(activated, index, "down")
            residual, rows = add_rms_norm(residual, added, layer.next_norm, layer.post_mlp_norm)
        if features is not None:
            features.record_tap(len(self._layers), residual, rows)
        if batch.selects_logits:
            rows = rows.index_select(0, fields.logits_rows)
        # The product is rounded to the model's dtype first, like transformers' logits. Without rows nothing is
        # launched.
        return self._multiply(rows, *self._head).float()


def _join(*modules: nn.Linear) -> _Linear:
    """Joins projections of the same input. Each module's weight and bias become views of the joined tensors."""
    weight = _joined([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    return weight, _joined(biases) if biases else None


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(each) for each in parameters]), strict=True):
        parameter.data = part
    return whole


def _angles(rotary: Any, num_positions: int, like: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """Returns the model's own cosines and sines of every position, in its dtype: [num_positions, head_dim / 2] each."""
    positions = torch.arange(num_positions, device=like.device).unsqueeze(0)
    both = rotary(like, positions) if layer_type is None else rotary(like, positions, layer_type)
    cosines, sines = (each[0].chunk(2, -1)[0].clone() for each in both)  # the second half repeats the first
    return cosines, sines
