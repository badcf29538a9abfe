"""The events of one answer, as values with the names and the order of the public API.

One Started comes first, then for each sample its Deltas and one Finished (samples interleaved), then one Summary. The
router makes the events and the client gets them. `router.proto` mirrors them; `outrider.wire.answer` converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The admission of the request."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    router: str  # the address to send Abort to
    adapter_fingerprint: str = ""  # empty: the model itself answers
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Delta(NamedTuple):
    """What one sample has generated since the client's last Delta. A Delta is made for nearly every token, so it is a
    tuple, which is the fastest to create.
    """

    sample: int
    start_position: int  # position of token_ids[0], or of the next token if token_ids is empty
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    sample: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_blended_tokens: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferMetrics:
    connector: str = ""  # empty: nothing was transferred
    bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationMetrics:
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    draft_acceptance_rate: float = 0.0
    mean_acceptance_length: float = 0.0  # 0 if nothing was drafted
    acceptance_histogram: tuple[int, ...] = ()
    look_ahead_hit_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    queue_seconds: float = 0.0
    ttft_seconds: float = 0.0
    e2e_seconds: float = 0.0
    prefill_seconds: float = 0.0
    kv_transfer: KvTransferMetrics = field(default_factory=KvTransferMetrics)
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    attempts: int = 1
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    request_id: str
    usage: Usage
    metrics: RequestMetrics


AnswerEvent = Started | Delta | Finished | Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole sample."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteResult:
    """A whole answer."""

    request_id: str
    started: Started
    completions: tuple[Completion, ...]  # by sample
    summary: Summary

    @property
    def text(self) -> str:
        """The text of sample 0."""
        return self.completions[0].text
