"""Runs all completions of a request concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.router.execution.completion import Completion
from services.router.execution.completion_runner import CompletionRunner
from services.router.execution.detokenizer import Detokenizer
from services.router.execution.output_queue import OutputQueue
from services.router.execution.output_reader import OutputReader
from services.router.execution.request_timeline import RequestTimeline
from services.router.execution.usage_meter import UsageMeter
from services.router.preprocess.request import Request, ResumeState
from services.router.preprocess.tokenizer import Tokenizer
from services.router.routing.placement import Begun
from tandem.tasks import end


class RequestExecutor:
    def __init__(self, runner: CompletionRunner, tokenizer: Tokenizer, usage: UsageMeter) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._usage = usage

    @asynccontextmanager
    async def completing(
        self, request: Request, timeline: RequestTimeline, deadline: float, resume: ResumeState
    ) -> AsyncIterator[OutputQueue]:
        """Runs the completions until the block ends, except those that `resume` has as ended.

        The first completion gets the prompt's KV. When its decode worker has it, the others start there, share its full
        blocks and compute the last, partial one.
        """
        output = OutputQueue()
        first, *others = [sibling for sibling in request.fan_out() if sibling.choice not in resume.ended]
        timeline.job_begun_with = _begun_with(resume, first.choice)
        lead = self._completion(first, timeline, output)

        async def follow(other: Request) -> None:
            await lead.begun.wait()
            if first.generated > 1 and not resume.deltas[other.choice]:  # otherwise its own tokens are not cached there
                other.kv_holder = timeline.decode_worker
            with timeline.span.begin(f"choice {other.choice}") as span:
                own = RequestTimeline(timeline.arrived, span)
                own.job_begun_with = _begun_with(resume, other.choice)
                own.admitted(timeline)
                await self._run(self._completion(other, own, output, follows=True), resume, deadline)

        tasks = [asyncio.create_task(work) for work in (self._run(lead, resume, deadline), *map(follow, others))]
        for task in tasks:
            task.add_done_callback(output.over)
        try:
            yield output
        finally:
            await asyncio.gather(*map(end, tasks))

    async def _run(self, completion: Completion, resume: ResumeState, deadline: float) -> None:
        await completion.restore(resume.deltas[completion.request.choice])
        await self._runner.run(completion, deadline)

    def _completion(
        self, request: Request, timeline: RequestTimeline, output: OutputQueue, *, follows: bool = False
    ) -> Completion:
        markers = self._tokenizer.marker_ids if request.reading else ()
        prompt = request.tokens[: request.prompt_len]
        detokenizer = Detokenizer(self._tokenizer, markers, special=request.show_special, prompt=prompt)
        reader = OutputReader(detokenizer, request)
        return Completion(request, timeline, reader, output, self._usage, follows=follows)


def _begun_with(resume: ResumeState, choice: int) -> Begun | None:
    computed = resume.computes_with.get(choice)
    return Begun(computed) if computed else None
