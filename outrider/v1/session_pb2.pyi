from outrider.v1 import node_pb2 as _node_pb2
from outrider.v1 import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_NO_ROOM: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
    REJECT_REASON_TOO_LARGE: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_NO_ADAPTER: _ClassVar[RejectReason]
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_NO_ROOM: RejectReason
REJECT_REASON_DRAINING: RejectReason
REJECT_REASON_TOO_LARGE: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_NO_ADAPTER: RejectReason

class SessionCommand(_message.Message):
    __slots__ = ("hello", "open", "cancel", "heartbeat", "retarget")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RETARGET_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    open: OpenSequenceGroup
    cancel: CancelSequenceGroup
    heartbeat: SessionHeartbeat
    retarget: RetargetSequenceGroup
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., open: _Optional[_Union[OpenSequenceGroup, _Mapping]] = ..., cancel: _Optional[_Union[CancelSequenceGroup, _Mapping]] = ..., heartbeat: _Optional[_Union[SessionHeartbeat, _Mapping]] = ..., retarget: _Optional[_Union[RetargetSequenceGroup, _Mapping]] = ...) -> None: ...

class SessionHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "name", "fingerprint", "reached_at", "oldest_protocol_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REACHED_AT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: bytes
    name: str
    fingerprint: str
    reached_at: str
    oldest_protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., reached_at: _Optional[str] = ..., oldest_protocol_version: _Optional[int] = ...) -> None: ...

class OpenSequenceGroup(_message.Message):
    __slots__ = ("sequence_group_id", "transfer_id", "request_id", "prompt_token_ids", "samples", "options", "traceparent")
    SEQUENCE_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence_group_id: bytes
    transfer_id: bytes
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleStart]
    options: _node_pb2.RequestOptions
    traceparent: str
    def __init__(self, sequence_group_id: _Optional[bytes] = ..., transfer_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[_Union[SampleStart, _Mapping]]] = ..., options: _Optional[_Union[_node_pb2.RequestOptions, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SampleStart(_message.Message):
    __slots__ = ("sample", "generated_token_ids")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample: _Optional[int] = ..., generated_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RetargetSequenceGroup(_message.Message):
    __slots__ = ("sequence_group_id", "transfer_id", "keeps_received")
    SEQUENCE_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    KEEPS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    sequence_group_id: bytes
    transfer_id: bytes
    keeps_received: bool
    def __init__(self, sequence_group_id: _Optional[bytes] = ..., transfer_id: _Optional[bytes] = ..., keeps_received: bool = ...) -> None: ...

class CancelSequenceGroup(_message.Message):
    __slots__ = ("sequence_group_id", "samples")
    SEQUENCE_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    sequence_group_id: bytes
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_group_id: _Optional[bytes] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("hello", "node", "events")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    hello: _node_pb2.NodeInfo
    node: _node_pb2.NodeReport
    events: _containers.RepeatedCompositeFieldContainer[SequenceGroupEvent]
    def __init__(self, hello: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ..., node: _Optional[_Union[_node_pb2.NodeReport, _Mapping]] = ..., events: _Optional[_Iterable[_Union[SequenceGroupEvent, _Mapping]]] = ...) -> None: ...

class SequenceGroupEvent(_message.Message):
    __slots__ = ("sequence_group_id", "granted", "rejected", "kv_ready", "tokens", "done", "failed", "kv_failed", "prompt_logprobs")
    SEQUENCE_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_group_id: bytes
    granted: Granted
    rejected: Rejected
    kv_ready: KvReady
    tokens: SampleTokens
    done: SampleDone
    failed: SequenceGroupFailed
    kv_failed: KvFailed
    prompt_logprobs: PromptLogprobs
    def __init__(self, sequence_group_id: _Optional[bytes] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., kv_ready: _Optional[_Union[KvReady, _Mapping]] = ..., tokens: _Optional[_Union[SampleTokens, _Mapping]] = ..., done: _Optional[_Union[SampleDone, _Mapping]] = ..., failed: _Optional[_Union[SequenceGroupFailed, _Mapping]] = ..., kv_failed: _Optional[_Union[KvFailed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("transfer_id", "kv_address", "held_prefix_length", "num_tokens_to_compute")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_TO_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    kv_address: str
    held_prefix_length: int
    num_tokens_to_compute: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., kv_address: _Optional[str] = ..., held_prefix_length: _Optional[int] = ..., num_tokens_to_compute: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason", "message", "kv_blocks_needed", "num_sequences_needed", "wait_microseconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: RejectReason
    message: str
    kv_blocks_needed: int
    num_sequences_needed: int
    wait_microseconds: int
    def __init__(self, reason: _Optional[_Union[RejectReason, str]] = ..., message: _Optional[str] = ..., kv_blocks_needed: _Optional[int] = ..., num_sequences_needed: _Optional[int] = ..., wait_microseconds: _Optional[int] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("transfer_id", "connector", "kv_bytes", "transfer_microseconds")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    connector: str
    kv_bytes: int
    transfer_microseconds: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., connector: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., transfer_microseconds: _Optional[int] = ...) -> None: ...

class KvFailed(_message.Message):
    __slots__ = ("transfer_id", "message")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    message: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., message: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class SampleTokens(_message.Message):
    __slots__ = ("sample", "start_position", "token_ids", "logprobs", "speculation", "rejected_draft_token_ids")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    start_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_router_pb2.TokenLogprobs]
    speculation: SpeculationCounts
    rejected_draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample: _Optional[int] = ..., start_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_router_pb2.TokenLogprobs, _Mapping]]] = ..., speculation: _Optional[_Union[SpeculationCounts, _Mapping]] = ..., rejected_draft_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationCounts(_message.Message):
    __slots__ = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "num_wanting_steps", "num_hit_steps")
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTING_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_wanting_steps: int
    num_hit_steps: int
    def __init__(self, num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_wanting_steps: _Optional[int] = ..., num_hit_steps: _Optional[int] = ...) -> None: ...

class SampleDone(_message.Message):
    __slots__ = ("sample", "reason", "stop_token_id")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    sample: int
    reason: _router_pb2.FinishReason
    stop_token_id: int
    def __init__(self, sample: _Optional[int] = ..., reason: _Optional[_Union[_router_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class SequenceGroupFailed(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
