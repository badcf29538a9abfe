"""The identity and the state of nodes, as values.

They mirror messages of `node.proto`; those that clients see (Model, NodeStatus, ClusterStatus) mirror `router.proto`.
`outrider.wire.node` and `outrider.wire.cluster` convert between values and messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.protocol_versions import SUPPORTED_VERSIONS, ProtocolVersions
from outrider.request import Adapter, VerificationMethod


class NodeRole(enum.Enum):
    PREFILL = 1
    DECODE = 2
    DRAFT = 3


class NodeState(enum.Enum):
    STARTING = 1
    SERVING = 2
    DRAINING = 3
    LOST = 4


MAX_NAMED_TAPS = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFormat:
    """The format in which features of a target's tokens are sent to a drafter head; fields as in node.proto."""

    fingerprint: str  # fingerprint of the reduction (see outrider.engine.feature_spec)
    width: int
    dtype: str
    taps: tuple[int, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        taps = ", ".join(map(str, self.taps[:MAX_NAMED_TAPS]))  # limited, since input from a peer is untrusted
        return f"{self.fingerprint[:16]} ({self.width} numbers of {self.dtype[:16]}, taps {taps})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model; fields as in `ModelInfo` of node.proto."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    fingerprint: str
    vocabulary_fingerprint: str
    revision: str = ""
    proposer: str = ""
    num_speculative_tokens: int = 0
    numerics: str = ""
    weights: str = ""
    features: FeatureFormat | None = None
    can_blend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    incarnation: bytes
    name: str
    role: NodeRole
    state: NodeState
    version: str
    model: ModelInfo | None = None
    protocol_versions: ProtocolVersions = SUPPORTED_VERSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    tokens_per_second: float = 0.0
    mean_acceptance_length: float = 0.0
    num_outstanding_tokens: int = 0
    num_sequences_free: int = 0
    max_rows_per_step: int = 0  # maximum prompt tokens of one forward pass; 0 except on prefill nodes
    look_ahead_hit_rate: float = 0.0
    kv_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    state: NodeState
    incarnation: bytes
    mark: int = 0  # progress mark: it stays the same only while the engine's thread makes no progress
    num_steps: int = 0  # forward passes since the start
    expected_step_seconds: float = 0.0
    step_age_seconds: float = 0.0
    load: NodeLoad = field(default_factory=NodeLoad)
    adapters: tuple[Adapter, ...] | None = None  # of prefill and decode nodes; None: as in the stream's last report


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model and its speculation, as clients see them."""

    name: str
    revision: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    proposer: str
    num_speculative_tokens: int
    verification_method: VerificationMethod | None  # None: unknown to this version
    fingerprint: str
    version: str  # the server's
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # values in generation_config.json, by field
    weights: str = ""  # the format of the weights, such as "bfloat16" or "GGUF Q4_K, Q6_K"
    adapters: tuple[Adapter, ...] = ()  # by name; a request's `model` may be one of these names


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node as the router sees it. A node that is not serving has zero counts."""

    name: str
    role: NodeRole | None  # None: unknown to this version
    state: NodeState | None
    target: str
    step: int = 0
    load: NodeLoad = field(default_factory=NodeLoad)
    condition: str = ""  # the node's problem; empty if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    nodes: tuple[NodeStatus, ...]
    num_requests_running: int
    num_requests_waiting: int
    num_waiting_tokens: int = 0
    oldest_wait_seconds: float = 0.0
    num_moves: int = 0  # number of moves since the router's start

    def by_role(self) -> Mapping[NodeRole, tuple[NodeStatus, ...]]:
        return {role: tuple(node for node in self.nodes if node.role is role) for role in NodeRole}
