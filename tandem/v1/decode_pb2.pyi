from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "prompt_tokens", "max_tokens", "sampling", "stop_token_ids", "cache_salt", "tenant", "prefill", "feed_id", "lane", "alone", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    max_tokens: int
    sampling: _sampling_pb2.Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    tenant: str
    prefill: _common_pb2.WorkerRef
    feed_id: str
    lane: int
    alone: bool
    adapter: _common_pb2.Adapter
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., tenant: _Optional[str] = ..., prefill: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., feed_id: _Optional[str] = ..., lane: _Optional[int] = ..., alone: _Optional[bool] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("feed_id", "interval_seconds")
    FEED_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    feed_id: str
    interval_seconds: float
    def __init__(self, feed_id: _Optional[str] = ..., interval_seconds: _Optional[float] = ...) -> None: ...

class FeedResponse(_message.Message):
    __slots__ = ("incarnation", "events")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    events: _containers.RepeatedCompositeFieldContainer[DecodeResponse]
    def __init__(self, incarnation: _Optional[str] = ..., events: _Optional[_Iterable[_Union[DecodeResponse, _Mapping]]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("admitted", "tokens", "ended", "lane")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    tokens: Tokens
    ended: Ended
    lane: int
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., lane: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("adapter_fingerprint",)
    ADAPTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    adapter_fingerprint: bytes
    def __init__(self, adapter_fingerprint: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("position", "token_ids", "first", "logprobs", "prompt_logprobs", "transfer", "preemptions")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first: FirstTokenTiming
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    transfer: _common_pb2.TransferReport
    preemptions: int
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., first: _Optional[_Union[FirstTokenTiming, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., transfer: _Optional[_Union[_common_pb2.TransferReport, _Mapping]] = ..., preemptions: _Optional[int] = ...) -> None: ...

class FirstTokenTiming(_message.Message):
    __slots__ = ("total_seconds", "admit_seconds", "prefill", "path")
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    total_seconds: float
    admit_seconds: float
    prefill: _common_pb2.PrefillTiming
    path: _common_pb2.Path
    def __init__(self, total_seconds: _Optional[float] = ..., admit_seconds: _Optional[float] = ..., prefill: _Optional[_Union[_common_pb2.PrefillTiming, _Mapping]] = ..., path: _Optional[_Union[_common_pb2.Path, str]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("transfer", "preemptions", "drafted", "accepted")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    transfer: _common_pb2.TransferReport
    preemptions: int
    drafted: int
    accepted: int
    def __init__(self, transfer: _Optional[_Union[_common_pb2.TransferReport, _Mapping]] = ..., preemptions: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class ProbePairRequest(_message.Message):
    __slots__ = ("prefill",)
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    prefill: _common_pb2.WorkerRef
    def __init__(self, prefill: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class ProbePairResponse(_message.Message):
    __slots__ = ("compatible", "differences", "transport", "bytes_per_second", "device", "slow", "why", "converted")
    COMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    compatible: bool
    differences: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    bytes_per_second: float
    device: str
    slow: str
    why: str
    converted: str
    def __init__(self, compatible: _Optional[bool] = ..., differences: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., device: _Optional[str] = ..., slow: _Optional[str] = ..., why: _Optional[str] = ..., converted: _Optional[str] = ...) -> None: ...
