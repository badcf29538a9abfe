"""The part of a device's memory that a node's KV may take, and the main memory that is free for this process."""

from __future__ import annotations

import contextlib
import math
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from outrider.engine.control_groups import GROUPS, MEMBERSHIP, control_groups
from outrider.engine.device import device_type
from outrider.engine.kv_cache.block_pool import max_held_blocks
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.model_spec import ModelSpec
from outrider.errors import ConfigError

CPU_SHARE, GPU_SHARE = 0.2, 0.92
"""Default shares of memory for KV. The share of main memory is small, because other programs use it too. On a GPU, as
in vLLM, a part is left for uses that are not measured, such as samplers, heads and fragmentation."""
DEFAULT_WINDOWS = 2
"""Number of full windows for which KV may exceed its share if that much main memory is free. With two, the longest
request leaves room for others."""
CONTEXT_BYTES = 600 << 20
"""Estimated bytes that a GPU's driver takes for a process (context, code, library workspaces)."""
MIN_STATE_SLOTS = 8
"""Minimum number of recurrent states: those of two sequences, and some for later prompts."""
WINDOW_STEP = 1024
"""A window that is limited by memory is a multiple of this number of tokens, so that it stays the same after a restart
with slightly more or less free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """The part of a device's memory that KV may take."""

    free_bytes: int  # memory that nobody uses and this process's steps do not need
    whole_bytes: int  # memory of which KV gets a share: the free main memory, or all memory of a GPU
    own_bytes: int = 0  # the part of that share that the process needs for weights, steps and the driver
    default_share: float = CPU_SHARE
    num_windows: int = DEFAULT_WINDOWS  # windows for which KV may exceed its share; 0 if others rely on their shares

    @classmethod
    def of(cls, device: str, reserved_bytes: int = 0) -> KVMemory:
        """Measures the memory now. `reserved_bytes`: memory that this process will need for other uses than KV.

        On a GPU, this process's own memory counts against its share, whatever other processes take or free.
        """
        if device_type(device) == "cpu":
            free = max(free_main_memory_bytes() - reserved_bytes, 0)
            return cls(free_bytes=free, whole_bytes=free)
        import torch

        free, whole = torch.cuda.mem_get_info(device)
        return cls(
            free_bytes=max(free - reserved_bytes, 0),
            whole_bytes=whole,
            own_bytes=torch.cuda.memory_reserved(device) + CONTEXT_BYTES + reserved_bytes,
            default_share=GPU_SHARE,
            num_windows=0,
        )

    def share(self, fraction: float | None) -> int:
        """Returns the bytes for KV in this share of the memory, or in the default share if `fraction` is None."""
        part = int(self.whole_bytes * (fraction or self.default_share)) - self.own_bytes
        return max(min(part, self.free_bytes), 0)


class PoolSize(NamedTuple):
    """The size of a KV pool."""

    num_blocks: int
    max_model_len: int  # maximum number of tokens in a sequence
    window_blocks: tuple[int, ...] | None = None  # see PagedKVCache
    state_slots: int = 0  # same


class _BlockCosts:
    """The memory of a pool by its number of blocks. Layers with a sliding window have fewer blocks than the others.

    Layers with linear attention have, for their rows and for their states, as many bytes each as the layers without a
    window, but at least enough for two sequences.
    """

    def __init__(self, spec: ModelSpec, config: KVCacheConfig, max_step_tokens: int | None) -> None:
        size, groups = config.block_size, spec.layer_groups[1:]
        of_window = {0: 0, **dict.fromkeys((group.window for group in groups), 0)}
        self._state_bytes = 0
        for plane in spec.planes:
            if plane.is_state:
                self._state_bytes = plane.bytes_per_token
            else:
                of_window[plane.window] += plane.bytes_per_token * size
        self._full_bytes, *self._window_bytes = of_window.values()
        shares = [
            min(config.window_share, self._full_bytes / num_bytes) if group.has_states else config.window_share
            for group, num_bytes in zip(groups, self._window_bytes, strict=True)
        ]
        self._shares = shares if max_step_tokens is not None else [1.0] * len(groups)
        self._min_blocks = [2 * max_held_blocks(group.window, max_step_tokens or 0, size) for group in groups]
        self._state_slots = config.state_slots

    def window_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the number of blocks of each window: its share, but at least enough for two sequences."""
        wanted = zip(self._shares, self._min_blocks, strict=True)
        return tuple(min(num_blocks, max(math.ceil(num_blocks * share), least)) for share, least in wanted)

    def state_slots(self, num_blocks: int) -> int:
        """Returns the number of recurrent states, each of all layers with linear attention."""
        if not self._state_bytes:
            return 0
        return self._state_slots or max(num_blocks * self._full_bytes // self._state_bytes, MIN_STATE_SLOTS)

    def num_bytes(self, num_blocks: int) -> int:
        windows = zip(self.window_blocks(num_blocks), self._window_bytes, strict=True)
        of_states = self.state_slots(num_blocks) * self._state_bytes
        return num_blocks * self._full_bytes + sum(num * of_block for num, of_block in windows) + of_states

    def num_blocks(self, num_bytes: int) -> int:
        """Returns the largest number of blocks that `num_bytes` hold."""
        of_windows = sum(share * each for share, each in zip(self._shares, self._window_bytes, strict=True))
        upper = int(num_bytes / (self._full_bytes + of_windows)) + 2
        return max(bisect_right(range(upper), num_bytes, key=self.num_bytes) - 1, 0)


def pool_size(
    spec: ModelSpec,
    config: KVCacheConfig,
    room: KVMemory,
    *,
    may_shorten: bool = False,
    max_step_tokens: int | None = None,
) -> PoolSize:
    """Returns the size of a pool of `config`, with the maximum number of tokens in a sequence.

    `max_step_tokens`: maximum number of a sequence's tokens in a step, if sequences have a block table for each sliding
    window; None: they have one table, so that all layers have the same number of blocks.

    The maximum is normally the model's window. The pool must hold at least one window, so that the longest request can
    run. If less fits and `may_shorten` is set, the maximum is the largest multiple of WINDOW_STEP that fits, which is
    reported on standard error.

    Raises: ConfigError, which names the setting and the fix, if the window does not fit and may not be shortened.
    """
    costs = _BlockCosts(spec, config, max_step_tokens)
    is_split = max_step_tokens is not None and len(spec.layer_groups) > 1
    window_blocks = -(-spec.max_model_len // config.block_size)
    num_blocks, (num_bytes, fraction) = config.num_blocks, config.size
    if num_bytes is None:
        windows_bytes = min(costs.num_bytes(room.num_windows * window_blocks), room.free_bytes)
        num_bytes = max(room.share(fraction), windows_bytes)
    if num_blocks is None:
        num_blocks = costs.num_blocks(num_bytes)
    of_windows = costs.window_blocks(num_blocks) if is_split else None
    state_slots = costs.state_slots(num_blocks)
    if num_blocks >= window_blocks:
        return PoolSize(num_blocks, spec.max_model_len, of_windows, state_slots)
    held = num_blocks * config.block_size
    if may_shorten and held >= WINDOW_STEP:
        window = held // WINDOW_STEP * WINDOW_STEP
        sys.stderr.write(
            f"not enough memory for the model's window of {spec.max_model_len} tokens: "
            f"sequences have at most {window}. Set model.max_model_len, or give more memory (kv_cache.memory)\n"
        )
        return PoolSize(num_blocks, window, of_windows, state_slots)
    is_memory = config.num_blocks is None
    source, given = ("memory", num_bytes) if is_memory else ("num_blocks", costs.num_bytes(num_blocks))
    others = f" after {room.own_bytes:,} for weights and steps" if room.own_bytes else ""
    shorter = f", or model.max_model_len to {held} or lower" if held else ""
    raise ConfigError(
        f"one window of {spec.max_model_len} tokens needs {costs.num_bytes(window_blocks):,} bytes of KV, and "
        f"kv_cache.{source} gives {given:,}{others}: set it higher{shorter}"
    )


def free_main_memory_bytes(
    *, groups: Path = GROUPS, membership: Path = MEMBERSHIP, mapped_bytes: int | None = None
) -> int:
    """Returns the machine's available memory, or less if a control group of this process has less left below its limit.

    The OS counts all file pages as reclaimable. Those that this process maps, above all its weights, are read in
    every step, so they do not count as free here. `mapped_bytes`: the resident size of the mapped pages; by
    default as the OS reports.
    """
    mapped = int(psutil.Process().memory_info().shared) if mapped_bytes is None else mapped_bytes
    available: int = psutil.virtual_memory().available - mapped
    return max(0, min([available, *_left_in_groups(groups, membership, mapped)]))


def _left_in_groups(groups: Path, membership: Path, mapped: int) -> Iterator[int]:
    """Yields the bytes left below the limit of each group that has one."""
    for version, folder in control_groups("memory", groups=groups, membership=membership):
        limit, usage, prefix = (
            ("memory.max", "memory.current", "")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or the limit is "max"
            bound = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            inactive, active = (int(rows[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
            # Page cache is reclaimed when memory is needed, except the pages that this process maps.
            yield bound - used + min(inactive, max(0, inactive + active - mapped))
