"""Layers with linear attention by the gated delta rule, as they are in transformers' models.

Each head has a state, a matrix that every token changes. States are stored after some numbers of tokens only (see
`StateTable`), and for each of the newest tokens a row: the inputs of the layer's convolution, and what becomes the
token's decay and weight. A step computes the tokens since the last stored state again from their rows. The recurrence
is always computed token by token, and never in chunks, so that a row's bits depend on the tokens before it only.

Source: Gated Delta Networks (Yang, Kautz and Hatamizadeh, 2024; arXiv 2412.06464).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from outrider.engine.kv_cache.planes import LinearAttention

MAX_KERNEL, DIM_STEP = 8, 16
"""Maximum number of tokens in the window of the convolution (OUTRIDER_MAX_KERNEL of the kernel), and the number of
which dimensions of heads are multiples."""
_FORMS = (
    ("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next: the parts of each key head together
    ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"),  # Qwen 3.5
    ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj"),  # OLMo Hybrid
)
_NAMES = ("num_k_heads", "num_v_heads", "A_log", "dt_bias", "conv1d", "conv_kernel_size")


class LinearStep(Protocol):
    """What a layer needs of a step. It is an argument of the forward pass, as `LayerAttention` is."""

    def apply_delta_rule(self, layer: int, rule: Any, rows: Tensor, gates: Tensor) -> Tensor:
        """Stores the step's rows [num_rows, row_width] of a layer of the model, advances the states, and returns the
        normed and gated outputs [num_rows, num_heads * value_dim]. `gates`: in the shape of the result.
        """


def delta_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the parent of each layer of the gated delta rule that can be computed, and the layer's name in it."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if _is_delta_layer(module):
                yield parent, name


def describe_linear(model: nn.Module) -> LinearAttention | None:
    """Returns the shape of the model's layers with linear attention; None if there are none, or not of one shape."""
    layers: dict[LinearAttention, list[int]] = {}
    for module in (getattr(parent, name) for parent, name in delta_layers(model)):
        num_key_heads, num_heads, key_dim, value_dim = sizes_of(module)
        width = 2 * (num_key_heads * key_dim + num_heads) + num_heads * value_dim
        shape = LinearAttention((), width, num_heads, key_dim * value_dim, module.conv_kernel_size)
        layers.setdefault(shape, []).append(module.layer_idx)
    shapes = [replace(shape, layers=tuple(indices)) for shape, indices in layers.items()]
    return shapes[0] if len(shapes) == 1 else None


def sizes_of(module: Any) -> tuple[int, int, int, int]:
    """Returns a layer's numbers of key heads and value heads, and their dimensions."""
    return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim


def projections_of(module: Any) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """Returns the weights of a layer, each [out_features, in_features]: those whose outputs are a stored row (of
    queries, keys and values, of betas, of decays), that of gates, and that of the output.
    """
    form = next(form for form in _FORMS if hasattr(module, form[0]))
    *rows, gates = (getattr(module, name).weight.detach() for name in form)
    output = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    if form is _FORMS[0]:
        num_key_heads, num_heads, key_dim, value_dim = sizes_of(module)
        per_key_head = num_heads // num_key_heads
        sizes = [key_dim, key_dim, per_key_head * value_dim, per_key_head * value_dim]
        *parts, own_gates = rows[0].unflatten(0, (num_key_heads, -1)).split(sizes, 1)
        scalars = gates.unflatten(0, (num_key_heads, -1)).split(per_key_head, 1)
        rows, gates = [part.flatten(0, 1) for part in (*parts, *scalars)], own_gates.flatten(0, 1)
    return rows, gates, output.weight.detach()


def _is_delta_layer(module: Any) -> bool:
    """Returns whether the module has the weights of a form that we know, and computes what we compute with them. The
    load compares the logits.
    """
    if not all(hasattr(module, name) for name in _NAMES):
        return False
    names = next((form for form in _FORMS if all(hasattr(module, name) for name in form)), ())
    linears = [getattr(module, name) for name in names]
    has_bias = module.conv1d.bias is not None or any(getattr(each, "bias", None) is not None for each in linears)
    is_plain = bool(linears) and all(type(each) is nn.Linear for each in linears) and not has_bias
    has_sizes = not (module.head_k_dim % DIM_STEP or module.head_v_dim % DIM_STEP)
    return is_plain and has_sizes and module.activation == "silu" and module.conv_kernel_size <= MAX_KERNEL
