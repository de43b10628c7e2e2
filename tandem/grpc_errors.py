"""Converts the error tree to gRPC statuses and back. Only this file does so.

Outwards: code, message and `grpc-status-details-bin` with ErrorInfo (reason, domain "tandem"), BadRequest (field and
bound), RetryInfo; a retryable refusal also carries the `grpc-retry-pushback-ms` trailer. Inwards: the same details
become the same class of error again. Clients switch on the class or on `reason`, never on the message.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem import errors
from tandem.errors import (
    DeadlineExceeded,
    InternalError,
    TandemError,
    WorkerLost,
)
from tandem.rpc.message_parts import LARGE_BYTES, check_parts

log = structlog.get_logger(__name__)
DOMAIN = "tandem"
Read = Callable[[bytes], Awaitable[Any]]
Metadata = Mapping[str, str | bytes]
# Takes a call's method and metadata; raises Unauthenticated and PermissionDenied.
Guard = Callable[[str, Metadata], None]
OPEN_METHOD = "/grpc.health.v1.Health/Check"  # needs no key: probes have no credentials
OPEN_CALLS = 32  # calls of it whose message has not come completely
OPEN_TIMEOUT_S = 5.0  # for that message
MESSAGE_BYTES, NAME_BYTES = 1000, 300  # so that errors with all details fit into gRPC's trailers
# grpcio's message, with the status INTERNAL, for a write into a call that has just ended; it replaces the call's own.
WRITE_FAILED = "Internal error from Core"


def _leaves(cls: type[TandemError]) -> list[type[TandemError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _leaves(child))]


# A reason determines the class; if a class is raised with another reason, the status decides.
_BY_REASON = {cls.default_reason: cls for cls in _leaves(TandemError)}
_BY_STATUS: dict[str, type[TandemError]] = {}
for _cls in _leaves(TandemError):
    _BY_STATUS.setdefault(_cls.status, _cls)
_BY_STATUS.update(
    RESOURCE_EXHAUSTED=errors.Busy,
    UNAVAILABLE=errors.Unavailable,
    INVALID_ARGUMENT=errors.InvalidRequest,
    INTERNAL=InternalError,
    UNKNOWN=InternalError,
    UNIMPLEMENTED=errors.PreconditionFailed,
    OUT_OF_RANGE=errors.InvalidRequest,
)


def shown(text: str, most: int = MESSAGE_BYTES) -> str:
    """The text, bounded and in valid UTF-8: a message may quote client input of any length, with lone surrogates."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "..."


def to_status(error: TandemError) -> status_pb2.Status:
    """google.rpc.Status with details."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata={"class": type(error).__name__, **_text(error, "bound")}
    )
    details: list[Any] = [info]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=shown(error.field, NAME_BYTES), description=shown(error.bound or "", NAME_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(error.retry_after * 1000))
        details.append(retry)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=shown(error.message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_rpc(error: grpc.RpcError, *, late: str = "the call timed out") -> TandemError:
    """The error that a peer raised, or the error for the broken call. Works for sync and aio calls.

    `late` is the message for a deadline that expired on this side; a peer that noticed it sends its own message.
    """
    code, message = error.code().name, error.details() or ""
    # Without details it is from gRPC and not from a Tandem server, so the peer is gone.
    if not _details(error) and (code == "UNAVAILABLE" or (code, message) == ("INTERNAL", WRITE_FAILED)):
        return WorkerLost(message or "the connection was lost")
    if code == "DEADLINE_EXCEEDED" and not _details(error):
        return DeadlineExceeded(late)
    if code == "RESOURCE_EXHAUSTED" and not _details(error):  # grpcio's own limit on a message
        return errors.TooLarge(message)
    details: dict[str, Any] = {}
    cls = _BY_STATUS.get(code, InternalError)
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            details["reason"] = info.reason
            details["bound"] = info.metadata.get("bound")
            named = getattr(errors, info.metadata.get("class", ""), None) or _BY_REASON.get(info.reason)
            if isinstance(named, type) and issubclass(named, TandemError) and named.status == code:
                cls = named
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            if bad.field_violations:
                details["field"] = bad.field_violations[0].field
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            details["retry_after"] = retry.retry_delay.ToMilliseconds() / 1000
    return cls(message, **details)


@contextmanager
def calling(peer: str) -> Iterator[None]:
    """Around calls to `peer`: raises any failure as a TandemError, WorkerLost when the peer is gone.

    A server that ends, or a channel that closes, also cancels a call. asyncio then raises CancelledError in a task that
    was not cancelled, and the task may end silently. Such a cancellation becomes WorkerLost; a cancellation of the task
    itself is passed on.
    """
    try:
        yield
    except grpc.aio.UsageError as error:  # the call began on a channel that had just been closed
        raise WorkerLost(f"the connection to {peer} is closed") from error
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.CANCELLED:
            raise WorkerLost(f"{peer} cancelled the call") from error
        raise from_rpc(error) from error
    except asyncio.CancelledError as error:
        if _meant():
            raise
        raise WorkerLost(f"the connection to {peer} was closed") from error


@contextmanager
def until_closed() -> Iterator[None]:
    """Around a call of AsyncClient: raises Cancelled if the client is closed meanwhile, as Client does. grpc.aio raises
    CancelledError, which a TaskGroup ignores in a task that was not cancelled; a cancellation of the task itself is
    passed on."""
    try:
        yield
    except asyncio.CancelledError as error:
        if _meant():
            raise
        raise errors.Cancelled("the client was closed") from error
    except grpc.aio.UsageError as error:  # the call began after that
        raise errors.Cancelled("the client was closed") from error


@contextmanager
def unless_closed() -> Iterator[None]:
    """Around the beginning of a call of Client: raises Cancelled if the client was closed."""
    try:
        yield
    except ValueError as error:
        if "closed" not in str(error):  # grpcio has no class of its own for a closed channel
            raise
        raise errors.Cancelled("the client was closed") from error


@contextmanager
def known_errors(where: str) -> Iterator[None]:
    """Around a whole request: raises any failure as a TandemError; a bug is logged and becomes InternalError."""
    try:
        yield
    except Exception as error:
        raise known(error, where) from error


def _meant() -> bool:
    """Whether a CancelledError comes from a cancellation of this task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def abort(context: grpc.aio.ServicerContext, error: TandemError) -> NoReturn:
    """Ends the call with this error."""
    status = rpc_status.to_status(to_status(error))
    if error.retry_after is not None:  # into the status itself: its trailers replace those set on the context
        pushback = ("grpc-retry-pushback-ms", str(int(error.retry_after * 1000)))
        status = status._replace(trailing_metadata=(*status.trailing_metadata, pushback))
    await context.abort_with_status(status)
    raise AssertionError("abort returned")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns any exception of a handler into a documented status. A bug becomes INTERNAL with an id, and its trace is
    logged; without this, grpcio would send UNKNOWN with the exception's text. The same holds for bytes that cannot be
    parsed, so requests are parsed here, after the guard has admitted the call."""

    def __init__(self, bounded: bool = False, guard: Guard | None = None) -> None:
        """`bounded`: requests come from clients and may have at most MOST_PARTS parts. `guard` checks every call except
        those of OPEN_METHOD."""
        self._bounded = bounded
        self._guard = guard
        self._open_calls: dict[asyncio.Timeout, None] = {}  # that wait for their message, longest first

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        try:
            self._check_caller(handler_call_details)
        except Exception as error:
            return grpc.stream_stream_rpc_method_handler(_refusal(error, method))
        read = self._reader(handler.request_deserializer or bytes, method)
        if method == OPEN_METHOD:
            return grpc.stream_unary_rpc_method_handler(
                self._answer_open(handler.unary_unary, read), None, handler.response_serializer
            )
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _guard_both(handler.stream_stream, read, method), None, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, read, method), None, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary, read, method), None, handler.response_serializer
        )

    def _check_caller(self, details: grpc.HandlerCallDetails) -> None:
        """Raises what the guard raises."""
        if self._guard is None or details.method == OPEN_METHOD:
            return
        try:
            self._guard(details.method, dict(details.invocation_metadata or ()))
        except TandemError as error:
            log.info("grpc.refused", method=details.method, reason=error.reason)
            raise

    def _answer_open(self, inner: Callable[..., Any], read: Read) -> Callable[..., Any]:
        """Receives the message itself: grpcio would wait for it without a limit, and hold what has come."""

        async def call(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with _answered(context, OPEN_METHOD):
                return await inner(await read(await self._receive_open(messages)), context)

        return call

    async def _receive_open(self, messages: AsyncIterator[bytes]) -> bytes:
        """The only message. At the limit of calls that wait for theirs, the longest waiting one ends. Raises
        TimeoutError."""
        async with asyncio.timeout(OPEN_TIMEOUT_S) as limit:
            if len(self._open_calls) >= OPEN_CALLS:
                longest = next(iter(self._open_calls))
                del self._open_calls[longest]
                if not longest.expired():
                    longest.reschedule(0.0)
            self._open_calls[limit] = None
            try:
                return await anext(aiter(messages), b"")
            finally:
                self._open_calls.pop(limit, None)

    def _reader(self, parse: Callable[[bytes], Any], method: str) -> Read:
        async def read(data: bytes) -> Any:
            """Raises InvalidRequest."""
            if self._bounded and len(data) > LARGE_BYTES:
                await asyncio.to_thread(check_parts, data, method)  # on a thread, so that streams are not delayed
            try:
                return parse(data)
            except DecodeError as error:
                raise errors.InvalidRequest(
                    "the bytes are not the message that this method takes",
                    field="message",
                    bound="protobuf, with UTF-8 in every string",
                ) from error

        return read


class _Stray(Exception):
    """An unrequested cancellation reached the end of a handler; without an answer the caller would wait."""


@asynccontextmanager
async def _answered(context: grpc.aio.ServicerContext, method: str) -> AsyncGenerator[None, None]:
    """Answers any error of a handler with its status."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except asyncio.CancelledError as error:
        if _meant():
            raise
        await abort(context, known(_Stray(error), method))
    except Exception as error:
        await abort(context, known(error, method))


def _refusal(error: Exception, method: str) -> Callable[..., Any]:
    """Refuses a call, of whatever kind, without receiving its message."""

    async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with _answered(context, method):
            raise error

    return call


def _guard_unary(inner: Callable[..., Any], read: Read, method: str) -> Callable[..., Any]:
    async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        async with _answered(context, method):
            return await inner(await read(data), context)

    return call


def _guard_stream(
    inner: Callable[..., AsyncGenerator[Any, None] | Awaitable[None]], read: Read, method: str
) -> Callable[..., Any]:
    """`inner` yields messages, or is a coroutine that writes them to the context itself."""

    # Written with context.write instead of yield: a cancellation while grpcio writes then surfaces here, and the
    # handler's generator is closed, its `finally` blocks awaited, before the call is over.
    async def call(data: bytes, context: grpc.aio.ServicerContext) -> None:
        async with _answered(context, method):
            answer = inner(await read(data), context)
            if isinstance(answer, Awaitable):
                await answer
                return
            async with aclosing(answer) as messages:
                async for message in messages:
                    await context.write(message)

    return call


def _guard_both(inner: Callable[..., AsyncGenerator[Any, None]], read: Read, method: str) -> Callable[..., Any]:
    """`inner` takes an async iterator of messages, and yields messages."""

    async def call(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async def messages() -> AsyncGenerator[Any, None]:
            async for data in requests:
                yield await read(data)

        async with _answered(context, method):
            async with aclosing(inner(messages(), context)) as answers:
                async for answer in answers:
                    await context.write(answer)

    return call


def known(error: Exception, where: str) -> TandemError:
    """The error itself if it is a TandemError; the peer's error for a broken call; otherwise an InternalError."""
    if isinstance(error, TandemError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc(error)
    if isinstance(error, grpc.aio.UsageError):
        return WorkerLost(f"{where}: a connection was closed")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"{where} took too long")
    incident = uuid.uuid4().hex[:12]
    log.error("bug", where=where, incident=incident, exc_info=error)
    return InternalError(f"internal error, incident {incident}: please report it with the server's log")


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    trailers: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailers or ():
        if key == "grpc-status-details-bin":
            return list(status_pb2.Status.FromString(value).details)
    return []


def _text(error: TandemError, name: str) -> dict[str, str]:
    value = getattr(error, name)
    return {name: shown(value, NAME_BYTES)} if value else {}
