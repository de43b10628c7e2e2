from tandem.v1 import common_pb2 as _common_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "sampling", "cache_salt", "adapter", "priority", "ttft_slo_seconds", "suffix", "reading", "model", "add_special_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: bytes
    token_ids: TokenIds
    chat: Chat
    sampling: _sampling_pb2.SamplingParams
    cache_salt: bytes
    adapter: str
    priority: int
    ttft_slo_seconds: float
    suffix: bytes
    reading: Reading
    model: str
    add_special_tokens: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[bytes] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., ttft_slo_seconds: _Optional[float] = ..., suffix: _Optional[bytes] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ..., model: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("tools", "begins_in_reasoning", "one_call")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    tools: bytes
    begins_in_reasoning: bool
    one_call: bool
    def __init__(self, tools: _Optional[bytes] = ..., begins_in_reasoning: _Optional[bool] = ..., one_call: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "template_variables", "continue_last_message", "without_generation_prompt", "template", "raw", "parallel_calls")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_CALLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: bytes
    tool_choice: ToolChoice
    template_variables: bytes
    continue_last_message: bool
    without_generation_prompt: bool
    template: bytes
    raw: bool
    parallel_calls: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[bytes] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., template_variables: _Optional[bytes] = ..., continue_last_message: _Optional[bool] = ..., without_generation_prompt: _Optional[bool] = ..., template: _Optional[bytes] = ..., raw: _Optional[bool] = ..., parallel_calls: _Optional[bool] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("name", "several")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    several: bool
    def __init__(self, name: _Optional[str] = ..., several: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: bytes
    tool_calls: bytes
    tool_call_id: str
    name: str
    reasoning: bytes
    def __init__(self, role: _Optional[str] = ..., content: _Optional[bytes] = ..., tool_calls: _Optional[bytes] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[bytes] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    choices: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., choices: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "prompt_logprobs", "choice", "last", "adapter_fingerprint", "computes_with", "parts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_WITH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: PromptLogprobs
    choice: int
    last: bool
    adapter_fingerprint: bytes
    computes_with: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., choice: _Optional[int] = ..., last: _Optional[bool] = ..., adapter_fingerprint: _Optional[bytes] = ..., computes_with: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "reasoning", "call", "arguments")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    call: ToolCall
    arguments: str
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., call: _Optional[_Union[ToolCall, _Mapping]] = ..., arguments: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _common_pb2.Logprobs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "text", "receipt", "choice", "stop", "parts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    text: str
    receipt: Receipt
    choice: int
    stop: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., text: _Optional[str] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., choice: _Optional[int] = ..., stop: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("request_id", "model", "path", "prefill_worker", "decode_worker", "prompt_tokens", "completion_tokens", "cached_tokens", "seed", "ttft_seconds", "phases", "tpot_seconds", "total_seconds", "transfer", "attempts", "notes", "preemptions", "prefill_tp", "decode_tp", "unresumed_tokens", "drafted", "accepted", "choice", "choices", "adapter", "estimate", "ended_at", "trace_id", "reasoning_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TPOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TP_FIELD_NUMBER: _ClassVar[int]
    DECODE_TP_FIELD_NUMBER: _ClassVar[int]
    UNRESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    path: _common_pb2.Path
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    ttft_seconds: float
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    tpot_seconds: float
    total_seconds: float
    transfer: _common_pb2.TransferReport
    attempts: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    preemptions: int
    prefill_tp: int
    decode_tp: int
    unresumed_tokens: int
    drafted: int
    accepted: int
    choice: int
    choices: int
    adapter: str
    estimate: Estimate
    ended_at: float
    trace_id: str
    reasoning_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[_Union[_common_pb2.Path, str]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., ttft_seconds: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., tpot_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., transfer: _Optional[_Union[_common_pb2.TransferReport, _Mapping]] = ..., attempts: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., preemptions: _Optional[int] = ..., prefill_tp: _Optional[int] = ..., decode_tp: _Optional[int] = ..., unresumed_tokens: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., choice: _Optional[int] = ..., choices: _Optional[int] = ..., adapter: _Optional[str] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ..., ended_at: _Optional[float] = ..., trace_id: _Optional[str] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("wait_seconds", "compute_seconds", "here_seconds", "there_seconds")
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HERE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    THERE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wait_seconds: float
    compute_seconds: float
    here_seconds: float
    there_seconds: float
    def __init__(self, wait_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., here_seconds: _Optional[float] = ..., there_seconds: _Optional[float] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "max_context_tokens", "vocab_size", "eos_token_ids", "has_tokenizer", "has_chat_template", "adapters", "models")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    has_chat_template: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...
