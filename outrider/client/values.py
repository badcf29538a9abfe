"""What a router answers, as frozen values (proto mirror: router.proto, where each field is explained)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.answer import Finished, RequestMetrics, Usage
from outrider.node import NodeLoad, NodeRole, NodeState
from outrider.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # "system", "user", "assistant", or another that the model's template knows
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was admitted."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    router: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    request_id: str
    usage: Usage
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole sample."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteResult:
    request_id: str
    started: Started
    completions: tuple[Completion, ...]  # by sample
    summary: Summary

    @property
    def text(self) -> str:
        """Of sample 0."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model, and what speculation is in force."""

    name: str
    revision: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    proposer: str
    num_speculative_tokens: int
    verification_method: str  # "coupled"
    fingerprint: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    name: str
    role: NodeRole | None  # None: one that this client does not know
    state: NodeState | None
    target: str
    step: int
    load: NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    nodes: tuple[NodeStatus, ...]
    num_requests_running: int
    num_requests_waiting: int

    def by_role(self) -> Mapping[NodeRole, tuple[NodeStatus, ...]]:
        return {role: tuple(node for node in self.nodes if node.role is role) for role in NodeRole}
