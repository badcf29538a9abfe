"""A request as router and engine share it: frozen, torch-free, validated by the router.

All defaults of the public API have been filled in, so no later code has to check whether a field was set.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class LogprobsMode(enum.Enum):
    """The distribution to which logprobs refer (see LogprobsMode in the public API)."""

    MODEL = "model"
    SAMPLED = "sampled"


class VerificationMethod(enum.StrEnum):
    """How draft tokens are verified (see VerificationMethod in the public API)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    TYPICAL = "typical"

    @property
    def is_lossy(self) -> bool:
        """Whether the distribution of committed tokens may differ from the target model's."""
        return self is VerificationMethod.TYPICAL

    @property
    def label(self) -> str:
        """The method's name in trailers, metrics and logs, which marks a lossy method."""
        return f"{self.value} (lossy)" if self.is_lossy else self.value


class ConstraintKind(enum.StrEnum):
    """The language of a constraint; the values are the API's field names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark, in llguidance's dialect
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer, from its first generated token to its end."""

    kind: ConstraintKind
    text: str = ""  # the schema, expression or grammar; empty for CHOICE
    options: tuple[str, ...] = ()  # for CHOICE


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # "system", "user", "assistant", or another role that the model's template knows
    content: str
    members: Mapping[str, Any] = field(default_factory=dict, hash=False)  # name, tool_calls and others for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling; SamplingParams in the public API gives the order of the steps."""

    seed: int  # uint64
    max_tokens: int  # maximum for each sample, at least 1
    temperature: float = 1.0  # below GREEDY_TEMPERATURE, the largest logit is chosen
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 keeps the whole vocabulary
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), ids ascending
    n: int = 1  # number of samples, 1 to 64
    min_tokens: int = 0
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def field_at_fault(self) -> str:
        """The API's field to name if a node cannot serve the request: its constraint, or else its prompt."""
        return "prompt" if self.constraint is None else f"sampling.{self.constraint.kind}"

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


GREEDY_TEMPERATURE = 1e-5
MAX_CACHE_SALT_BYTES = 64
MAX_TOP_LOGPROBS = 20
DEFAULT_RECOMPUTE_SHARE = 0.15
"""The share with which CacheBlend's authors report nearly the quality of full computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """Texts that end a sample. The router matches them; nodes match stop tokens (`RequestOptions`)."""

    strings: tuple[str, ...] = ()
    include_match: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """The logprobs to return for each generated token."""

    num_top: int  # number of alternatives, 0 to 20
    mode: LogprobsMode = LogprobsMode.MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the output contains in addition to tokens."""

    skip_special_tokens: bool = True
    echo: bool = False
    token_ids_only: bool = False
    token_bytes: bool = False  # whether each logprob has the bytes that its token adds to the text


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) of the model: its name, which a request's `model` may be, and the hash of its content."""

    name: str
    fingerprint: str  # SHA-256 in hexadecimal over its tensors and their scaling

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fingerprint[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Allows the reuse of KV of the prompt's pieces, computed without what precedes them, which changes the answer."""

    piece_lengths: tuple[int, ...]  # in tokens, of consecutive pieces from the prompt's start on
    recompute_share: float = DEFAULT_RECOMPUTE_SHARE  # of the reused tokens, 0 to 1, those that are computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is computed; passed unchanged from node to node (RequestOptions in node.proto)."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()  # includes end-of-text ids, unless the request ignores them
    logprobs: LogprobsRequest | None = None
    num_speculative_tokens: int | None = None  # None: the decode node's setting; 0: plain decoding
    verification_method: VerificationMethod = VerificationMethod.COUPLED  # always COUPLED at temperature 0
    priority: int = 0  # higher goes first
    cache_salt: bytes = b""  # only requests with the same salt share cached KV; at most MAX_CACHE_SALT_BYTES
    prompt_logprobs: int | None = None  # 0 to 20 alternatives for each prompt token; None: no prompt logprobs
    adapter: Adapter | None = None  # None: the model itself
    blend: Blend | None = None  # None: the prompt is computed exactly

    @property
    def kv_salt(self) -> bytes:
        """The salt of the hashes of cached KV: an adapter's keys and values are no other adapter's, nor the model's."""
        if self.adapter is None:
            return self.cache_salt
        return hashlib.sha256(f"outrider.adapter\0{self.adapter.fingerprint}\0".encode() + self.cache_salt).digest()

    @property
    def is_reproducible(self) -> bool:
        """Whether the tokens depend on model, prompt, parameters and seed only, and not on drafts or nodes."""
        return self.verification_method is VerificationMethod.COUPLED and self.blend is None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of one generated or prompt token."""

    token_id: int
    logprob: float  # natural logarithm; NaN for the prompt's first token, which follows nothing
    rank: int  # 1 + number of strictly more likely tokens
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    token_bytes: bytes = b""  # bytes that the token adds to the text, maybe part of a character; empty unless requested
    top_bytes: tuple[bytes, ...] = ()  # the bytes of each token of `top`

    @property
    def gap(self) -> float | None:
        """The difference of the two largest logprobs, i.e. how close the choice was; None unless both are known."""
        return self.top[0][1] - self.top[1][1] if len(self.top) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One validated, tokenized request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    options: RequestOptions
    prompt_text: str = ""  # for echo only
    generated_token_ids: tuple[int, ...] = ()
    stop: StopStrings = field(default_factory=StopStrings)
    output: OutputOptions = field(default_factory=OutputOptions)
