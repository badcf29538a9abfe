"""What a router asks of a prefill node, and what it hears of the work, as values (proto mirror: `prefill.proto`)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.request import RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """One prompt's KV, to be computed and pushed into one reservation."""

    sequence_group_id: bytes  # 16 bytes
    transfer_id: bytes  # 16 bytes
    request_id: str  # for logs only
    token_ids: tuple[int, ...]  # whose KV is wanted, from position 0
    kv_address: str  # host:port of the decode node's KV ingest
    decode_incarnation: bytes
    held_prefix_length: int  # tokens from the start that need no push
    fingerprint: str
    options: RequestOptions
    may_read_held: bool = False  # the KV that the decode node holds may be read: its numerics are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigures:
    """What one prefill took; for metrics only."""

    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_read_tokens: int = 0
    compute_seconds: float = 0.0
    connector: str = ""
    kv_bytes: int = 0
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0
