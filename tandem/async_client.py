"""The client for asyncio, with the same methods as client.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack, overload

import grpc
import grpc.aio

from tandem.cluster_results import Audit, Autoscaling, Diagnosis, Drained, Pools, ServedAdapter
from tandem.grpc_errors import from_rpc, until_closed
from tandem.results import Completion, Job, ModelInfo, Piece, Receipt
from tandem.rpc import unary_calls
from tandem.rpc.channel import _Connection
from tandem.rpc.request_builder import Options, Prompt, _seconds, build_request, build_requests
from tandem.rpc.stream_reader import StreamReader, completion, completions
from tandem.rpc.unary_calls import Answer, Question
from tandem.rpc.watching import _late, _unanswered, _Watching
from tandem.telemetry import tracing
from tandem.v1 import generation_pb2


class AsyncClient(_Connection):
    """Talks to one cluster from asyncio. One connection, any number of requests at a time; close it when done."""

    _grpc: ClassVar[Any] = grpc.aio

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
        """The whole completion of a prompt, which is text or token ids; see Options. With `n`, a list of `n`
        completions.

        `timeout` is in seconds, for the whole request; absent: the server's limit. Raises a TandemError.
        """
        pieces = [piece async for piece in self.stream(prompt, n=n, timeout=timeout, **options)]
        return completion(pieces) if n is None else completions(pieces)

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

        The request is sent when the first piece is requested; `aclose()`, or leaving the task, cancels it. Raises
        InvalidRequest at once for values that cannot be sent, and a TandemError while iterating.
        """
        return self._pieces(build_request(prompt, n=n, **options), _seconds(timeout))

    async def _pieces(
        self, request: generation_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[Piece, None]:
        reader = StreamReader()
        with unary_calls.call_span("generate", self.target) as span:
            with until_closed():
                call = self._generate(request, timeout=timeout, metadata=(*self._metadata, *span.headers))
            try:
                with until_closed():
                    async for event in call:
                        if (piece := reader.read(event)) is not None:
                            yield piece
                reader.end()
            except grpc.RpcError as error:
                raise from_rpc(error, late=_late(timeout, reader)) from error
            finally:
                call.cancel()  # no effect on a call that has ended

    async def submit(self, prompt: Prompt | None = None, *, n: int | None = None, **options: Unpack[Options]) -> Job:
        """Submits a job, whose tokens are stored: it survives the loss of this client and of the router. Returns when
        the job is stored.

        The same `request_id` twice is one job; without one, this call creates one. Raises a TandemError.
        """
        return (await self._submitted([build_request(prompt, n=n, **options)]))[0]

    async def submit_many(
        self, prompts: Iterable[Prompt], *, n: int | None = None, **options: Unpack[Options]
    ) -> list[Job]:
        """Submits a job for each of up to 128 prompts, all with these options. None is accepted if one is invalid."""
        return await self._submitted(build_requests(prompts, n=n, **options))

    async def watch(self, job_id: str, *, from_token: int = 0) -> AsyncGenerator[Piece, None]:
        """The tokens of a job, from its beginning or from `from_token`, piece by piece as they arrive; the last piece
        has the receipt. A piece that contains `from_token` may begin before it.

        If the router is lost, another one continues. Raises a TandemError: the job's own error, NotFound for an unknown
        job, Unavailable when no router was reachable for half a minute.
        """
        watching = _Watching(job_id, from_token)
        while not watching.reader.complete:
            with until_closed():
                call = self._watch(watching.request(), metadata=self._metadata)
            try:
                with until_closed():
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
        """The job's state and progress."""
        return await self._ask(unary_calls.get_job(job_id))

    async def cancel(self, job_id: str) -> Job:
        """Ends the job within seconds; an ended job does not change."""
        return await self._ask(unary_calls.cancel_job(job_id))

    async def workers(self) -> Pools:
        """Every worker of the cluster, and the wanted pool sizes."""
        return await self._ask(unary_calls.WORKERS)

    async def scale(
        self, prefill: int | None = None, decode: int | None = None, *, pools: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Set how many workers are wanted; a pool that is not named keeps its number. `pools`: by name, MODEL/ROLE
        where the cluster serves several models. Returns the wanted sizes of all pools."""
        return await self._ask(unary_calls.scale(prefill, decode, pools))

    async def autoscaling(self) -> Autoscaling:
        """The autoscaler's latest verdicts. Raises PreconditionFailed if it is off."""
        return await self._ask(unary_calls.AUTOSCALING)

    async def drain(self, worker_id: str, grace: float = 30.0) -> Drained:
        """Stops a worker after its requests, or after `grace` seconds. Returns when it is drained."""
        return await self._ask(unary_calls.drain(worker_id, grace))

    async def adapters(self) -> list[ServedAdapter]:
        """The adapters that requests may name."""
        return await self._ask(unary_calls.ADAPTERS)

    async def load_adapter(self, name: str, path: str, *, model: str = "") -> ServedAdapter:
        """Loads an adapter on every worker, from a folder within the cluster's `adapter_root`. Returns when requests
        can name it. Raises InvalidRequest and NotFound with the worker's reason; then nothing has changed."""
        return await self._ask(unary_calls.load_adapter(name, path, model))

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter that `load_adapter` loaded; admitted requests finish with it. Raises NotFound."""
        await self._ask(unary_calls.unload_adapter(name))

    async def audit(self) -> Audit:
        """The block ledger of every worker."""
        return await self._ask(unary_calls.AUDIT)

    async def receipts(self, request_id: str = "", limit: int = 0, within: float = 0.0) -> list[Receipt]:
        """The receipts of the last thousand requests at this router, the newest first: of one request, at most `limit`
        of them, or of those that ended `within` this many seconds."""
        return await self._ask(unary_calls.receipts(request_id, limit, within))

    async def diagnose(self) -> Diagnosis:
        """Probes every prefill-decode pair; also has the registry and the versions."""
        return await self._ask(unary_calls.DIAGNOSE)

    async def model_info(self, model: str = "") -> ModelInfo:
        """The served model; with several models this one, or the first."""
        return await self._ask(unary_calls.model_info(model))

    async def _submitted(self, requests: list[generation_pb2.GenerateRequest]) -> list[Job]:
        with unary_calls.call_span("submit", self.target) as span:
            return await self._ask(unary_calls.submit(requests), span)

    async def _ask(self, question: Question[Answer], span: tracing.Span = tracing.NO_SPAN) -> Answer:
        try:
            with until_closed():
                return question.read(await self._call(question, span))
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
