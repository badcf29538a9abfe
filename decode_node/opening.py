"""The block tables with which sequence groups and their samples begin."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.groups import SequenceGroup
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.session import OpenSequenceGroup


def cached_table(
    pool: BlockPool,
    opened: OpenSequenceGroup,
    shared_token_ids: Sequence[int],
    *,
    windows_arrive: bool = False,
    may_load: bool = False,
) -> SequenceKV:
    """Returns a block table that holds the cached part of the tokens with which all samples begin.

    It is empty if prompt logprobs are requested, since the prompt must be computed for them. `windows_arrive`: see
    SequenceKV.create; there must be a token that arrives. `may_load`: whether there is room, so that blocks are loaded
    from main memory, too.
    """
    max_cached_tokens = len(shared_token_ids) - windows_arrive if opened.options.prompt_logprobs is None else 0
    return SequenceKV.create(
        pool,
        shared_token_ids,
        max_cached_tokens=max_cached_tokens,
        cache_salt=opened.options.kv_salt,
        windows_arrive=windows_arrive,
        kept_back=0 if may_load else None,
    )


def opening_table(
    pool: BlockPool,
    opened: OpenSequenceGroup,
    shared_token_ids: Sequence[int],
    max_local_prefill_tokens: int,
    *,
    may_load: bool = False,
) -> tuple[SequenceKV, int]:
    """Returns the `cached_table` of a new group, and how many of its tokens a transfer makes valid.

    These are all shared tokens, or none (0) if there is no transfer or this node computes the missing tokens itself.
    The windows of layers that have one are transferred, too. `may_load`: see `cached_table`.
    """
    kv = cached_table(pool, opened, shared_token_ids, may_load=may_load)
    num_shared = len(shared_token_ids)
    if not opened.transfer_id or num_shared - kv.num_tokens <= max_local_prefill_tokens:
        return kv, 0
    if kv.windows:
        kv.free()
        kv = cached_table(pool, opened, shared_token_ids, windows_arrive=True, may_load=may_load)
    return kv, num_shared


def forked_table(pool: BlockPool, leader: SequenceKV, group: SequenceGroup) -> SequenceKV:
    """Returns a table with the group's shared tokens, from the leading sample's table or from the cache."""
    table = leader.fork()
    table.truncate(min(table.num_tokens, len(group.shared_token_ids)))
    if table.windows and not table.num_tokens:  # the leader has no longer what rows after the shared tokens see
        table.free()
        table = cached_table(pool, group.opened, group.shared_token_ids)
    return table
