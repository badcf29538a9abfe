"""The messages between router and decode node about a sequence group, as plain Python values.

A sequence group is one request in one attempt: a prompt and its n samples. The proto mirror is `session.proto`;
`outrider.wire.session` converts.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.request import FinishReason, RequestOptions, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleStart:
    """One sample to compute, and its tokens from before this attempt."""

    sample: int
    generated_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequenceGroup:
    """Router → decode node: reserve room and compute these samples, each from its current end."""

    sequence_group_id: bytes  # 16 random bytes
    transfer_id: bytes  # 16 random bytes; empty: no prefill node is available, and the node computes the prompt
    request_id: str  # for logs only
    prompt_token_ids: tuple[int, ...]
    options: RequestOptions
    samples: tuple[SampleStart, ...]  # at least one, ordered by sample index; each index is below sampling.n
    traceparent: str = ""  # the attempt's span, replaced by the group's span in the decode node; empty: not traced

    def known_token_ids(self, start: SampleStart) -> tuple[int, ...]:
        """Returns the prompt, then the sample's tokens from before this attempt."""
        return self.prompt_token_ids + start.generated_token_ids

    def shared_token_ids(self) -> tuple[int, ...]:
        """Returns the tokens that all samples begin with, for which KV is reserved and transferred.

        The last known token of the shortest sample is not among them, since that sample's first step computes it.
        So a single sample shares all tokens but its last one. Each sample computes the rest of its own tokens.
        """
        starts = [start.generated_token_ids for start in self.samples]
        shortest = min(starts, key=len)
        num_common = next(
            (place for place, tokens in enumerate(zip(*starts, strict=False)) if len(set(tokens)) > 1), len(shortest)
        )
        num_shared = len(self.prompt_token_ids) + min(num_common, len(shortest) - 1)
        return (self.prompt_token_ids + shortest)[:num_shared]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetargetSequenceGroup:
    """Router → decode node: try again to fill the reservation.

    The answer is a new Granted. The message is ignored if the group does not wait for KV.
    """

    sequence_group_id: bytes
    transfer_id: bytes  # 16 random bytes; empty: the node computes what is missing
    keeps_received: bool = False  # whether completely received tokens are kept, as the next node has equal numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSequenceGroup:
    """Router → decode node: stop these samples, or all if `samples` is empty. No event follows."""

    sequence_group_id: bytes
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer to an Open or a Retarget.

    The KV to transfer is that of the shared tokens, i.e. of the first sample's known tokens without the last
    `num_tokens_to_compute`.
    """

    sequence_group_id: bytes
    transfer_id: bytes
    kv_address: str  # empty: nothing to transfer, and no KvReady follows
    held_prefix_length: int
    num_tokens_to_compute: int


class RejectReason(enum.Enum):
    NO_ROOM = 1
    DRAINING = 2
    TOO_LARGE = 3
    INVALID = 4
    NO_ADAPTER = 5


NO_ROOM_RETRY_SECONDS = 5.0
"""Seconds after which a router that was rejected for lack of room asks again even if no report shows room. A second
later the node stops counting it as waiting (see `Rejected`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The refusal of an Open; the node keeps nothing.

    A router does not poll a node without room (NO_ROOM) with whole prompts. It opens this group again on
    this node, or another group that is not smaller, when `wait_seconds` have passed and a later report of the node
    shows room:

        load.kv_blocks_free >= kv_blocks_needed and load.num_sequences_free >= num_sequences_needed

    or after `NO_ROOM_RETRY_SECONDS`. The figures describe the moment of the rejection: less is needed when other
    sequences end. Until the router is admitted (or `NO_ROOM_RETRY_SECONDS` and one more second have passed) the node
    counts it as waiting, and refuses routers that hold more than their share.
    """

    sequence_group_id: bytes
    reason: RejectReason
    message: str
    kv_blocks_needed: int = 0  # NO_ROOM: number of free blocks with which the group would have been admitted
    num_sequences_needed: int = 0  # NO_ROOM: number of the group's samples
    wait_seconds: float = 0.0  # NO_ROOM: minimum wait, because another router waits for room


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    sequence_group_id: bytes
    transfer_id: bytes
    connector: str
    kv_bytes: int
    transfer_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFailed:
    """The failure of a transfer. The reservation waits for a Retarget or a Cancel until a timeout."""

    sequence_group_id: bytes
    transfer_id: bytes
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """Counts that can be added. `acceptance_histogram[i]`: number of verifications with i accepted draft tokens."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_wanting_steps: int = 0
    num_hit_steps: int = 0

    @classmethod
    def total(cls, parts: Sequence[SpeculationCounts]) -> SpeculationCounts:
        """Returns the sum. Most of a step's parts are the same few objects, so each is added once, times its count."""
        values = {id(part): part for part in parts}
        times = [(values[key], number) for key, number in Counter(map(id, parts)).items()]
        histogram = [0] * max((len(part.acceptance_histogram) for part, _ in times), default=0)
        for part, number in times:
            for num_accepted, count in enumerate(part.acceptance_histogram):
                histogram[num_accepted] += count * number
        return cls(
            num_spec_steps=sum([part.num_spec_steps * number for part, number in times]),
            num_draft_tokens=sum([part.num_draft_tokens * number for part, number in times]),
            num_accepted_draft_tokens=sum([part.num_accepted_draft_tokens * number for part, number in times]),
            acceptance_histogram=tuple(histogram),
            num_wanting_steps=sum([part.num_wanting_steps * number for part, number in times]),
            num_hit_steps=sum([part.num_hit_steps * number for part, number in times]),
        )


NO_SPECULATION = SpeculationCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """The next part of the prompt's logprobs, if the node computes them. All parts precede the first SampleTokens."""

    sequence_group_id: bytes
    packed: bytes  # packed by `outrider.wire.answer.pack_logprobs`


class SampleTokens(NamedTuple):
    """Newly committed tokens of one sample."""

    sequence_group_id: bytes
    sample: int
    start_position: int  # absolute position of token_ids[0]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    speculation: SpeculationCounts = NO_SPECULATION
    rejected_draft_token_ids: tuple[int, ...] = ()  # in the order of their rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDone:
    """The end of a sample, after its last SampleTokens."""

    sequence_group_id: bytes
    sample: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroupFailed:
    """The end of a group that has failed. The node has freed it. `code` is a google.rpc.Code."""

    sequence_group_id: bytes
    code: int
    message: str


SequenceGroupCommand = OpenSequenceGroup | RetargetSequenceGroup | CancelSequenceGroup
SequenceGroupEvent = (
    Granted | Rejected | KvReady | KvFailed | PromptLogprobs | SampleTokens | SampleDone | SequenceGroupFailed
)
