"""The client: text or token ids in, a completion or a stream of pieces out, over gRPC.

    Client.generate ── collects ──▶ Client.stream ── build_request ──▶ Generate ── StreamReader ──▶ pieces
    Client.workers, scale, autoscaling, drain, audit, ... ── one _Question each ──▶ a value of tandem.answers

Client blocks and AsyncClient awaits; they differ in that alone. What is asked and how the answer is read is written
once, outside of both. Every error is a class of tandem.errors. The server checks the values of a request; here only
what cannot be put into a message is refused.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import reprlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

import grpc
import grpc.aio

from tandem import answers, tracing
from tandem.answers import Audit, Autoscaling, Completion, Diagnosis, Drained, Job, ModelInfo, Piece, Pools, Receipt
from tandem.errors import InvalidRequest, TooLarge, Unavailable
from tandem.status import from_rpc
from tandem.v1 import admin_pb2, common_pb2, generation_pb2, jobs_pb2

DEFAULT_TARGET = "localhost:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message sent or read. Well above what a router accepts, so that its own answer is what the caller sees."""
WATCH_TRIES, WATCH_PAUSE_S = 20, 2.0
"""How often, and with pauses of how many seconds at most, a job's watcher asks for a router that answers."""
LONGEST_S = 1e9
"""A deadline further away is this one, some 30 years."""

GENERATION = "tandem.v1.GenerationService"
ADMIN = "tandem.v1.AdminService"
JOBS = "tandem.v1.JobService"

# A call is tried again only while the server has not answered at all: gRPC commits a call at its first response.
# Scaling and draining change the cluster, so they are tried once.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": GENERATION},
                {"service": JOBS},
                {"service": ADMIN, "method": "ListWorkers"},
                {"service": ADMIN, "method": "GetScaling"},
                {"service": ADMIN, "method": "Audit"},
                {"service": ADMIN, "method": "Diagnose"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}

Prompt = str | bytes | Iterable[int]
Answer = TypeVar("Answer")


class Options(TypedDict, total=False):
    """What `generate` and `stream` take besides the prompt. Absent or None: the server's default.

    The server answers a value out of its bound with InvalidRequest, which names the field and the bound.
    """

    messages: Sequence[Mapping[str, str | bytes]] | None
    """A chat instead of a prompt, each {"role": ..., "content": ...}, rendered with the model's chat template."""
    max_tokens: int | None
    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    """0 to 2^64-1. The same seed, prompt and model give the same tokens. The receipt has the one that was used."""
    ignore_eos: bool
    stop_token_ids: Iterable[int] | None
    repetition_penalty: float | None
    """Over 1: what the prompt or the completion holds already becomes less likely, as in transformers and vLLM."""
    frequency_penalty: float | None
    """Off a token's logit for each time that the completion holds it; -2 to 2, as in OpenAI's API."""
    presence_penalty: float | None
    """Off a token's logit once if the completion holds it; -2 to 2."""
    logit_bias: Mapping[int, float] | None
    """Token id to what is added to its logit, -100 to 100."""
    min_tokens: int | None
    """Nothing that would end the completion is chosen before it has so many tokens."""
    logprobs: int | None
    """The log probability of each token and of this many most likely ones at its place, 0 to 20. They are the model's
    own: before bias, penalties, temperature and filters."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt but the first, which nothing precedes. The prompt is computed whole then,
    whatever is cached."""
    grammar: Mapping[str, Any] | None
    """What the text must fit, exactly one of {"json_schema": a schema as dict or JSON}, {"json": True},
    {"regex": ...}, {"ebnf": ...} and {"choice": [...]}."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings."""
    include_stop: bool
    """The text ends with the stop string instead."""
    adapter: str | None
    """The name of an adapter; absent: the base model. `model_info` lists them."""
    cache_salt: str | bytes | None
    """Requests with different salts never share cached KV."""
    priority: int | None
    """-1000 to 1000; the smaller, the sooner it is placed when requests wait. Absent: 0."""
    ttft_slo: float | None
    """Seconds. A first token later than this is of no use: Busy as soon as that is expected."""
    request_id: str | None
    """To find the request again in logs; made up by the router when absent."""


def build_request(
    prompt: Prompt | None,
    *,
    messages: Sequence[Mapping[str, str | bytes]] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    ignore_eos: bool = False,
    stop_token_ids: Iterable[int] | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = None,
    include_stop: bool = False,
    n: int | None = None,
    adapter: str | None = None,
    cache_salt: str | bytes | None = None,
    priority: int | None = None,
    ttft_slo: float | None = None,
    request_id: str | None = None,
) -> generation_pb2.GenerateRequest:
    """The message for these options. Raises InvalidRequest or TooLarge for what no message can hold."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give either a prompt or messages", field="prompt", bound="exactly one of the two")
    request = generation_pb2.GenerateRequest()
    if messages is not None:
        request.chat.SetInParent()
        for place, message in enumerate(messages):
            _add_message(f"chat.messages[{place}]", message, request.chat)
    elif isinstance(prompt, str | bytes):
        request.text = _bytes("text", prompt)
    else:
        request.token_ids.SetInParent()
        _add_ids("token_ids", prompt, request.token_ids.ids)

    sampling = request.sampling
    _set(sampling, "max_tokens", max_tokens, "an integer of 64 bits")
    _set(sampling, "temperature", temperature, "a number")
    _set(sampling, "top_p", top_p, "a number")
    _set(sampling, "top_k", top_k, "an integer of 64 bits")
    _set(sampling, "min_p", min_p, "a number")
    _set(sampling, "seed", seed, "an integer from 0 to 2^64-1")
    _set(sampling, "ignore_eos", ignore_eos, "true or false")
    if stop_token_ids is not None:
        _add_ids("stop_token_ids", stop_token_ids, sampling.stop_token_ids)
    _set(sampling, "repetition_penalty", repetition_penalty, "a number")
    _set(sampling, "frequency_penalty", frequency_penalty, "a number")
    _set(sampling, "presence_penalty", presence_penalty, "a number")
    if logit_bias is not None:
        try:
            sampling.logit_bias.update(logit_bias)
        except (TypeError, ValueError) as error:
            raise _unencodable("logit_bias", logit_bias, "a mapping of token ids to numbers") from error
    _set(sampling, "min_tokens", min_tokens, "an integer of 64 bits")
    _set(sampling, "logprobs", logprobs, "an integer of 64 bits")
    _set(sampling, "prompt_logprobs", prompt_logprobs, "an integer of 64 bits")
    if grammar is not None:
        _add_grammar(grammar, sampling.grammar)
    if stop is not None:
        given = [stop] if isinstance(stop, str | bytes) else stop
        try:
            sampling.stop.extend([_bytes("stop", one) for one in given])
        except TypeError as error:
            raise _unencodable("stop", stop, "a string or a list of strings") from error
    _set(sampling, "include_stop", include_stop, "true or false")
    _set(sampling, "n", n, "an integer of 64 bits")
    if cache_salt is not None:
        request.cache_salt = _bytes("cache_salt", cache_salt)
    _set(request, "priority", priority, "an integer of 64 bits")
    _set(request, "ttft_slo_seconds", ttft_slo, "a number of seconds")
    _set(request, "adapter", adapter, "Unicode text")
    _set(request, "request_id", request_id, "Unicode text")
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        bound = f"at most {MAX_MESSAGE_BYTES} bytes"
        raise TooLarge(f"the request has {size} bytes; {bound} can be sent", field="prompt", bound=bound)
    return request


def _unencodable(field: str, value: object, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {bound}, not {reprlib.repr(value)}", field=field, bound=bound)


def _set(message: Any, field: str, value: object, bound: str) -> None:
    """Sets a field unless the value is None. Protobuf raises for another type, a number out of range, bad Unicode."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise _unencodable(field, value, bound) from error


def _bytes(field: str, text: str | bytes) -> bytes:
    try:
        return text if isinstance(text, bytes) else text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise _unencodable(field, text, "bytes or Unicode text") from error


def _add_ids(field: str, ids: Any, into: Any) -> None:
    try:
        values = list(ids)
        into.extend(values)
    except (TypeError, ValueError) as error:
        raise _unencodable(field, ids, "a list of integers of 64 bits") from error


def _add_grammar(grammar: Mapping[str, Any], into: common_pb2.Grammar) -> None:
    kinds = "exactly one of json_schema, json, regex, ebnf and choice"
    if (
        not isinstance(grammar, Mapping)
        or len(grammar) != 1
        or not {*grammar} <= {"json_schema", "json", "regex", "ebnf", "choice"}
    ):
        raise _unencodable("grammar", grammar, kinds)
    [(kind, value)] = grammar.items()
    if kind == "json":
        _set(into, kind, value, "true")
    elif kind == "choice":
        try:
            into.choice.texts.extend([_bytes("grammar.choice", text) for text in value])
        except TypeError as error:
            raise _unencodable("grammar.choice", value, "a list of strings") from error
    else:
        if kind == "json_schema" and not isinstance(value, str | bytes):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError) as error:
                raise _unencodable("grammar.json_schema", value, "a JSON schema") from error
        _set(into, kind, _bytes(f"grammar.{kind}", value), "text")


def _add_message(field: str, message: Mapping[str, str | bytes], chat: generation_pb2.Chat) -> None:
    try:
        role, content = message["role"], message["content"]
    except (KeyError, TypeError) as error:
        raise _unencodable(field, message, "an object with role and content") from error
    _set(chat.messages.add(content=_bytes(f"{field}.content", content)), "role", role, "Unicode text")


def _seconds(timeout: float | None) -> float | None:
    """A deadline that gRPC can keep: it would take 0 for "none" and overflow into the past at some 1e12."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or math.isnan(timeout) or timeout <= 0:
        raise _unencodable("timeout", timeout, "more than 0 seconds")
    return min(float(timeout), LONGEST_S)


# ---- questions to the cluster


@dataclass(frozen=True, slots=True)
class _Question(Generic[Answer]):
    """One unary call: where it goes, what it says, how long it may take (seconds), and how its answer is read."""

    path: str
    request: Any
    answer: Any
    read: Callable[[Any], Answer]
    timeout: float = 30.0


def _workers() -> _Question[Pools]:
    return _Question(
        f"/{ADMIN}/ListWorkers", admin_pb2.ListWorkersRequest(), admin_pb2.ListWorkersResponse, answers.pools
    )


def _scale(prefill: int | None, decode: int | None) -> _Question[dict[str, int]]:
    request = admin_pb2.ScalePoolsRequest()
    for role, size in (("prefill", prefill), ("decode", decode)):
        try:
            request.wanted.update({} if size is None else {role: size})
        except (TypeError, ValueError) as error:
            raise _unencodable(role, size, "an integer of 32 bits, 0 or more") from error
    return _Question(f"/{ADMIN}/ScalePools", request, admin_pb2.ScalePoolsResponse, lambda answer: dict(answer.wanted))


def _autoscaling() -> _Question[Autoscaling]:
    return _Question(
        f"/{ADMIN}/GetScaling", admin_pb2.GetScalingRequest(), admin_pb2.GetScalingResponse, answers.autoscaling
    )


def _drain(worker_id: str, grace: float) -> _Question[Drained]:
    if not math.isfinite(grace) or grace < 0:
        raise _unencodable("grace", grace, "0 seconds or more")
    return _Question(
        f"/{ADMIN}/DrainWorker",
        admin_pb2.DrainWorkerRequest(worker_id=worker_id, grace_seconds=grace),
        admin_pb2.DrainWorkerResponse,
        lambda answer: Drained(answer.finished, answer.cut),
        timeout=min(grace + 30.0, LONGEST_S),
    )


def _audit() -> _Question[Audit]:
    return _Question(f"/{ADMIN}/Audit", admin_pb2.AuditRequest(), admin_pb2.AuditResponse, answers.audit)


def _diagnose() -> _Question[Diagnosis]:
    return _Question(
        f"/{ADMIN}/Diagnose", admin_pb2.DiagnoseRequest(), admin_pb2.DiagnoseResponse, answers.diagnosis, timeout=120.0
    )


def _submit(requests: list[generation_pb2.GenerateRequest]) -> _Question[list[Job]]:
    for request in requests:
        request.request_id = request.request_id or secrets.token_hex(8)  # so that a retry is the same job
    return _Question(
        f"/{JOBS}/SubmitJobs",
        jobs_pb2.SubmitJobsRequest(requests=requests),
        jobs_pb2.SubmitJobsResponse,
        lambda answer: [answers.job(one) for one in answer.jobs],
    )


def _get_job(job_id: str) -> _Question[Job]:
    request = jobs_pb2.GetJobRequest()
    _set(request, "job_id", job_id, "Unicode text")
    return _Question(f"/{JOBS}/GetJob", request, jobs_pb2.GetJobResponse, lambda answer: answers.job(answer.job))


def _cancel_job(job_id: str) -> _Question[Job]:
    request = jobs_pb2.CancelJobRequest()
    _set(request, "job_id", job_id, "Unicode text")
    return _Question(f"/{JOBS}/CancelJob", request, jobs_pb2.CancelJobResponse, lambda answer: answers.job(answer.job))


class _Watching:
    """Where a watcher of a job stands, and how long it waits for a router."""

    def __init__(self, job_id: str, from_token: int) -> None:
        self._job_id = job_id
        self._failures = 0
        self.reader = answers.StreamReader(from_token)

    def request(self) -> jobs_pb2.WatchJobRequest:
        request = jobs_pb2.WatchJobRequest()
        _set(request, "job_id", self._job_id, "Unicode text")
        _set(request, "from_token", self.reader.due, "an integer of 32 bits, 0 or more")
        return request

    def read(self, answer: jobs_pb2.WatchJobResponse) -> Piece | None:
        self._failures = 0
        return None if self.reader.has(answer.event) else self.reader.read(answer.event)

    def after(self, error: grpc.RpcError) -> float:
        """Seconds until the next try. Raises what ends the watch."""
        found = from_rpc(error)
        self._failures += 1
        if not isinstance(found, Unavailable) or self._failures > WATCH_TRIES:
            raise found from error
        return min(0.1 * float(2**self._failures), WATCH_PAUSE_S)


def _receipts(request_id: str, limit: int, within: float) -> _Question[list[Receipt]]:
    request = admin_pb2.ListReceiptsRequest()
    _set(request, "request_id", request_id, "Unicode text")
    _set(request, "limit", limit, "an integer of 32 bits, 0 or more")
    _set(request, "within_seconds", within, "a number of seconds")
    return _Question(f"/{ADMIN}/ListReceipts", request, admin_pb2.ListReceiptsResponse, answers.receipts)


def _model_info() -> _Question[ModelInfo]:
    return _Question(
        f"/{GENERATION}/GetModelInfo",
        generation_pb2.GetModelInfoRequest(),
        generation_pb2.GetModelInfoResponse,
        answers.model_info,
    )


def _channel_options(target: str) -> list[tuple[str, Any]]:
    host = target.rpartition(":")[0].strip("[]")
    return [
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: another one may get another router
        ("grpc.http2.max_pings_without_data", 0),  # a long prefill is silent; the pings must go on
        # This machine is never behind the proxy that the environment may name.
        ("grpc.enable_http_proxy", 0 if host in ("localhost", "127.0.0.1", "::1") else 1),
    ]


# ---- a deadline in words: gRPC's own name neither the time nor what had come by then


def _late(timeout: float | None, reader: answers.StreamReader) -> str:
    came = f"{reader.tokens} token{'s' * (reader.tokens != 1)} had come" if reader.tokens else "no token had come"
    return f"{'the deadline' if timeout is None else f'the deadline of {timeout:g} s'} passed; {came}"


def _unanswered(question: _Question[Any]) -> str:
    return f"{question.path.rpartition('/')[2]} was not answered within {question.timeout:g} s"


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    key = os.environ.get("TANDEM_API_KEY", "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the API key is no printable ASCII", field="api_key", bound="printable ASCII")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _span(name: str, target: str) -> tracing.Span:
    """Of one generation or of jobs submitted, in the application's own traces, if it has set up OpenTelemetry."""
    return tracing.of_application().call(name, {"server.address": target})


@dataclass(frozen=True, slots=True)
class Tls:
    """How a router is known, and what it is shown: PEM files. Without `ca` nothing is encrypted."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls) -> Tls:
        """TANDEM_TLS_CA, and where the router asks for a certificate TANDEM_TLS_CLIENT_CERT and ..._KEY."""
        names = ("TANDEM_TLS_CA", "TANDEM_TLS_CLIENT_CERT", "TANDEM_TLS_CLIENT_KEY")
        return cls(*(Path(os.environ[name]) if os.environ.get(name) else None for name in names))

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Raises InvalidRequest for files that cannot be read, or half of a pair."""
        if (self.cert is None) != (self.key is None) or (self.cert is not None and self.ca is None):
            raise InvalidRequest("a certificate is shown with its key, to a router of a known authority", field="tls")
        if self.ca is None:
            return None
        try:
            pems = [path.expanduser().read_bytes() if path else None for path in (self.ca, self.key, self.cert)]
        except OSError as error:
            raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}", field="tls") from error
        return grpc.ssl_channel_credentials(*pems)


# ---- the two clients


class AsyncClient:
    """Talks to one cluster from asyncio. One connection, any number of requests at a time; close it when done."""

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """`target` is the router's HOST:PORT, `api_key` what it asks for, by default TANDEM_API_KEY of the environment;
        `tls` by default as its TANDEM_TLS_CA says. Connects when it is first used."""
        self.target = target
        self._metadata = _metadata(api_key)
        credentials, options = (tls or Tls.of_environment()).credentials(), _channel_options(target)
        self._channel = (
            grpc.aio.secure_channel(target, credentials, options=options)
            if credentials
            else grpc.aio.insecure_channel(target, options=options)
        )
        self._generate = self._channel.unary_stream(
            f"/{GENERATION}/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            f"/{JOBS}/WatchJob",
            request_serializer=jobs_pb2.WatchJobRequest.SerializeToString,
            response_deserializer=jobs_pb2.WatchJobResponse.FromString,
        )

    @overload
    async def generate(
        self, prompt: Prompt | None = None, *, n: None = None, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Prompt | None = None, *, n: int, timeout: float | None = None, **options: Unpack[Options]
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """The whole completion of a prompt, which is text or token ids; see Options. With `n` so many, as a list.

        `timeout` is in seconds, for the whole request; absent: the server's limit. Raises a TandemError.
        """
        pieces = [piece async for piece in self.stream(prompt, n=n, timeout=timeout, **options)]
        return answers.completion(pieces) if n is None else answers.completions(pieces)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Piece, None]:
        """The completion piece by piece, each as soon as it arrives. The last one has the receipt; with `n` the pieces
        of the answers are mixed, and the last one of each has its receipt.

        The request is sent when the first piece is asked for; `aclose()`, or leaving the task, cancels it.
        Raises InvalidRequest at once for what cannot be sent, and a TandemError while iterating.
        """
        return self._pieces(build_request(prompt, n=n, **options), _seconds(timeout))

    async def _pieces(
        self, request: generation_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[Piece, None]:
        reader = answers.StreamReader()
        with _span("generate", self.target) as span:
            call = self._generate(request, timeout=timeout, metadata=(*self._metadata, *span.headers))
            try:
                async for event in call:
                    if (piece := reader.read(event)) is not None:
                        yield piece
                reader.end()
            except grpc.RpcError as error:
                raise from_rpc(error, late=_late(timeout, reader)) from error
            finally:
                call.cancel()  # does nothing to a call that is over

    async def submit(self, prompt: Prompt | None = None, *, n: int | None = None, **options: Unpack[Options]) -> Job:
        """A job: its tokens are kept, whatever becomes of this client and of the router. Returns when that is so.

        The same `request_id` twice is one job; without one, this call makes one up. Raises a TandemError.
        """
        return (await self._submitted([build_request(prompt, n=n, **options)]))[0]

    async def submit_many(
        self, prompts: Iterable[Prompt], *, n: int | None = None, **options: Unpack[Options]
    ) -> list[Job]:
        """A job for each of up to 128 prompts, all with these options. None is taken if one of them is wrong."""
        return await self._submitted([build_request(prompt, n=n, **options) for prompt in prompts])

    async def watch(self, job_id: str, *, from_token: int = 0) -> AsyncGenerator[Piece, None]:
        """The tokens of a job, from its beginning or from `from_token`, piece by piece as they come; the last one has
        the receipt. What came in one piece with `from_token` comes, too.

        A router that is lost is no end: the next one goes on where this one stopped. Raises a TandemError: the job's
        own, NotFound for one that is not kept, Unavailable when no router was there for half a minute.
        """
        watching = _Watching(job_id, from_token)
        while not watching.reader.complete:
            call = self._watch(watching.request(), metadata=self._metadata)
            try:
                async for answer in call:
                    if (piece := watching.read(answer)) is not None:
                        yield piece
                watching.reader.end()
            except grpc.RpcError as error:
                if not watching.reader.complete:
                    await asyncio.sleep(watching.after(error))
            finally:
                call.cancel()

    async def job(self, job_id: str) -> Job:
        """How far it is."""
        return await self._ask(_get_job(job_id))

    async def cancel(self, job_id: str) -> Job:
        """Ends it within seconds; one that has ended stays as it is."""
        return await self._ask(_cancel_job(job_id))

    async def workers(self) -> Pools:
        """Every worker of the cluster, and the wanted pool sizes."""
        return await self._ask(_workers())

    async def scale(self, prefill: int | None = None, decode: int | None = None) -> dict[str, int]:
        """Set how many workers are wanted; None keeps a pool. Returns the wanted sizes of all pools."""
        return await self._ask(_scale(prefill, decode))

    async def autoscaling(self) -> Autoscaling:
        """What the autoscaler found when it looked last. Raises PreconditionFailed where it is off."""
        return await self._ask(_autoscaling())

    async def drain(self, worker_id: str, grace: float = 30.0) -> Drained:
        """Stop a worker after its requests, or after `grace` seconds. Returns when it is drained."""
        return await self._ask(_drain(worker_id, grace))

    async def audit(self) -> Audit:
        """The block ledger of every worker."""
        return await self._ask(_audit())

    async def receipts(self, request_id: str = "", limit: int = 0, within: float = 0.0) -> list[Receipt]:
        """Of the last thousand requests at this router, the newest first; of one only, or so many at most, or of those
        that ended `within` so many seconds."""
        return await self._ask(_receipts(request_id, limit, within))

    async def diagnose(self) -> Diagnosis:
        """Every prefill-decode pair probed, the registry and the versions."""
        return await self._ask(_diagnose())

    async def model_info(self) -> ModelInfo:
        """What the cluster serves."""
        return await self._ask(_model_info())

    async def _submitted(self, requests: list[generation_pb2.GenerateRequest]) -> list[Job]:
        with _span("submit", self.target) as span:
            return await self._ask(_submit(requests), span)

    async def _ask(self, question: _Question[Answer], span: tracing.Span = tracing.NOTHING) -> Answer:
        call = self._channel.unary_unary(
            question.path,
            request_serializer=type(question.request).SerializeToString,
            response_deserializer=question.answer.FromString,
        )
        metadata = (*self._metadata, *span.headers)
        try:
            return question.read(await call(question.request, timeout=question.timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise from_rpc(error, late=_unanswered(question)) from error

    async def close(self) -> None:
        """Cancels what still runs and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """Talks to one cluster, blocking. Threads may share it; close it when done."""

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """`target` is the router's HOST:PORT, `api_key` what it asks for, by default TANDEM_API_KEY of the environment;
        `tls` by default as its TANDEM_TLS_CA says. Connects when it is first used."""
        self.target = target
        self._metadata = _metadata(api_key)
        credentials, options = (tls or Tls.of_environment()).credentials(), _channel_options(target)
        self._channel = (
            grpc.secure_channel(target, credentials, options=options)
            if credentials
            else grpc.insecure_channel(target, options=options)
        )
        self._generate = self._channel.unary_stream(
            f"/{GENERATION}/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            f"/{JOBS}/WatchJob",
            request_serializer=jobs_pb2.WatchJobRequest.SerializeToString,
            response_deserializer=jobs_pb2.WatchJobResponse.FromString,
        )

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, n: None = None, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, n: int, timeout: float | None = None, **options: Unpack[Options]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """The whole completion of a prompt, which is text or token ids; see Options. With `n` so many, as a list.

        `timeout` is in seconds, for the whole request; absent: the server's limit. Raises a TandemError.
        """
        pieces = list(self.stream(prompt, n=n, timeout=timeout, **options))
        return answers.completion(pieces) if n is None else answers.completions(pieces)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generator[Piece, None, None]:
        """The completion piece by piece, each as soon as it arrives. The last one has the receipt; with `n` the pieces
        of the answers are mixed, and the last one of each has its receipt.

        The request is sent when the first piece is asked for; `close()`, or dropping the iterator, cancels it.
        Raises InvalidRequest at once for what cannot be sent, and a TandemError while iterating.
        """
        return self._pieces(build_request(prompt, n=n, **options), _seconds(timeout))

    def _pieces(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> Generator[Piece, None, None]:
        reader = answers.StreamReader()
        with _span("generate", self.target) as span:
            call = self._generate(request, timeout=timeout, metadata=(*self._metadata, *span.headers))
            try:
                for event in call:
                    if (piece := reader.read(event)) is not None:
                        yield piece
                reader.end()
            except grpc.RpcError as error:
                raise from_rpc(error, late=_late(timeout, reader)) from error
            finally:
                call.cancel()  # does nothing to a call that is over

    def submit(self, prompt: Prompt | None = None, *, n: int | None = None, **options: Unpack[Options]) -> Job:
        """A job: its tokens are kept, whatever becomes of this client and of the router. Returns when that is so.

        The same `request_id` twice is one job; without one, this call makes one up. Raises a TandemError.
        """
        return self._submitted([build_request(prompt, n=n, **options)])[0]

    def submit_many(self, prompts: Iterable[Prompt], *, n: int | None = None, **options: Unpack[Options]) -> list[Job]:
        """A job for each of up to 128 prompts, all with these options. None is taken if one of them is wrong."""
        return self._submitted([build_request(prompt, n=n, **options) for prompt in prompts])

    def watch(self, job_id: str, *, from_token: int = 0) -> Generator[Piece, None, None]:
        """The tokens of a job, from its beginning or from `from_token`, piece by piece as they come; the last one has
        the receipt. What came in one piece with `from_token` comes, too.

        A router that is lost is no end: the next one goes on where this one stopped. Raises a TandemError: the job's
        own, NotFound for one that is not kept, Unavailable when no router was there for half a minute.
        """
        watching = _Watching(job_id, from_token)
        while not watching.reader.complete:
            call = self._watch(watching.request(), metadata=self._metadata)
            try:
                for answer in call:
                    if (piece := watching.read(answer)) is not None:
                        yield piece
                watching.reader.end()
            except grpc.RpcError as error:
                if not watching.reader.complete:
                    time.sleep(watching.after(error))
            finally:
                call.cancel()

    def job(self, job_id: str) -> Job:
        """How far it is."""
        return self._ask(_get_job(job_id))

    def cancel(self, job_id: str) -> Job:
        """Ends it within seconds; one that has ended stays as it is."""
        return self._ask(_cancel_job(job_id))

    def workers(self) -> Pools:
        """Every worker of the cluster, and the wanted pool sizes."""
        return self._ask(_workers())

    def scale(self, prefill: int | None = None, decode: int | None = None) -> dict[str, int]:
        """Set how many workers are wanted; None keeps a pool. Returns the wanted sizes of all pools."""
        return self._ask(_scale(prefill, decode))

    def autoscaling(self) -> Autoscaling:
        """What the autoscaler found when it looked last. Raises PreconditionFailed where it is off."""
        return self._ask(_autoscaling())

    def drain(self, worker_id: str, grace: float = 30.0) -> Drained:
        """Stop a worker after its requests, or after `grace` seconds. Returns when it is drained."""
        return self._ask(_drain(worker_id, grace))

    def audit(self) -> Audit:
        """The block ledger of every worker."""
        return self._ask(_audit())

    def receipts(self, request_id: str = "", limit: int = 0, within: float = 0.0) -> list[Receipt]:
        """Of the last thousand requests at this router, the newest first; of one only, or so many at most, or of those
        that ended `within` so many seconds."""
        return self._ask(_receipts(request_id, limit, within))

    def diagnose(self) -> Diagnosis:
        """Every prefill-decode pair probed, the registry and the versions."""
        return self._ask(_diagnose())

    def model_info(self) -> ModelInfo:
        """What the cluster serves."""
        return self._ask(_model_info())

    def _submitted(self, requests: list[generation_pb2.GenerateRequest]) -> list[Job]:
        with _span("submit", self.target) as span:
            return self._ask(_submit(requests), span)

    def _ask(self, question: _Question[Answer], span: tracing.Span = tracing.NOTHING) -> Answer:
        call = self._channel.unary_unary(
            question.path,
            request_serializer=type(question.request).SerializeToString,
            response_deserializer=question.answer.FromString,
        )
        metadata = (*self._metadata, *span.headers)
        try:
            return question.read(call(question.request, timeout=question.timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise from_rpc(error, late=_unanswered(question)) from error

    def close(self) -> None:
        """Cancels what still runs and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
