from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvAttachState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_ATTACH_STATE_UNSPECIFIED: _ClassVar[KvAttachState]
    KV_ATTACH_STATE_ATTACHED: _ClassVar[KvAttachState]
    KV_ATTACH_STATE_UNKNOWN: _ClassVar[KvAttachState]
    KV_ATTACH_STATE_WRONG_INCARNATION: _ClassVar[KvAttachState]
    KV_ATTACH_STATE_BUSY: _ClassVar[KvAttachState]
    KV_ATTACH_STATE_NOT_OFFERED: _ClassVar[KvAttachState]

class KvDisposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DISPOSITION_UNSPECIFIED: _ClassVar[KvDisposition]
    KV_DISPOSITION_WRITTEN: _ClassVar[KvDisposition]
    KV_DISPOSITION_DUPLICATE: _ClassVar[KvDisposition]
    KV_DISPOSITION_STALE: _ClassVar[KvDisposition]
    KV_DISPOSITION_CORRUPT: _ClassVar[KvDisposition]
    KV_DISPOSITION_OUT_OF_BOUNDS: _ClassVar[KvDisposition]
    KV_DISPOSITION_CONFLICTING: _ClassVar[KvDisposition]
    KV_DISPOSITION_FAILED: _ClassVar[KvDisposition]

class KvCommitState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_COMMIT_STATE_UNSPECIFIED: _ClassVar[KvCommitState]
    KV_COMMIT_STATE_COMMITTED: _ClassVar[KvCommitState]
    KV_COMMIT_STATE_INCOMPLETE: _ClassVar[KvCommitState]
    KV_COMMIT_STATE_UNKNOWN: _ClassVar[KvCommitState]
KV_ATTACH_STATE_UNSPECIFIED: KvAttachState
KV_ATTACH_STATE_ATTACHED: KvAttachState
KV_ATTACH_STATE_UNKNOWN: KvAttachState
KV_ATTACH_STATE_WRONG_INCARNATION: KvAttachState
KV_ATTACH_STATE_BUSY: KvAttachState
KV_ATTACH_STATE_NOT_OFFERED: KvAttachState
KV_DISPOSITION_UNSPECIFIED: KvDisposition
KV_DISPOSITION_WRITTEN: KvDisposition
KV_DISPOSITION_DUPLICATE: KvDisposition
KV_DISPOSITION_STALE: KvDisposition
KV_DISPOSITION_CORRUPT: KvDisposition
KV_DISPOSITION_OUT_OF_BOUNDS: KvDisposition
KV_DISPOSITION_CONFLICTING: KvDisposition
KV_DISPOSITION_FAILED: KvDisposition
KV_COMMIT_STATE_UNSPECIFIED: KvCommitState
KV_COMMIT_STATE_COMMITTED: KvCommitState
KV_COMMIT_STATE_INCOMPLETE: KvCommitState
KV_COMMIT_STATE_UNKNOWN: KvCommitState

class KvSenderMessage(_message.Message):
    __slots__ = ("hello", "read", "commit", "cancel", "alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: KvHello
    read: bytes
    commit: KvCommit
    cancel: KvCancel
    alive: KvAlive
    def __init__(self, hello: _Optional[_Union[KvHello, _Mapping]] = ..., read: _Optional[bytes] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ..., cancel: _Optional[_Union[KvCancel, _Mapping]] = ..., alive: _Optional[_Union[KvAlive, _Mapping]] = ...) -> None: ...

class KvReceiverMessage(_message.Message):
    __slots__ = ("welcome", "ack", "not_held", "commit_answer", "cancelled")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NOT_HELD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    welcome: KvWelcome
    ack: KvAck
    not_held: KvNotHeld
    commit_answer: KvCommitAnswer
    cancelled: KvCancelled
    def __init__(self, welcome: _Optional[_Union[KvWelcome, _Mapping]] = ..., ack: _Optional[_Union[KvAck, _Mapping]] = ..., not_held: _Optional[_Union[KvNotHeld, _Mapping]] = ..., commit_answer: _Optional[_Union[KvCommitAnswer, _Mapping]] = ..., cancelled: _Optional[_Union[KvCancelled, _Mapping]] = ...) -> None: ...

class KvHello(_message.Message):
    __slots__ = ("version", "transfer_id", "incarnation", "arena_id", "arena_bytes", "arena_is_on_device", "is_part")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_IS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    IS_PART_FIELD_NUMBER: _ClassVar[int]
    version: int
    transfer_id: bytes
    incarnation: bytes
    arena_id: bytes
    arena_bytes: int
    arena_is_on_device: bool
    is_part: bool
    def __init__(self, version: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., arena_id: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., arena_is_on_device: bool = ..., is_part: bool = ...) -> None: ...

class KvWelcome(_message.Message):
    __slots__ = ("state", "nonce")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    state: KvAttachState
    nonce: bytes
    def __init__(self, state: _Optional[_Union[KvAttachState, str]] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class KvAck(_message.Message):
    __slots__ = ("sequence", "disposition")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    disposition: KvDisposition
    def __init__(self, sequence: _Optional[int] = ..., disposition: _Optional[_Union[KvDisposition, str]] = ...) -> None: ...

class KvNotHeld(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: int
    def __init__(self, digest: _Optional[int] = ...) -> None: ...

class KvCommitAnswer(_message.Message):
    __slots__ = ("state", "complete_until")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    state: KvCommitState
    complete_until: int
    def __init__(self, state: _Optional[_Union[KvCommitState, str]] = ..., complete_until: _Optional[int] = ...) -> None: ...

class KvCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvCancelled(_message.Message):
    __slots__ = ("is_drained",)
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    is_drained: bool
    def __init__(self, is_drained: bool = ...) -> None: ...

class KvAlive(_message.Message):
    __slots__ = ("has_progressed",)
    HAS_PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    has_progressed: bool
    def __init__(self, has_progressed: bool = ...) -> None: ...
