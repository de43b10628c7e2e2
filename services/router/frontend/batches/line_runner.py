"""Runs one line of a batch as jobs, and writes the answer that the HTTP endpoint would have sent.

    line ─▶ the endpoint's own parser ─▶ one job for each prompt ─▶ their stored events ─▶ the endpoint's own encoder

The ids of the jobs follow from the line, so a router that continues a batch finds the jobs of the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

from cluster.state.batch_store import BatchRecord, LineResult
from cluster.state.job_journal import JobJournal
from cluster.state.job_journal import JobState as State
from services.router.frontend.batches import batch_lines
from services.router.frontend.batches.batch_lines import Line
from services.router.frontend.http_endpoint import Parse, Prepared
from services.router.frontend.jobs_service import IDLE_CHECK_S, JobService, raise_end, started
from services.router.frontend.openai import openai_errors
from services.router.preprocess.offload import Offload
from services.router.preprocess.validation import MAX_PRIORITY
from services.router.tenancy.rate_limits import RateLimits
from tandem.errors import Busy, InvalidRequest, NotFound, PreconditionFailed, TandemError, Unavailable
from tandem.grpc_errors import known_errors
from tandem.v1 import generation_pb2, jobs_pb2

MIN_RETRY_S, MAX_RETRY_S = 0.5, 15.0  # between two attempts to submit a line's jobs
MAX_REMOVED = 2  # times that a line's jobs are computed again, because they were removed before they were read
BATCH_PRIORITY = 100  # or less urgent, if the line says so; requests without a priority have 0
ROUTER_LEAVES = ("REGISTRY_UNREACHABLE", "DRAINING")  # reasons why this router cannot continue, unlike another one


@dataclass(slots=True)
class _Usage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def count(self, finished: generation_pb2.Finished) -> None:
        receipt = finished.receipt
        if finished.choice == 0:  # the other choices have the same prompt
            self.input_tokens += receipt.prompt_tokens
            self.cached_tokens += receipt.cached_tokens
        self.output_tokens += receipt.completion_tokens
        self.reasoning_tokens += receipt.reasoning_tokens


class LineRunner:
    def __init__(
        self,
        jobs: JobService,
        journal: JobJournal,
        rate_limits: RateLimits,
        offload: Offload,
        parsers: Mapping[str, Parse],
    ) -> None:
        """`parsers`: of the bodies, by endpoint."""
        self._jobs = jobs
        self._journal = journal
        self._rate_limits = rate_limits
        self._offload = offload
        self._parsers = parsers

    async def run(self, record: BatchRecord, line: Line) -> LineResult:
        """Waits while the cluster or the tenant's limits have no room. Raises Unavailable when this router cannot
        continue."""
        name, delay_s, prepared, removed = _name(record, line), MIN_RETRY_S, None, 0
        while True:
            usage = _Usage()
            try:
                with known_errors("batch"):
                    prepared = await self._prepared(record, line, name)
                    await self._submit(record, prepared)
                    body = await prepared.encoder.collect(self._events(record, prepared, usage))
                return self._result(record, line, name, 200, body, usage)
            except (Busy, Unavailable) as error:
                if error.reason in ROUTER_LEAVES:
                    raise
                await asyncio.sleep(min(max(delay_s, error.retry_after or 0.0), MAX_RETRY_S))
                delay_s = min(2 * delay_s, MAX_RETRY_S)
            except TandemError as error:
                if error.reason == "NO_SUCH_JOB" and removed < MAX_REMOVED:  # newer jobs needed its room
                    removed += 1
                    continue
                if prepared is not None:
                    error = prepared.encoder.named(error)
                return self._result(record, line, name, error.http, openai_errors.error_body(error), usage)

    async def cancel(self, record: BatchRecord) -> None:
        """Cancels the open jobs of all lines."""
        for job_id in await self._journal.open_with(f"{record.tenant}/{record.batch_id}-"):
            with suppress(NotFound):  # it has ended meanwhile, and was removed
                await self._journal.cancel(job_id)

    async def forget(self, record: BatchRecord, line: Line) -> None:
        """Removes the jobs of a line whose result is stored, to free the registry's memory. Those behind one that was
        removed before stay until they expire or newer ones need their room."""
        job_id = f"{record.tenant}/{_name(record, line)}"
        prompt = 0
        if not await self._journal.forget(job_id):
            while await self._journal.forget(f"{job_id}-{prompt}"):
                prompt += 1

    async def _prepared(self, record: BatchRecord, line: Line, name: str) -> Prepared:
        """Raises the errors of the endpoint."""
        return await self._offload.run(record.tenant, len(line.raw), self._parsed, record, line, name)

    def _parsed(self, record: BatchRecord, line: Line, name: str) -> Prepared:
        prepared = self._parsers[record.fields["endpoint"]](line.body(), name)
        if prepared.stream:
            raise InvalidRequest("a batch has no streams", field="stream", bound="absent or false in a batch")
        for message in prepared.requests:
            message.priority = min(max(message.priority, BATCH_PRIORITY), MAX_PRIORITY)
            message.ClearField("ttft_slo_seconds")  # a line may wait
        return prepared

    async def _submit(self, record: BatchRecord, prepared: Prepared) -> None:
        key = self._rate_limits.named(record.tenant)
        try:
            await self._jobs.submit(prepared.requests, key, default_max_tokens=prepared.default_max_tokens)
        except PreconditionFailed as error:
            if error.reason != "JOB_DIFFERS":  # the job of an earlier attempt, with other sampling defaults, counts
                raise

    async def _events(
        self, record: BatchRecord, prepared: Prepared, usage: _Usage
    ) -> AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]:
        """The stored events of the jobs, when each has ended; with the number of its prompt. Raises the job's error."""
        for number, message in enumerate(prepared.requests):
            job_id = f"{record.tenant}/{message.request_id}"
            kept = jobs_pb2.KeptJob.FromString((await self._journal.get(job_id)).request)
            yield number, started(kept.request, message.request_id, "")
            ended: set[int] = set()
            end: State | None = None
            async with aclosing(self._journal.watch(job_id, IDLE_CHECK_S)) as pages:
                async for entries in pages:
                    for event in (
                        generation_pb2.GenerateResponse.FromString(one.event) for one in entries if one.event
                    ):
                        if event.HasField("finished"):
                            if event.finished.choice in ended:  # an end may be stored twice
                                continue
                            ended.add(event.finished.choice)
                            usage.count(event.finished)
                        yield number, event
                    end = next((entry.ended for entry in entries if entry.ended is not None), None)
                    if end is not None:
                        break
                    if not entries:
                        await self._journal.status(job_id)  # it may have been forgotten
            await raise_end(self._journal, job_id, message.request_id, end)

    @staticmethod
    def _result(record: BatchRecord, line: Line, name: str, status: int, body: bytes, usage: _Usage) -> LineResult:
        tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        text = batch_lines.answered(record.batch_id, line, name, status, body)
        return LineResult(line.number, text, status == 200, *tokens)


def _name(record: BatchRecord, line: Line) -> str:
    """The request id of a line, which its jobs have as their name."""
    return f"{record.batch_id}-{line.number}"
