"""The kernels as torch custom operators, for models that transformers runs layer by layer.

Operators live in the process's registry of torch; the library that they call is the one
that the process has loaded. What an operator needs besides tensors comes as addresses
(`Team.handle`, `Workspace.handle`, `ctypes.addressof` of a matrix), which the caller keeps
alive.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.library import AttentionStruct, BatchStruct, KernelLibrary, MatrixStruct
from outrider.engine.cpu_kernels.matrices import ELEMENT_TYPES
from outrider.errors import InternalError

NAMESPACE = "outrider_cpu"
HEAD_DIM_STEP = 16
"""What attention wants the dimensions of a head to be a multiple of."""

_registry = torch.library.Library(NAMESPACE, "DEF")
_registry.define("linear(Tensor x, int matrix, int out_features, int team, int workspace) -> Tensor")
_registry.define("rms_norm(Tensor x, Tensor weight, float epsilon, int team) -> Tensor")
_registry.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int batch, float scaling, "
    "int sliding_window, float softcap, int team, int workspace) -> Tensor"
)


class _Operators:
    """The functions behind the operators."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self._functions = library.functions

    def linear(self, x: Tensor, matrix: int, out_features: int, team: int, workspace: int) -> Tensor:
        """X [..., in_features] float32 or bfloat16 → [..., out_features] of its dtype; `matrix` is a MatrixStruct."""
        struct = MatrixStruct.from_address(matrix)
        _check(x.shape[-1] == struct.in_features, f"{x.shape[-1]} columns for {struct.in_features}")
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], out_features))
        if y.numel():
            self._functions.outrider_linear(
                team, workspace, ELEMENT_TYPES[x.dtype], x.data_ptr(), x.numel() // x.shape[-1], struct,
                y.data_ptr(),
            )  # fmt: skip
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, team: int) -> Tensor:
        """X [..., width] float32 or bfloat16, weight [width] float32 → x's shape and dtype."""
        width = weight.numel()
        _check(x.shape[-1] == width and weight.dtype == torch.float32, f"{x.shape[-1]} columns for {width} of float32")
        x = x.contiguous()
        y = torch.empty_like(x)
        self._functions.outrider_rms_norm(
            team, ELEMENT_TYPES[x.dtype], x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon,
            y.data_ptr(),
        )  # fmt: skip
        return y

    def paged_attention(  # noqa: PLR0917 operators are called by position
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: int,
        scaling: float, sliding_window: int, softcap: float, team: int, workspace: int,
    ) -> Tensor:  # fmt: skip
        """Query [num_rows, num_heads, head_dim], caches [blocks, block_size, kv_heads, head_dim] → query's shape.

        `batch` is a BatchStruct; `sliding_window` and `softcap` are 0 for none.
        """
        num_heads, head_dim = query.shape[1:]
        _check(key_cache.dtype == value_cache.dtype == query.dtype, f"{query.dtype} for caches of {key_cache.dtype}")
        _check(key_cache.is_contiguous() and value_cache.is_contiguous(), "a cache that is not contiguous")
        query = query.contiguous()
        output = torch.empty_like(query)
        options = AttentionStruct(num_heads, key_cache.shape[2], head_dim, sliding_window, scaling, softcap)
        self._functions.outrider_paged_attention(
            team, workspace, ELEMENT_TYPES[query.dtype], options, BatchStruct.from_address(batch),
            query.data_ptr(), num_heads * head_dim, key_cache.data_ptr(), value_cache.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        return output


_registered: _Operators | None = None


def register_operators(library: KernelLibrary) -> Any:
    """The operators, `torch.ops.outrider_cpu`, over `library`. Raises InternalError for a second one in a process."""
    global _registered  # noqa: PLW0603 as wide as torch's own registry
    if _registered is None:
        operators = _Operators(library)
        for name in ("linear", "rms_norm", "paged_attention"):
            _registry.impl(name, getattr(operators, name), "CPU")
        _registered = operators
    if _registered.library.file != library.file:
        raise InternalError(f"{_registered.library.file} is loaded in this process already, not {library.file}")
    return getattr(torch.ops, NAMESPACE)


@torch.library.register_fake(f"{NAMESPACE}::linear", lib=_registry)
def _(x: Tensor, matrix: int, out_features: int, team: int, workspace: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake(f"{NAMESPACE}::rms_norm", lib=_registry)
def _(x: Tensor, weight: Tensor, epsilon: float, team: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake(f"{NAMESPACE}::paged_attention", lib=_registry)
def _(query: Tensor, *_arguments: Any) -> Tensor:
    return torch.empty_like(query)


def address_of(struct: ctypes.Structure) -> int:
    """What stands for a structure in an operator's arguments."""
    return ctypes.addressof(struct)


def _check(is_right: bool, message: str) -> None:  # noqa: FBT001
    if not is_right:
        raise InternalError(f"native kernels: {message}")
