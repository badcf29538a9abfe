from outrider.v1 import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "name", "role", "state", "model", "version", "oldest_protocol_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: bytes
    name: str
    role: _router_pb2.NodeRole
    state: _router_pb2.NodeState
    model: ModelInfo
    version: str
    oldest_protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., name: _Optional[str] = ..., role: _Optional[_Union[_router_pb2.NodeRole, str]] = ..., state: _Optional[_Union[_router_pb2.NodeState, str]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., version: _Optional[str] = ..., oldest_protocol_version: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "revision", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "fingerprint", "vocabulary_fingerprint", "proposer", "num_speculative_tokens", "numerics", "features", "weights", "can_blend")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CAN_BLEND_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    fingerprint: str
    vocabulary_fingerprint: str
    proposer: str
    num_speculative_tokens: int
    numerics: str
    features: FeatureFormat
    weights: str
    can_blend: bool
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., proposer: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., numerics: _Optional[str] = ..., features: _Optional[_Union[FeatureFormat, _Mapping]] = ..., weights: _Optional[str] = ..., can_blend: bool = ...) -> None: ...

class FeatureFormat(_message.Message):
    __slots__ = ("fingerprint", "width", "dtype", "taps")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TAPS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    width: int
    dtype: str
    taps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fingerprint: _Optional[str] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., taps: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestOptions(_message.Message):
    __slots__ = ("sampling", "stop_token_ids", "top_logprobs", "logprobs_mode", "num_speculative_tokens", "verification_method", "priority", "cache_salt", "prompt_logprobs", "adapter", "blend")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_METHOD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BLEND_FIELD_NUMBER: _ClassVar[int]
    sampling: _router_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    logprobs_mode: _router_pb2.LogprobsMode
    num_speculative_tokens: int
    verification_method: _router_pb2.VerificationMethod
    priority: int
    cache_salt: bytes
    prompt_logprobs: int
    adapter: _router_pb2.Adapter
    blend: _router_pb2.Blend
    def __init__(self, sampling: _Optional[_Union[_router_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., logprobs_mode: _Optional[_Union[_router_pb2.LogprobsMode, str]] = ..., num_speculative_tokens: _Optional[int] = ..., verification_method: _Optional[_Union[_router_pb2.VerificationMethod, str]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., prompt_logprobs: _Optional[int] = ..., adapter: _Optional[_Union[_router_pb2.Adapter, _Mapping]] = ..., blend: _Optional[_Union[_router_pb2.Blend, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class WatchNodeRequest(_message.Message):
    __slots__ = ("interval_milliseconds",)
    INTERVAL_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_milliseconds: int
    def __init__(self, interval_milliseconds: _Optional[int] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("state", "mark", "expected_step_microseconds", "step_age_microseconds", "load", "incarnation", "num_steps", "adapters")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    state: _router_pb2.NodeState
    mark: int
    expected_step_microseconds: int
    step_age_microseconds: int
    load: NodeLoad
    incarnation: bytes
    num_steps: int
    adapters: AdapterList
    def __init__(self, state: _Optional[_Union[_router_pb2.NodeState, str]] = ..., mark: _Optional[int] = ..., expected_step_microseconds: _Optional[int] = ..., step_age_microseconds: _Optional[int] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., incarnation: _Optional[bytes] = ..., num_steps: _Optional[int] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_router_pb2.Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_router_pb2.Adapter, _Mapping]]] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_blocks_total", "kv_blocks_free", "tokens_per_second", "mean_acceptance_length", "num_outstanding_tokens", "num_sequences_free", "max_rows_per_step", "look_ahead_hit_rate", "kv_bytes_per_second")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FREE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    tokens_per_second: float
    mean_acceptance_length: float
    num_outstanding_tokens: int
    num_sequences_free: int
    max_rows_per_step: int
    look_ahead_hit_rate: float
    kv_bytes_per_second: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., mean_acceptance_length: _Optional[float] = ..., num_outstanding_tokens: _Optional[int] = ..., num_sequences_free: _Optional[int] = ..., max_rows_per_step: _Optional[int] = ..., look_ahead_hit_rate: _Optional[float] = ..., kv_bytes_per_second: _Optional[float] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("num_steps", "num_traced_steps", "timeout_milliseconds")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRACED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_traced_steps: int
    timeout_milliseconds: int
    def __init__(self, num_steps: _Optional[int] = ..., num_traced_steps: _Optional[int] = ..., timeout_milliseconds: _Optional[int] = ...) -> None: ...

class ProfileChunk(_message.Message):
    __slots__ = ("summary", "trace")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    summary: ProfileSummary
    trace: bytes
    def __init__(self, summary: _Optional[_Union[ProfileSummary, _Mapping]] = ..., trace: _Optional[bytes] = ...) -> None: ...

class ProfileSummary(_message.Message):
    __slots__ = ("node", "steps", "num_traced_steps", "microseconds", "timed_out", "kv_bytes_per_token", "feature_bytes_per_token", "weights", "num_longest_tokens", "longest_kv_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRACED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LONGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: str
    steps: _containers.RepeatedCompositeFieldContainer[StepAccount]
    num_traced_steps: int
    microseconds: int
    timed_out: bool
    kv_bytes_per_token: int
    feature_bytes_per_token: int
    weights: str
    num_longest_tokens: int
    longest_kv_bytes: int
    def __init__(self, node: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepAccount, _Mapping]]] = ..., num_traced_steps: _Optional[int] = ..., microseconds: _Optional[int] = ..., timed_out: bool = ..., kv_bytes_per_token: _Optional[int] = ..., feature_bytes_per_token: _Optional[int] = ..., weights: _Optional[str] = ..., num_longest_tokens: _Optional[int] = ..., longest_kv_bytes: _Optional[int] = ...) -> None: ...

class StepAccount(_message.Message):
    __slots__ = ("kind", "num_rows", "num_sequences", "nanoseconds", "event_loop_nanoseconds")
    class NanosecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    EVENT_LOOP_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_rows: int
    num_sequences: int
    nanoseconds: _containers.ScalarMap[str, int]
    event_loop_nanoseconds: int
    def __init__(self, kind: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_sequences: _Optional[int] = ..., nanoseconds: _Optional[_Mapping[str, int]] = ..., event_loop_nanoseconds: _Optional[int] = ...) -> None: ...
