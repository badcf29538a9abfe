"""Registers our attention with transformers.

transformers looks up the attention function that a model's configuration names. Ours, ATTENTION_NAME, passes queries,
keys and values to a function in the forward's keyword arguments, so no state outlives a forward. No mask function is
registered under the name, so transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.latent_attention import AbsorbedProjection

ATTENTION_NAME = "outrider"
STEP_ARGUMENT = "outrider_step"


LayerAttention = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions, Mapping[str, Any]], Tensor]
"""Computes every attention call of one forward; passed to the model as STEP_ARGUMENT.

Takes the layer, its query [num_rows, num_heads, head_dim] and key [num_rows, num_kv_heads, head_dim], both rotated, its
value in the key's shape, the options, and the layer's other arguments. Returns [num_rows, num_heads, head_dim]. With
latent attention, key and value are what is stored, and the result has `latent_dim` instead of `head_dim`.
"""


def register_attention() -> None:
    """Registers ATTENTION_NAME with transformers; idempotent."""
    from transformers import AttentionInterface  # takes seconds; a node with packed weights avoids it

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(  # noqa: PLR0917 the signature is transformers'
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_rows, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [num_heads], attention sinks
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes one layer's attention, with the signature of transformers' attention functions."""
    attend: LayerAttention = kwargs.pop(STEP_ARGUMENT)
    rows = query[0].transpose(0, 1)
    absorbed, latent_dim = getattr(module, "kv_b_proj", None), 0
    if isinstance(absorbed, AbsorbedProjection):
        rows, latent_dim = absorbed.absorb(rows), absorbed.latent_dim
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    options = AttentionOptions(scaling, sliding_window, softcap, sinks, latent_dim)
    output = attend(
        module.layer_idx,  # type: ignore[arg-type]
        rows,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
        kwargs,
    )
    if isinstance(absorbed, AbsorbedProjection):
        output = absorbed.expand(output)
    return output.unsqueeze(0), None  # [1, num_rows, num_heads, head_dim]
