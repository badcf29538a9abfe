"""Settings of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How much KV a node keeps. Memory is committed by the system only as blocks are first written."""

    block_size: int | None = setting(
        None, at_least=1, at_most=256, help="Tokens in a block; by default 16, or 256 where flash-attn computes."
    )
    num_blocks: int | None = setting(None, at_least=1, help="Blocks in the pool; overrides memory_bytes.")
    memory_bytes: int | None = setting(None, at_least=1, help="Size of the pool; overrides memory_fraction.")
    memory_fraction: float | None = setting(
        None,
        above=0.0,
        at_most=0.95,
        help="Share of the memory that is free at start, by default 0.2, of a GPU's 0.9; never below two full windows.",
    )
    prefix_cache: bool = setting(True, help="Keep full blocks of finished sequences for prompts that begin alike.")
