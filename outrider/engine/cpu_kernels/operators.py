"""The kernels on torch tensors, for models that transformers runs layer by layer.

Each function writes to an output allocated by its caller. All tensors must be contiguous.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function

from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType, Workspace
from outrider.engine.cpu_kernels.matrices import PlainLinear
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.errors import InternalError

ELEMENT_TYPES = {torch.float32: ElementType.FLOAT32, torch.bfloat16: ElementType.BFLOAT16}
QUANTISED_TYPES = tuple(each for each in ElementType if each >= ElementType.INT8)


def plain_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear:
    """Makes a PlainLinear from CPU tensors. It shares the memory of contiguous tensors."""
    return PlainLinear(words_of(weight), None if bias is None else words_of(bias))


def linear(kernels: CpuKernels, workspace: Workspace, matrix: Structure, x: Tensor, y: Tensor) -> None:
    """Maps x [..., in_features] float32 or bfloat16 to y [..., out_features] of the same dtype."""
    _check(x.shape[-1] == matrix.in_features, f"{x.shape[-1]} columns for {matrix.in_features}")
    if not y.numel():
        return
    _call(
        kernels.library.functions.outrider_linear, kernels.team, workspace.handle, ELEMENT_TYPES[x.dtype],
        x.data_ptr(), x.numel() // x.shape[-1], matrix, y.data_ptr(),
    )  # fmt: skip


def experts(
    kernels: CpuKernels,
    workspace: Workspace,
    struct: Structure,  # an OutriderExperts
    x: Tensor,  # [num_rows, hidden_size], float32 or bfloat16; the weights' type unless they are quantised
    expert_ids: Tensor,  # [num_rows, num_slots] int64
    weights: Tensor,  # [num_rows, num_slots] float32
    y: Tensor,  # like x; or [num_rows, num_slots, hidden_size] float32
) -> None:
    """Computes the weighted sum of each row's experts, or if `y` has slots, what would be added."""
    is_right = x.shape[1:] == (struct.hidden_size,) and len(x) == len(expert_ids) and expert_ids.shape == weights.shape
    _check(is_right and expert_ids.dtype == torch.int64 and weights.dtype == torch.float32, f"experts of {x.shape}")
    of_weights = structures.OutriderMatrix.from_address(struct.gate_up).type
    _check(of_weights in (*QUANTISED_TYPES, ELEMENT_TYPES[x.dtype]), f"{x.dtype} for weights of another type")
    _call(
        kernels.library.functions.outrider_experts, kernels.team, workspace.handle, ELEMENT_TYPES[x.dtype], struct,
        x.data_ptr(), len(x), expert_ids.data_ptr(), weights.data_ptr(), expert_ids.shape[1], int(y.ndim == 2),
        y.data_ptr(),
    )  # fmt: skip


def rms_norm(
    kernels: CpuKernels, x: Tensor, weight: Tensor, epsilon: float, y: Tensor, *, rounds_once: bool = False
) -> None:
    """Normalises x [..., width] float32 or bfloat16, with weight [width] float32, to y of x's shape and dtype.

    Unless `rounds_once`, normalised values are also rounded before they are multiplied by the weight.
    """
    width = weight.numel()
    _check(x.shape[-1] == width and weight.dtype == torch.float32, f"{x.shape[-1]} columns for {width} of float32")
    _call(
        kernels.library.functions.outrider_rms_norm, kernels.team, ELEMENT_TYPES[x.dtype],
        x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon, rounds_once, y.data_ptr(),
    )  # fmt: skip


def paged_attention(
    kernels: CpuKernels,
    workspace: Workspace,
    batch: Structure,
    options: Structure,
    query: Tensor,  # [num_rows, num_heads, head_dim], float32 or bfloat16, head_dim a multiple of HEAD_DIM_STEP
    key_cache: npt.NDArray[np.uint8],  # the cache of one layer, laid out in panels (see PanelPlane)
    value_cache: npt.NDArray[np.uint8],  # same
    output: Tensor,  # like query, but with latent_dim instead of head_dim in latent attention
) -> None:
    """Computes attention of queries over the keys and values of their sequences, and writes the result to `output`."""
    num_kv_heads, head_dim, latent_dim = options.num_kv_heads, options.head_dim, options.latent_dim
    _check_panels(key_cache, num_kv_heads, head_dim - latent_dim, query.dtype)
    _check_panels(value_cache, num_kv_heads, latent_dim or head_dim, query.dtype)
    _call(
        kernels.library.functions.outrider_paged_attention, kernels.team, workspace.handle,
        ELEMENT_TYPES[query.dtype], options, batch, query.data_ptr(), query.shape[1] * query.shape[2],
        key_cache.ctypes.data, value_cache.ctypes.data, output.data_ptr(),
    )  # fmt: skip


def delta_rule(  # noqa: PLR0917 as the kernel has them
    kernels: CpuKernels,
    workspace: Workspace,
    rule: Structure,  # an OutriderDeltaRule
    batch: Structure,
    steps: Structure,  # an OutriderStateSteps
    rows: Tensor,  # [num_slots, row_width], float32 or bfloat16
    states: npt.NDArray[np.float32],  # [num_states, num_value_heads, key_dim * value_dim]
    gates: Tensor,  # [num_rows, num_value_heads * value_dim], like rows
    output: Tensor,  # like gates
) -> None:
    """Advances states by the rows of a batch, which are in the cache, and writes its normed and gated outputs."""
    heads, value_width = rule.num_value_heads, rule.num_value_heads * rule.value_dim
    row_width = 2 * (rule.num_key_heads * rule.key_dim + heads) + value_width
    is_right = rows.shape[1] == row_width and states.dtype == np.float32 and gates.is_contiguous()
    is_right = is_right and states.shape[1:] == (heads, rule.key_dim * rule.value_dim) and states.flags.c_contiguous
    is_right = is_right and gates.shape == output.shape == (batch.num_rows, value_width) and rows.dtype == gates.dtype
    _check(is_right, f"a delta rule of {gates.shape} with rows {rows.shape} and states {states.shape}")
    _call(
        kernels.library.functions.outrider_delta_rule, kernels.team, workspace.handle, ELEMENT_TYPES[rows.dtype], rule,
        batch, steps, rows.data_ptr(), states.ctypes.data, gates.data_ptr(), output.data_ptr(),
    )  # fmt: skip


def write_rows(
    kernels: CpuKernels,
    rows: Tensor,  # [num_rows, num_kv_heads, head_dim], float32 or bfloat16
    cache: npt.NDArray[np.uint8],  # the cache of one layer, laid out in panels
    slots: Tensor,  # [num_rows] int64
    *,
    are_values: bool,
) -> None:
    """Writes keys, or values, to the cache."""
    rows = rows.contiguous()
    num_rows, num_heads, head_dim = rows.shape
    _check_panels(cache, num_heads, head_dim, rows.dtype)
    _check(slots.shape == (num_rows,) and slots.is_contiguous(), f"slots {slots.shape} for {num_rows} rows")
    struct = structures.OutriderPanels(
        cache.ctypes.data, 1, 0, num_heads, head_dim, ELEMENT_TYPES[rows.dtype], are_values
    )
    _call(
        kernels.library.functions.outrider_write_rows,
        struct, 0, num_heads, slots.data_ptr(), num_rows, rows.data_ptr(),
    )  # fmt: skip


def _check_panels(cache: npt.NDArray[np.uint8], num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    is_one = isinstance(cache, np.ndarray) and cache.flags.c_contiguous
    is_right = is_one and cache.shape[1:] == (num_heads, 16 * head_dim * dtype.itemsize)
    _check(is_right, f"the cache has no panels of {num_heads} heads of {head_dim} {dtype}")


def _call(function: Any, *arguments: object) -> None:
    """Calls a function. It is named only while torch records a trace, since naming takes longer than small kernels."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 as torch itself asks
        with record_function(function.__name__):
            function(*arguments)
    else:
        function(*arguments)


def _check(is_right: bool, message: str) -> None:  # noqa: FBT001
    if not is_right:
        raise InternalError(f"native kernels: {message}")
