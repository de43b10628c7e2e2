from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_tokens", "sampling", "cache_salt", "tenant", "skip_blocks", "layout_hash", "incarnation", "source_progress", "stop_token_ids", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _sampling_pb2.Sampling
    cache_salt: bytes
    tenant: str
    skip_blocks: int
    layout_hash: str
    incarnation: str
    source_progress: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: _common_pb2.Adapter
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., tenant: _Optional[str] = ..., skip_blocks: _Optional[int] = ..., layout_hash: _Optional[str] = ..., incarnation: _Optional[str] = ..., source_progress: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("opened", "ready", "first_token")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    ready: Ready
    first_token: FirstToken
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("transfer_id", "generation", "incarnation", "adapter_fingerprint")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    generation: int
    incarnation: str
    adapter_fingerprint: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., adapter_fingerprint: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("blocks", "last")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ReadyBlock]
    last: bool
    def __init__(self, blocks: _Optional[_Iterable[_Union[ReadyBlock, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class ReadyBlock(_message.Message):
    __slots__ = ("index", "block", "digest")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    index: int
    block: int
    digest: bytes
    def __init__(self, index: _Optional[int] = ..., block: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "timing", "logprobs", "prompt_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    timing: _common_pb2.PrefillTiming
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    def __init__(self, token_id: _Optional[int] = ..., timing: _Optional[_Union[_common_pb2.PrefillTiming, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class ReleaseTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "generation", "incarnation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    generation: int
    incarnation: str
    def __init__(self, transfer_id: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ReleaseTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPeerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPeerResponse(_message.Message):
    __slots__ = ("peer", "layout_json", "adapters")
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    layout_json: str
    adapters: _containers.ScalarMap[str, bytes]
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., layout_json: _Optional[str] = ..., adapters: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "incarnation", "agent_name", "metadata", "layout_hash", "address", "num_blocks", "block_bytes", "device", "memory", "transport", "also")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    agent_name: str
    metadata: bytes
    layout_hash: str
    address: int
    num_blocks: int
    block_bytes: int
    device: int
    memory: str
    transport: str
    also: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., agent_name: _Optional[str] = ..., metadata: _Optional[bytes] = ..., layout_hash: _Optional[str] = ..., address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., device: _Optional[int] = ..., memory: _Optional[str] = ..., transport: _Optional[str] = ..., also: _Optional[_Iterable[str]] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("open", "entry", "send")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    open: LinkOpen
    entry: LinkEntry
    send: SendBlocks
    def __init__(self, open: _Optional[_Union[LinkOpen, _Mapping]] = ..., entry: _Optional[_Union[LinkEntry, _Mapping]] = ..., send: _Optional[_Union[SendBlocks, _Mapping]] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: LinkEntry
    def __init__(self, entry: _Optional[_Union[LinkEntry, _Mapping]] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("worker_id", "incarnation", "source_incarnation", "layout_hash", "epoch", "secret")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    source_incarnation: str
    layout_hash: str
    epoch: int
    secret: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., layout_hash: _Optional[str] = ..., epoch: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class LinkEntry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class SendBlocks(_message.Message):
    __slots__ = ("number", "blocks", "stall_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    stall_seconds: float
    def __init__(self, number: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., stall_seconds: _Optional[float] = ...) -> None: ...
