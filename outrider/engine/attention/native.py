"""Paged attention by the native CPU kernel: the same bits for a row whatever is in the batch."""

from __future__ import annotations

from torch import Tensor

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.decoder import batch_struct
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import BatchStruct, Workspace
from outrider.engine.cpu_kernels.operators import address_of, register_operators
from outrider.engine.input_batch import InputBatch


class _Plan:
    """One forward's batch, in the form that the kernel reads."""

    def __init__(self, batch: InputBatch) -> None:
        self.batch = batch  # owns the memory
        self.struct: BatchStruct = batch_struct(batch)
        self.address = address_of(self.struct)


class NativeAttention:
    """Keys and values are read where they lie, once for all rows of a sequence and the heads that share them."""

    name = "native"
    can_be_captured = False

    def __init__(self, kernels: CpuKernels) -> None:
        self._team = kernels.team
        self._operators = register_operators(kernels.library)
        self._workspace = Workspace(kernels.library)

    def prepare(self, batch: InputBatch) -> _Plan:
        return _Plan(batch)

    def attend(
        self,
        plan: _Plan,
        query: Tensor,  # [num_rows, num_heads, head_dim], float32 or bfloat16, head_dim a multiple of 16
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # same
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        output: Tensor = self._operators.paged_attention(
            query, key_cache, value_cache, plan.address,
            options.scaling, options.sliding_window or 0, options.softcap or 0.0,
            self._team.handle, self._workspace.handle,
        )  # fmt: skip
        return output
