"""Builds the router's request from a client's message. Errors name the field and its bound. Nothing is reserved for a
request before it is built."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from services.router.answer.reading import Reading
from services.router.preprocess import grammar_schema, validation
from services.router.preprocess.chat import forced_calls
from services.router.preprocess.chat.prompt import prompt_tokens, tools_of
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2

DEFAULT_MAX_TOKENS = 1024


@dataclass(slots=True)
class Request:
    """A validated request with its journal: `tokens` is the prompt and every token sent to the client."""

    request_id: str  # the client's
    internal_id: str  # unique, even if two clients choose the same id
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    sampling: sampling_pb2.Sampling
    stop_ids: list[int]
    salt: bytes
    vocab_size: int
    own_stop_ids: list[int] | None = None  # stop tokens other than the model's end tokens; None: no end token ends it
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    show_special: bool = False  # tokens in the text
    choice: int = 0  # of `choices` completions of this prompt
    choices: int = 1
    stopped: bool = False  # by a stop string: the journal is complete
    adapter: str = ""  # its name; empty: the base model
    adapter_fingerprint: bytes = b""  # of the adapter that chose the tokens in the journal, or is to choose them
    tenant: str = ""  # the owner of its key
    metered: bool = False  # its key limits tokens per minute
    kv_holder: str = ""  # the decode worker that has the prompt's KV already
    unsuited: set[tuple[str, str]] = field(default_factory=set)  # incarnations that refused it and serve others
    priority: int = 0  # the smaller, the more urgent
    ttft_s: float | None = None  # a first token later than this is useless to the client
    is_job: bool = False  # no client waits for its first token
    notes: list[str] = field(default_factory=list)
    reading: Reading | None = None  # of the answer's parts; None: it is only text

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def end_at(self, eos_token_ids: Iterable[int]) -> None:
        """Sets the end tokens of the worker that serves it, because a cluster may temporarily have two checkpoints."""
        if self.own_stop_ids is not None:
            self.stop_ids = [*eos_token_ids, *self.own_stop_ids]

    def finish(self) -> common_pb2.FinishReason | None:
        """Why the journal is complete; None while it is not."""
        if self.stopped or (self.generated and self.tokens[-1] in self.stop_ids):
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if self.generated >= self.max_tokens else None

    def stop_after(self, generated: int) -> None:
        """A stop string is complete with that many tokens; later tokens are removed."""
        del self.tokens[self.prompt_len + generated :]
        self.stopped = True

    def fan_out(self) -> list[Request]:
        """A request for each completion. Its tokens depend on its own seed only, not on the other completions."""
        return [self, *(self._sibling(choice) for choice in range(1, self.choices))]

    def _sibling(self, choice: int) -> Request:
        sampling = sampling_pb2.Sampling()
        sampling.CopyFrom(self.sampling)
        sampling.seed = seed_of(self.sampling.seed, choice)
        internal_id = f"{self.internal_id}-{choice}"
        return replace(
            self,
            internal_id=internal_id,
            tokens=list(self.tokens),
            sampling=sampling,
            choice=choice,
            unsuited=set(self.unsuited),
            notes=[],
        )


@dataclass(slots=True)
class PromptCount:
    """Whether an attempt of a job at this router has counted the prompt among its tenant's tokens."""

    done: bool = False


class ResumeState:
    """What is stored of a job's earlier attempts, by completion, and the fingerprint of its adapter; and what this
    router counted of them."""

    def __init__(
        self, events: Iterable[generation_pb2.GenerateResponse] = (), prompt_count: PromptCount | None = None
    ) -> None:
        self.prompt_count = prompt_count or PromptCount()
        self.deltas: dict[int, list[generation_pb2.Delta]] = defaultdict(list)
        self.ended: set[int] = set()
        self.adapter_fingerprint = b""
        self.computes_with: dict[int, str] = {}  # by completion: what its first token was computed with
        self.add(events)

    def add(self, events: Iterable[generation_pb2.GenerateResponse]) -> None:
        for event in events:
            if event.HasField("delta"):
                self.deltas[event.delta.choice].append(event.delta)
                if event.delta.computes_with:
                    self.computes_with.setdefault(event.delta.choice, event.delta.computes_with)
                self.adapter_fingerprint = self.adapter_fingerprint or event.delta.adapter_fingerprint
            elif event.HasField("finished"):
                self.ended.add(event.finished.choice)


def seed_of(seed: int, choice: int) -> int:
    """The seed of a completion: the request's own for the first, 64 bits of blake2b(seed, choice) for the others."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, choice), digest_size=8, person=b"tandem.choice")
    return int.from_bytes(digest.digest(), "little")


def build_request(
    message: generation_pb2.GenerateRequest,
    tokenizer: Tokenizer,
    model: ModelFacts,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    fixed: bool = False,
) -> Request:
    """Parses the prompt and validates every field. `fixed`: the router made the message from a request that it had
    validated, and its grammar may be of a kind that clients cannot send. Raises InvalidRequest, NotFound for an unknown
    adapter."""
    params = message.sampling
    request_id = validation.checked_request_id(message.request_id)
    validation.check_adapter(message.adapter, model)
    validation.check_salt(message.cache_salt)
    sampling = validation.sampling(params, model.vocab_size)
    tokens, rendered_end = prompt_tokens(message, tokenizer, model, fixed=fixed)
    reading = _reading(message, tokenizer, rendered_end)
    max_tokens = validation.max_tokens(params, len(tokens), model.context, default_max_tokens)
    validation.check_min_tokens(params.min_tokens, max_tokens)
    validation.check_prompt_logprobs(params, len(tokens))
    stop_ids = own_stop_ids = validation.stop_ids(params, model.vocab_size)
    if not params.ignore_eos:
        if message.suffix and tokenizer.infilling:
            own_stop_ids += tokenizer.infilling.ends
        stop_ids = [*model.eos_token_ids, *own_stop_ids]
    for word in validation.bad_words(params, has_tokenizer=tokenizer.backend is not None):
        sampling.bad_words.extend(sampling_pb2.BadWord(token_ids=ids) for ids in tokenizer.spellings(word))
    if (grammar := _grammar(message, tokenizer, stop_ids, fixed)) is not None:
        sampling.grammar.CopyFrom(grammar)
        if reading is not None and (reasoning := _before_grammar(reading, tokenizer)) is not None:
            sampling.before_grammar.CopyFrom(reasoning)
            reading = replace(reading, marker_ends=True)
    choices = validation.completions(params)
    validation.check_priority(message.priority)
    return Request(
        request_id=request_id,
        internal_id=f"{request_id}.{secrets.token_hex(4)}",
        tokens=tokens,
        prompt_len=len(tokens),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        own_stop_ids=None if params.ignore_eos else own_stop_ids,
        salt=message.cache_salt,
        vocab_size=model.vocab_size,
        ttft_s=validation.ttft_objective(message),
        stops=validation.stop_strings(params, has_tokenizer=tokenizer.backend is not None),
        include_stop=params.include_stop,
        show_special=params.show_special_tokens,
        choices=choices,
        adapter=message.adapter,
        adapter_fingerprint=model.adapters.get(message.adapter, b""),
        priority=message.priority,
        reading=reading,
    )


def _reading(message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, rendered_end: str) -> Reading | None:
    """How to read the answer: as the message says, or by the format of its chat template."""
    answer_format, chat = tokenizer.answer_format, message.chat
    if message.HasField("reading"):
        wanted = message.reading
        tools = tools_of(wanted.tools, "reading.tools")
        reading = Reading(answer_format, tools, wanted.begins_in_reasoning, wanted.one_call)
    elif message.WhichOneof("input") == "chat" and not chat.raw:
        one_call = chat.HasField("parallel_calls") and not chat.parallel_calls
        begins_inside = answer_format.begins_inside(rendered_end, continued=chat.continue_last_message)
        reading = Reading(answer_format, tools_of(chat.tools), begins_inside, one_call)
    else:
        return None
    return reading if reading.finds_parts else None


def _before_grammar(reading: Reading, tokenizer: Tokenizer) -> sampling_pb2.ReasoningTokens | None:
    """The tokens of reasoning before a text that fits a grammar. Raises InvalidRequest if tokens cannot show its
    end."""
    if not reading.format.reasons:
        return None
    opening, close = tokenizer.reasoning_ids()
    if reading.begins_inside and not close:
        raise InvalidRequest(
            "this model's prompt ends within reasoning, whose end is not a token of its own; turn the reasoning off,"
            ' for example with chat_template_kwargs {"enable_thinking": false}',
            field="sampling.grammar",
            bound="absent while this model reasons",
        )
    if not close or (opening is None and not reading.begins_inside):
        return None
    headers = reading.format.headers(offers_tools=bool(reading.tools)) if opening is not None else ()
    return sampling_pb2.ReasoningTokens(
        open=None if reading.begins_inside else opening,
        close=close,
        headers=[sampling_pb2.TokenRun(token_ids=tokenizer.encode(text, special=False)) for text in headers],
    )


def _grammar(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, stop_ids: list[int], fixed: bool
) -> common_pb2.Grammar | None:
    """The grammar of the answer: the client's, or that of a forced tool call."""
    params, calls = message.sampling, message.WhichOneof("input") == "chat" and message.chat.HasField("tool_choice")
    if not params.HasField("grammar") and not calls:
        return None
    if tokenizer.backend is None:
        raise InvalidRequest(
            "this checkpoint has no tokenizer.json, so no text can fit a grammar",
            field="sampling.grammar",
            bound="no grammar with this model",
        )
    if params.ignore_eos or not stop_ids:
        raise InvalidRequest(
            "with a grammar the text must be able to end where the grammar does",
            field="sampling.ignore_eos",
            bound="false with a grammar, and a model with an end-of-sequence token or a stop token id",
        )
    if not calls:
        if not fixed:
            grammar_schema.check(params.grammar)
        return params.grammar
    if params.HasField("grammar"):
        raise InvalidRequest(
            "tool_choice forces a call, which excludes a grammar and a response format",
            field="chat.tool_choice",
            bound="absent with a grammar",
        )
    offered = tools_of(message.chat.tools)
    calls_format = tokenizer.answer_format.calls
    if not offered or calls_format is None:
        raise InvalidRequest(
            "tool_choice forces a call, but there are no tools", field="chat.tool_choice", bound="absent without tools"
        )
    if calls_format not in forced_calls.FORMATS:
        raise InvalidRequest(
            "this model writes calls with special tokens, which no grammar can force",
            field="chat.tool_choice",
            bound="absent with this model",
        )
    return forced_calls.forced(offered, message.chat.tool_choice, calls_format)
