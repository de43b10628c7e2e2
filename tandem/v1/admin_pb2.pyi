from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("name", "path", "fingerprint", "loaded_at", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOADED_AT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    fingerprint: bytes
    loaded_at: float
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., loaded_at: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: ServedAdapter
    def __init__(self, adapter: _Optional[_Union[ServedAdapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReceiptsRequest(_message.Message):
    __slots__ = ("request_id", "limit", "within_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WITHIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    within_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ..., within_seconds: _Optional[float] = ...) -> None: ...

class ListReceiptsResponse(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Receipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[_generation_pb2.Receipt, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "role", "state", "pid", "incarnation", "address", "running", "waiting", "blocks_total", "blocks_held", "heartbeat_age_seconds", "weights", "weight_bytes", "kv_dtype", "kv_token_bytes", "sum_order", "metrics_address", "model", "node", "device", "tp")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUM_ORDER_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    state: str
    pid: int
    incarnation: str
    address: str
    running: int
    waiting: int
    blocks_total: int
    blocks_held: int
    heartbeat_age_seconds: float
    weights: str
    weight_bytes: int
    kv_dtype: str
    kv_token_bytes: float
    sum_order: str
    metrics_address: str
    model: str
    node: str
    device: str
    tp: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_held: _Optional[int] = ..., heartbeat_age_seconds: _Optional[float] = ..., weights: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., kv_token_bytes: _Optional[float] = ..., sum_order: _Optional[str] = ..., metrics_address: _Optional[str] = ..., model: _Optional[str] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., tp: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "wanted")
    class WantedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    wanted: _containers.ScalarMap[str, int]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., wanted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ScalePoolsRequest(_message.Message):
    __slots__ = ("wanted",)
    class WantedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.ScalarMap[str, int]
    def __init__(self, wanted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ScalePoolsResponse(_message.Message):
    __slots__ = ("wanted",)
    class WantedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.ScalarMap[str, int]
    def __init__(self, wanted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GetScalingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScalingResponse(_message.Message):
    __slots__ = ("mode", "age_seconds", "pools")
    MODE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    age_seconds: float
    pools: _containers.RepeatedCompositeFieldContainer[ScalingVerdict]
    def __init__(self, mode: _Optional[str] = ..., age_seconds: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[ScalingVerdict, _Mapping]]] = ...) -> None: ...

class ScalingVerdict(_message.Message):
    __slots__ = ("role", "size", "wanted", "why")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    role: str
    size: int
    wanted: int
    why: str
    def __init__(self, role: _Optional[str] = ..., size: _Optional[int] = ..., wanted: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., grace_seconds: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("finished", "cut")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    finished: int
    cut: int
    def __init__(self, finished: _Optional[int] = ..., cut: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("ledgers", "unreachable")
    class UnreachableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Ledger]
    unreachable: _containers.ScalarMap[str, str]
    def __init__(self, ledgers: _Optional[_Iterable[_Union[_common_pb2.Ledger, _Mapping]]] = ..., unreachable: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("pairs", "registry_reachable", "registry_round_trip_seconds", "versions", "problems")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[Pair]
    registry_reachable: bool
    registry_round_trip_seconds: float
    versions: _containers.ScalarMap[str, str]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pairs: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., registry_reachable: _Optional[bool] = ..., registry_round_trip_seconds: _Optional[float] = ..., versions: _Optional[_Mapping[str, str]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "compatible", "differences", "transport", "bytes_per_second", "error", "device", "slow", "why", "prefill_tp", "decode_tp", "converted")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    COMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TP_FIELD_NUMBER: _ClassVar[int]
    DECODE_TP_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    compatible: bool
    differences: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    bytes_per_second: float
    error: str
    device: str
    slow: str
    why: str
    prefill_tp: int
    decode_tp: int
    converted: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., compatible: _Optional[bool] = ..., differences: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., error: _Optional[str] = ..., device: _Optional[str] = ..., slow: _Optional[str] = ..., why: _Optional[str] = ..., prefill_tp: _Optional[int] = ..., decode_tp: _Optional[int] = ..., converted: _Optional[str] = ...) -> None: ...
