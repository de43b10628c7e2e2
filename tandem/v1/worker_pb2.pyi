from tandem.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class PrepareAdapterResponse(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchCacheResponse(_message.Message):
    __slots__ = ("sequence", "incarnation", "adapters", "added", "removed")
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    incarnation: str
    adapters: _containers.ScalarMap[str, bytes]
    added: bytes
    removed: bytes
    def __init__(self, sequence: _Optional[int] = ..., incarnation: _Optional[str] = ..., adapters: _Optional[_Mapping[str, bytes]] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("ledger",)
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ledger: _common_pb2.Ledger
    def __init__(self, ledger: _Optional[_Union[_common_pb2.Ledger, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "cut")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    finished: int
    cut: int
    def __init__(self, finished: _Optional[int] = ..., cut: _Optional[int] = ...) -> None: ...
