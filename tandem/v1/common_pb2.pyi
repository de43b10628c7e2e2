from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Path(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_UNSPECIFIED: _ClassVar[Path]
    PATH_DISAGGREGATED: _ClassVar[Path]
    PATH_LOCAL: _ClassVar[Path]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
PATH_UNSPECIFIED: Path
PATH_DISAGGREGATED: Path
PATH_LOCAL: Path

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json", "regex", "ebnf", "choice", "calls")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    json_schema: bytes
    json: bool
    regex: bytes
    ebnf: bytes
    choice: Choices
    calls: Calls
    def __init__(self, json_schema: _Optional[bytes] = ..., json: _Optional[bool] = ..., regex: _Optional[bytes] = ..., ebnf: _Optional[bytes] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., calls: _Optional[_Union[Calls, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, texts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Calls(_message.Message):
    __slots__ = ("any", "separator", "style")
    ANY_FIELD_NUMBER: _ClassVar[int]
    SEPARATOR_FIELD_NUMBER: _ClassVar[int]
    STYLE_FIELD_NUMBER: _ClassVar[int]
    any: _containers.RepeatedCompositeFieldContainer[Call]
    separator: bytes
    style: str
    def __init__(self, any: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., separator: _Optional[bytes] = ..., style: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("before", "after", "arguments")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    before: bytes
    after: bytes
    arguments: bytes
    def __init__(self, before: _Optional[bytes] = ..., after: _Optional[bytes] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("transport", "bytes", "blocks", "seconds", "exposed_seconds", "why", "converted")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    transport: str
    bytes: int
    blocks: int
    seconds: float
    exposed_seconds: float
    why: str
    converted: str
    def __init__(self, transport: _Optional[str] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., why: _Optional[str] = ..., converted: _Optional[str] = ...) -> None: ...

class PrefillTiming(_message.Message):
    __slots__ = ("queue_seconds", "compute_seconds", "cached_tokens", "unresumed_tokens", "prepare_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNRESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    compute_seconds: float
    cached_tokens: int
    unresumed_tokens: int
    prepare_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., unresumed_tokens: _Optional[int] = ..., prepare_seconds: _Optional[float] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("owner", "blocks", "age_seconds")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    age_seconds: float
    def __init__(self, owner: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("worker", "total", "free", "cached", "held", "entries", "faults", "states")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    total: int
    free: int
    cached: int
    held: int
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    faults: _containers.RepeatedScalarFieldContainer[str]
    states: StateLedger
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., faults: _Optional[_Iterable[str]] = ..., states: _Optional[_Union[StateLedger, _Mapping]] = ...) -> None: ...

class StateLedger(_message.Message):
    __slots__ = ("total", "free", "owners", "snapshots")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    owners: _containers.RepeatedScalarFieldContainer[str]
    snapshots: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., owners: _Optional[_Iterable[str]] = ..., snapshots: _Optional[int] = ...) -> None: ...
