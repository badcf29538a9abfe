from outrider.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("sequence_group_id", "transfer_id", "request_id", "token_ids", "kv_address", "decode_incarnation", "held_prefix_length", "fingerprint", "options", "may_read_held", "scored_token_ids")
    SEQUENCE_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAY_READ_HELD_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_group_id: bytes
    transfer_id: bytes
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_address: str
    decode_incarnation: bytes
    held_prefix_length: int
    fingerprint: str
    options: _node_pb2.RequestOptions
    may_read_held: bool
    scored_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_group_id: _Optional[bytes] = ..., transfer_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., kv_address: _Optional[str] = ..., decode_incarnation: _Optional[bytes] = ..., held_prefix_length: _Optional[int] = ..., fingerprint: _Optional[str] = ..., options: _Optional[_Union[_node_pb2.RequestOptions, _Mapping]] = ..., may_read_held: bool = ..., scored_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("num_cached_tokens", "num_computed_tokens", "num_read_tokens", "compute_microseconds", "connector", "kv_bytes", "transfer_microseconds", "exposed_microseconds", "prompt_logprobs", "call_microseconds", "chunks", "pushed", "num_blended_tokens", "num_recomputed_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CALL_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_computed_tokens: int
    num_read_tokens: int
    compute_microseconds: int
    connector: str
    kv_bytes: int
    transfer_microseconds: int
    exposed_microseconds: int
    prompt_logprobs: bytes
    call_microseconds: int
    chunks: _containers.RepeatedCompositeFieldContainer[ComputedChunk]
    pushed: _containers.RepeatedCompositeFieldContainer[PushedKv]
    num_blended_tokens: int
    num_recomputed_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_read_tokens: _Optional[int] = ..., compute_microseconds: _Optional[int] = ..., connector: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., transfer_microseconds: _Optional[int] = ..., exposed_microseconds: _Optional[int] = ..., prompt_logprobs: _Optional[bytes] = ..., call_microseconds: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ComputedChunk, _Mapping]]] = ..., pushed: _Optional[_Iterable[_Union[PushedKv, _Mapping]]] = ..., num_blended_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ...) -> None: ...

class ComputedChunk(_message.Message):
    __slots__ = ("start_microseconds", "end_microseconds", "num_tokens")
    START_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    END_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    start_microseconds: int
    end_microseconds: int
    num_tokens: int
    def __init__(self, start_microseconds: _Optional[int] = ..., end_microseconds: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PushedKv(_message.Message):
    __slots__ = ("start_microseconds", "end_microseconds", "kv_bytes")
    START_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    END_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    start_microseconds: int
    end_microseconds: int
    kv_bytes: int
    def __init__(self, start_microseconds: _Optional[int] = ..., end_microseconds: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...
