"""Settings of the paged KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.config.settings import fixed, setting

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MAX_PERCENT = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Section `kv_cache`: the amount of KV that a node stores. The OS commits memory only as blocks are written."""

    memory: str = setting(
        "",
        help="Size of the KV pool, for example 4GiB, or a share of the memory. On a CPU the share is of the memory "
        "that is free at the start: by default 20 %, but at least two full context windows if that much is "
        "free. On a GPU it is of the whole memory, and covers weights and steps too: by default 92 %, which "
        "`outrider up` divides among the nodes of a GPU.",
    )
    prefix_cache: bool = setting(
        True, help="Whether full blocks of finished sequences are kept for prompts with the same beginning."
    )
    window_share: float = setting(
        0.4,
        help="Blocks of the layers with a sliding window, as a share of the blocks of the other layers. A sequence "
        "holds only the last window of the former, so with many long sequences less is enough. More keeps more "
        "prefixes of prompts.",
    )
    host_memory: str = setting(
        "0",
        help="Size of the main memory, for example 8GiB, to which a prefill or decode node moves evicted blocks of "
        "preempted sequences and of prefixes, if loading them is measured to be faster than computing them again. "
        "Not with model.expert_parallel_size. 0: none.",
    )
    num_blocks: int | None = fixed(None)  # overrides `memory`
    state_slots: int | None = fixed(None)  # of layers with linear attention; None: as their memory allows
    block_size: int = fixed(16)  # tokens; small, to waste few slots at a sequence's end and share short prefixes

    def __post_init__(self) -> None:
        _ = self.size
        if self.host_bytes and not self.prefix_cache:
            raise ValueError("host_memory needs prefix_cache, which finds the blocks in it: set prefix_cache to true")
        if not 0 < self.window_share <= 1:
            raise ValueError(f"window_share must be above 0 and at most 1, not {self.window_share}")

    @property
    def size(self) -> tuple[int | None, float | None]:
        """`memory` as (bytes, None) or (None, fraction), see KVMemory; (None, None) if unset. Raises: ValueError."""
        memory = self.memory.strip()
        if not memory:
            return None, None
        number, unit = _parse(memory) or (0.0, "")
        if number <= 0 or (unit == "%" and number > MAX_PERCENT):
            raise ValueError(
                f"memory {self.memory!r} is neither a size, such as 4GiB, nor a share of at most {MAX_PERCENT}%"
            )
        return (None, number / 100) if unit == "%" else (int(number * UNITS[unit]), None)

    @property
    def host_bytes(self) -> int:
        """`host_memory` in bytes. Raises: ValueError."""
        number, unit = _parse(self.host_memory.strip()) or (0.0, "%")
        if unit == "%":
            raise ValueError(f"host_memory {self.host_memory!r} is not a size, such as 8GiB")
        return int(number * UNITS[unit])


def _parse(text: str) -> tuple[float, str] | None:
    """Returns the number and the unit of a size or a share; None if the text is neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[KMG]iB|B|)", text)
    return (float(match[1]), match[2]) if match else None
