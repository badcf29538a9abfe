from outrider.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_STATUS_UNSPECIFIED: _ClassVar[DraftStatus]
    DRAFT_STATUS_PROPOSED: _ClassVar[DraftStatus]
    DRAFT_STATUS_CATCHING_UP: _ClassVar[DraftStatus]
    DRAFT_STATUS_NO_ROOM: _ClassVar[DraftStatus]
    DRAFT_STATUS_NOTHING: _ClassVar[DraftStatus]
    DRAFT_STATUS_UNKNOWN_PREFIX: _ClassVar[DraftStatus]
    DRAFT_STATUS_AHEAD: _ClassVar[DraftStatus]
DRAFT_STATUS_UNSPECIFIED: DraftStatus
DRAFT_STATUS_PROPOSED: DraftStatus
DRAFT_STATUS_CATCHING_UP: DraftStatus
DRAFT_STATUS_NO_ROOM: DraftStatus
DRAFT_STATUS_NOTHING: DraftStatus
DRAFT_STATUS_UNKNOWN_PREFIX: DraftStatus
DRAFT_STATUS_AHEAD: DraftStatus

class DraftUpdate(_message.Message):
    __slots__ = ("hello", "sequences", "step_microseconds", "notices")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    hello: DraftHello
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    step_microseconds: int
    notices: _containers.RepeatedCompositeFieldContainer[StepNotice]
    def __init__(self, hello: _Optional[_Union[DraftHello, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ..., step_microseconds: _Optional[int] = ..., notices: _Optional[_Iterable[_Union[StepNotice, _Mapping]]] = ...) -> None: ...

class StepNotice(_message.Message):
    __slots__ = ("sequence_id", "length", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftHello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "name", "vocab_size", "vocabulary_fingerprint", "max_model_len", "oldest_protocol_version", "features")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: bytes
    name: str
    vocab_size: int
    vocabulary_fingerprint: str
    max_model_len: int
    oldest_protocol_version: int
    features: _node_pb2.FeatureFormat
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., features: _Optional[_Union[_node_pb2.FeatureFormat, _Mapping]] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("sequence_id", "start", "start_length", "token_ids", "length", "prefix_hash", "num_wanted", "closed", "feature_start", "features", "min_reach", "feature_offer")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FEATURE_START_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MIN_REACH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_OFFER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start: SequenceStart
    start_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    length: int
    prefix_hash: int
    num_wanted: int
    closed: bool
    feature_start: int
    features: bytes
    min_reach: float
    feature_offer: FeatureOffer
    def __init__(self, sequence_id: _Optional[int] = ..., start: _Optional[_Union[SequenceStart, _Mapping]] = ..., start_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., num_wanted: _Optional[int] = ..., closed: bool = ..., feature_start: _Optional[int] = ..., features: _Optional[bytes] = ..., min_reach: _Optional[float] = ..., feature_offer: _Optional[_Union[FeatureOffer, _Mapping]] = ...) -> None: ...

class FeatureOffer(_message.Message):
    __slots__ = ("transfer_id", "end_token", "address")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    end_token: int
    address: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., end_token: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sample", "options", "prompt_length", "takes_trees", "traceparent")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TAKES_TREES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sample: int
    options: _node_pb2.RequestOptions
    prompt_length: int
    takes_trees: bool
    traceparent: str
    def __init__(self, sample: _Optional[int] = ..., options: _Optional[_Union[_node_pb2.RequestOptions, _Mapping]] = ..., prompt_length: _Optional[int] = ..., takes_trees: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class DraftProposals(_message.Message):
    __slots__ = ("hello", "sequences")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    hello: _node_pb2.NodeInfo
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceProposals]
    def __init__(self, hello: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceProposals, _Mapping]]] = ...) -> None: ...

class SequenceProposals(_message.Message):
    __slots__ = ("sequence_id", "acked_length", "acked_features", "branches", "status")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACKED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    acked_length: int
    acked_features: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    status: DraftStatus
    def __init__(self, sequence_id: _Optional[int] = ..., acked_length: _Optional[int] = ..., acked_features: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., status: _Optional[_Union[DraftStatus, str]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("length", "prefix_hash", "token_ids", "probability", "distributions", "parents", "grade")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    GRADE_FIELD_NUMBER: _ClassVar[int]
    length: int
    prefix_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probability: float
    distributions: _containers.RepeatedCompositeFieldContainer[TokenDistribution]
    parents: _containers.RepeatedScalarFieldContainer[int]
    grade: int
    def __init__(self, length: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., probability: _Optional[float] = ..., distributions: _Optional[_Iterable[_Union[TokenDistribution, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ..., grade: _Optional[int] = ...) -> None: ...

class TokenDistribution(_message.Message):
    __slots__ = ("token_ids", "probabilities")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...
