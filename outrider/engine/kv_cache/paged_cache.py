"""The tensors behind the block pool: keys and values of every layer, in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.base import AttentionKernels
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.copy_stream import CopyStream, Fence
from outrider.engine.kv_cache.planes import PlaneSpec, find_plane
from outrider.engine.memory import free_main_memory_bytes
from outrider.engine.model_spec import ModelSpec
from outrider.engine.transfer import upload_ids
from outrider.errors import ConfigError, InternalError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEFAULT_FRACTIONS = {"cpu": 0.2, "cuda": 0.9}
"""Of free memory, by type of device: main memory has other users; on a GPU a tenth is left for allocations of steps."""


class PagedKVCache:
    """Keys and values of all layers, addressed by slot = block_id * block_size + offset.

    Only the memory: the BlockPool says which block belongs to whom. It is allocated at once but committed by the
    system as blocks are first written.

    Thread-safe as far as its blocks are: threads may read, write and run forwards at the
    same time as long as no block that one of them writes is used by another.
    """

    def __init__(
        self,
        planes: Sequence[PlaneSpec],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        num_scratch_blocks: int = 0,
        kernels: AttentionKernels | None = None,
    ) -> None:
        """`num_scratch_blocks`: behind the others, for rows that pad a batch.

        `kernels`: that will attend over it, on a CPU: keys and values lie as they want them. None: torch or a GPU will.
        """
        self.planes = tuple(planes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self._copies = CopyStream(self.device) if self.device.type == "cuda" else None
        self.scratch_blocks = range(num_blocks, num_blocks + num_scratch_blocks)
        # One tensor a plane, so that a frame of several layers is one copy: [layers, blocks, block_size, heads, dim].
        self._tensors = {
            plane.name: _lazy_zeros(
                (plane.num_layers, self.scratch_blocks.stop, block_size, plane.num_heads, plane.head_dim),
                TORCH_DTYPES[plane.dtype],
                self.device,
            )
            for plane in planes
            if kernels is None or plane.is_feature
        }
        self._packed = {
            plane.name: kernels.make_plane(plane, self.scratch_blocks.stop * block_size)
            for plane in planes
            if kernels is not None and not plane.is_feature
        }
        self.keys, self.values = (self._of_attention(name) for name in ("k", "v"))

    @classmethod
    def sized_for(
        cls,
        spec: ModelSpec,
        config: KVCacheConfig,
        *,
        device: torch.device | str = "cpu",
        reserved_bytes: int = 0,
        kernels: AttentionKernels | None = None,
    ) -> PagedKVCache:
        """As many blocks as `config` and free memory allow. Raises ConfigError when that is too few.

        `reserved_bytes`: of free memory, for steps. `kernels`: as of a new one.
        """
        num_blocks = cls.num_blocks_for(
            spec,
            config,
            free_bytes=max(free_memory_bytes(torch.device(device)) - reserved_bytes, 0),
            default_fraction=DEFAULT_FRACTIONS[torch.device(device).type],
        )
        return cls(
            spec.planes,
            num_blocks=num_blocks,
            block_size=config.block_size,
            device=device,
            num_scratch_blocks=0 if torch.device(device).type == "cpu" else 1,  # for rows that pad (`step_graphs`)
            kernels=kernels,
        )

    @staticmethod
    def num_blocks_for(
        spec: ModelSpec, config: KVCacheConfig, *, free_bytes: int, default_fraction: float = 0.2
    ) -> int:
        """Blocks in a pool of `config`, with `free_bytes` of free memory.

        An explicit size must hold one full window, else a request that the model allows could never run. The automatic
        size is at least two full windows. Raises ConfigError naming the setting and the fix.
        """
        block_size = config.block_size
        block_bytes = spec.bytes_per_token * block_size
        window_blocks = -(-spec.max_model_len // block_size)
        if config.num_blocks is not None:
            num_blocks, source = config.num_blocks, "num_blocks"
        elif config.memory_bytes is not None:
            num_blocks, source = config.memory_bytes // block_bytes, "memory"
        else:
            fraction = config.memory_fraction or default_fraction
            num_blocks = max(int(free_bytes * fraction) // block_bytes, 2 * window_blocks)
            source = "memory"
            if num_blocks * block_bytes > free_bytes:
                raise ConfigError(
                    f"two windows of {spec.max_model_len} tokens need {2 * window_blocks * block_bytes:,} bytes of KV "
                    f"and {free_bytes:,} are free: set model.max_model_len lower or give more memory"
                )
        if num_blocks < window_blocks:
            raise ConfigError(
                f"kv_cache.{source} gives {num_blocks} blocks of {block_size} tokens, but one window of "
                f"{spec.max_model_len} needs {window_blocks}: set it higher or model.max_model_len lower"
            )
        return num_blocks

    def layers(self, plane: str) -> tuple[Tensor, ...]:
        """What a plane keeps in each layer: [num_blocks, block_size, heads, dim]; not of a packed plane."""
        return self._tensors[plane].unbind(0)

    def _of_attention(self, plane: str) -> Any:
        """What attention reads of each layer: as `layers`, or as the kernels want it."""
        return self._packed[plane].layers if plane in self._packed else self.layers(plane)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) each, in all layers and planes.

        All sources are read before any destination is written, so a block may be both.
        """
        if not pairs:
            return
        for plane in self._packed.values():
            plane.copy_blocks(pairs, self.block_size)
        sources = upload_ids([source for source, _ in pairs], self.device)
        destinations = upload_ids([destination for _, destination in pairs], self.device)
        for tensor in self._tensors.values():
            if self.device.type == "cuda":  # in two launches
                tensor.index_copy_(1, destinations, tensor.index_select(1, sources))
                continue
            for layer in tensor.unbind(0):
                layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies single slots, (source, destination) each, in all layers and planes; sources are read first."""
        if not pairs:
            return
        for plane in self._packed.values():
            plane.move_slots(pairs)
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        for tensor in self._tensors.values():
            rows = tensor.flatten(1, 2).flatten(2)  # [layers, slots, heads * dim]
            if self.device.type == "cpu":  # numpy, as in `read`
                data: np.ndarray = rows.view(torch.uint8).numpy()
                data[:, destinations] = data[:, sources]
            else:
                moved = rows.index_select(1, upload_ids(sources, self.device))
                rows.index_copy_(1, upload_ids(destinations, self.device), moved)

    def fence(self) -> Fence | None:
        """Marks the work that is queued by now, for `read` and `write`; None on a CPU, which has done it."""
        return None if self._copies is None else self._copies.fence()

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        """The ranges of heads in which `read` is cheapest: here all are in one place."""
        return (range(find_plane(self.planes, plane).num_heads),)

    def read(
        self, plane: str, layers: range, slots: Tensor, after: Fence | None = None, *, heads: range | None = None
    ) -> np.ndarray:
        """KV of `slots` ([num_tokens] int64) in `layers`, as bytes; on a GPU as of `after`, or of now.

        `heads`: some of them; by default all. Returns [len(layers) * num_tokens * heads * dim * itemsize]
        uint8, contiguous, layer by layer, token-major. Raises InternalError outside the cache.
        """
        heads = self._checked(plane, layers, slots, heads)
        if plane in self._packed:
            return self._packed[plane].read(layers, slots.numpy(), heads)
        rows = self._rows(plane, layers, heads)
        if self._copies is None:
            # numpy: torch would start a pool of threads for the caller's (see `EngineThread`).
            data: np.ndarray = rows.view(torch.uint8).numpy()  # [layers, slots, heads * dim * itemsize]
            if not data.flags.c_contiguous:
                return data[:, slots.numpy()].reshape(-1)  # `take` would copy these heads of the whole cache first
            return np.take(data, slots.numpy(), axis=1).reshape(-1)
        taken = self._copies.gather(rows, slots, after or self._copies.fence())
        array: np.ndarray = taken.view(torch.uint8).reshape(-1).numpy()
        return array

    def write(
        self,
        plane: str,
        layers: range,
        slots: Tensor,
        payload: bytes | bytearray | memoryview,
        after: Fence | None = None,
        *,
        heads: range | None = None,
    ) -> None:
        """Writes what `read` gave, on a GPU behind the work that `after` marks: of that some may use the slots still.

        Without `after`: behind all work that is queued by now, which a busy node may take a step to do. Raises
        InternalError, nothing written, when a range or the size does not fit.
        """
        heads = self._checked(plane, layers, slots, heads)
        expected = len(layers) * slots.numel() * len(heads) * find_plane(self.planes, plane).bytes_per_head
        view = memoryview(payload).cast("B")
        if view.nbytes != expected:
            raise InternalError(f"{view.nbytes} bytes for {expected} of plane {plane}, layers {layers}")
        if expected == 0:
            return
        array = np.frombuffer(view, dtype=np.uint8)
        if plane in self._packed:
            self._packed[plane].write(layers, slots.numpy(), heads, array)
            return
        rows = self._rows(plane, layers, heads)
        if self._copies is not None:
            self._copies.scatter(rows, slots, array, after or self._copies.fence())
            return
        data: np.ndarray = rows.view(torch.uint8).numpy()
        data[:, slots.numpy()] = array.reshape(len(layers), slots.numel(), -1)

    def _checked(self, plane: str, layers: range, slots: Tensor, heads: range | None) -> range:
        """The heads, after all bounds have been checked."""
        spec = find_plane(self.planes, plane)
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= spec.num_layers:
            raise InternalError(f"layers {layers} of {spec.num_layers}")
        ids = slots.numpy()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_blocks * self.block_size:
            raise InternalError(f"slots outside {self.num_blocks} blocks of {self.block_size}")
        return spec.checked_heads(heads)

    def _rows(self, plane: str, layers: range, heads: range) -> Tensor:
        """The plane as [layers, slots, heads * dim]."""
        rows = self._tensors[plane][layers.start : layers.stop].flatten(1, 2)  # [layers, slots, heads, dim]
        return rows.flatten(2)[:, :, heads.start * rows.shape[3] : heads.stop * rows.shape[3]]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, whose pages take no memory before they are written (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated: of the GPU, or of this machine within the process's limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_main_memory_bytes()
