"""Paged attention with the native CPU kernel. The bits of a row's output do not depend on the batch."""

from __future__ import annotations

from ctypes import Structure

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.cpu_kernels.decoder import batch_struct
from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.operators import paged_attention, write_rows
from outrider.engine.input_batch import InputBatch

Panels = npt.NDArray[np.uint8]
"""Keys or values of a layer, [panels, num_kv_heads, 16 * head_dim * itemsize] (see PanelPlane)."""


def attention_struct(query: Tensor, key_cache: Panels, options: AttentionOptions) -> Structure:
    """Makes an OutriderAttention from `options`, which own the sinks, and from the shapes of `attend`'s inputs."""
    window, softcap = options.sliding_window or 0, options.softcap or 0.0
    sinks = None if options.sinks is None else options.sinks.data_ptr()
    return structures.OutriderAttention(
        query.shape[1],
        key_cache.shape[1],
        query.shape[2],
        options.latent_dim,
        window,
        options.scaling,
        softcap,
        sinks,
    )


class NativeAttention(AttentionBackend):
    """A backend that reads keys and values in place, once for all rows of a sequence and all heads that share them."""

    name = "native"

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self._workspace = Workspace(kernels.library)

    def prepare(self, batch: InputBatch, group: int = 0) -> tuple[Structure, InputBatch]:
        """Returns the batch in the kernel's format, and the batch itself, which owns the memory."""
        struct, arrays = batch_struct(batch), batch.arrays
        struct.slots += group * batch.num_rows * arrays.slot_mapping.itemsize
        struct.block_tables += group * batch.num_table_blocks * arrays.block_tables.itemsize
        if batch.has_trees:
            struct.path_slots += group * arrays.path_starts[-1] * arrays.path_slots.itemsize
        return struct, batch

    def store(self, keys: Tensor, values: Tensor, key_cache: Panels, value_cache: Panels, slots: Tensor) -> None:
        """Writes rows [num_rows, num_kv_heads, head_dim] to slots [num_rows] int64 of a layer's panels."""
        write_rows(self.kernels, keys, key_cache, slots, are_values=False)
        write_rows(self.kernels, values, value_cache, slots, are_values=True)

    def attend(
        self,
        plan: tuple[Structure, InputBatch],
        query: Tensor,  # [num_rows, num_heads, head_dim], float32 or bfloat16, head_dim a multiple of 16
        key_cache: Panels,
        value_cache: Panels,
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim], or latent_dim instead of head_dim."""
        query = query.contiguous()
        width = options.latent_dim
        output = query.new_empty((*query.shape[:2], width)) if width else torch.empty_like(query)
        struct = attention_struct(query, key_cache, options)
        paged_attention(self.kernels, self._workspace, plan[0], struct, query, key_cache, value_cache, output)
        return output
