"""The call to a prefill node and its answer, as values (proto mirror: `prefill.proto`)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.request import RequestOptions
from outrider.session import Granted, OpenSequenceGroup

MAX_SCORED_ROWS = 32
"""Maximum number of rows per step whose logits are computed for prompt logprobs. For a whole chunk, the output layer
would take as long as all other layers, and other requests would wait for it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """A call to compute one prompt's KV and to push it into one reservation."""

    sequence_group_id: bytes  # 16 bytes
    transfer_id: bytes  # 16 bytes
    request_id: str  # for logs only
    token_ids: tuple[int, ...]  # the tokens to compute KV for, from position 0
    kv_address: str  # host:port of the decode node's KV ingest
    decode_incarnation: bytes
    held_prefix_length: int  # number of tokens from the start whose KV needs no push
    fingerprint: str
    options: RequestOptions
    may_read_held: bool = False  # whether the decode node's held KV may be read, because its numerics are equal
    scored_token_ids: tuple[int, ...] = ()  # the prompt's tokens without the first, if their logprobs are wanted
    traceparent: str = ""  # the call's span, sent in its metadata; empty: not traced

    @property
    def max_outstanding_tokens(self) -> int:
        """Number of tokens that other calls wait for: all, or one step's rows if prompt logprobs are wanted."""
        return MAX_SCORED_ROWS if self.scored_token_ids else len(self.token_ids)

    @classmethod
    def of_grant(
        cls,
        granted: Granted,
        opened: OpenSequenceGroup,
        *,
        decode_incarnation: bytes,
        fingerprint: str,
        may_read_held: bool,
        traceparent: str = "",
    ) -> PrefillCall:
        """Returns the call that fills a granted reservation."""
        token_ids = opened.known_token_ids(opened.samples[0])
        return cls(
            sequence_group_id=opened.sequence_group_id,
            transfer_id=granted.transfer_id,
            request_id=opened.request_id,
            token_ids=token_ids[: len(token_ids) - granted.num_tokens_to_compute],
            kv_address=granted.kv_address,
            decode_incarnation=decode_incarnation,
            held_prefix_length=granted.held_prefix_length,
            fingerprint=fingerprint,
            options=opened.options,
            may_read_held=may_read_held,
            scored_token_ids=opened.prompt_token_ids[1:] if opened.options.prompt_logprobs is not None else (),
            traceparent=traceparent,
        )


MAX_TIMED_PARTS = 128
"""Maximum number of chunks, and of groups of frames, whose times an answer lists individually."""


@dataclass(frozen=True, slots=True)
class TimedPart:
    """The time of one part of a call. A part is a forward pass over some tokens of the prompt, or the push of their KV
    for one group of layers, from the beginning of the first frame to the last acknowledgement.
    """

    start_seconds: float  # both times count from the call's arrival at the node
    end_seconds: float
    amount: int  # tokens, or bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigures:
    """The statistics of one prefill, for metrics only, and the requested logprobs."""

    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_read_tokens: int = 0
    num_blended_tokens: int = 0  # of a blended prompt: those whose KV is that of a piece
    num_recomputed_tokens: int = 0  # and those of its pieces that were computed all the same
    compute_seconds: float = 0.0
    connector: str = ""
    kv_bytes: int = 0
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0
    prompt_logprobs: bytes = b""  # logprobs of scored_token_ids, packed by `outrider.wire.answer.pack_logprobs`
    call_seconds: float = 0.0  # seconds from the call's arrival at the node to its answer
    chunks: tuple[TimedPart, ...] = ()  # forward passes, in order; like `pushed`, at most MAX_TIMED_PARTS parts
    pushed: tuple[TimedPart, ...] = ()
