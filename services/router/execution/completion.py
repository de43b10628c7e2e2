"""One completion: its journal, and the events that its client receives.

The stream multiplexer calls `take` for each event of a decode worker. `take` extends the journal and puts an event
into the request's output queue, so a token wakes only one task: the one that serves the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.router.answer.part_messages import put_parts
from services.router.execution.output_queue import OutputQueue
from services.router.execution.output_reader import OutputReader
from services.router.execution.request_timeline import RequestTimeline
from services.router.execution.usage_meter import UsageMeter
from services.router.preprocess.request import Request
from tandem.errors import InternalError, WorkerLost
from tandem.v1 import common_pb2, decode_pb2, generation_pb2

RESTORED_TOKENS = 64  # of a job's stored answer that are read before other tasks run


class Completion:
    def __init__(
        self,
        request: Request,
        timeline: RequestTimeline,
        reader: OutputReader,
        output: OutputQueue,
        usage: UsageMeter,
        *,
        follows: bool = False,
    ) -> None:
        """`follows` another completion of its request, which has begun: the client may have received tokens."""
        self.request, self.follows = request, follows
        self.timeline = timeline
        self.begun = asyncio.Event()  # the decode worker has the prompt's KV, or the completion is over
        self._reader = reader
        self._output = output
        self._usage = usage
        self._adapter = b""  # fingerprint of the adapter that the current attempt computes with

    async def restore(self, past: Sequence[generation_pb2.Delta]) -> None:
        """`past` deltas were already sent to the client, so they only go into the journal. Other tasks run in between:
        100,000 tokens take seconds."""
        request, unread = self.request, 0
        for delta in past:
            request.tokens.extend(delta.token_ids)
            self._reader.read(decode_pb2.Tokens(token_ids=delta.token_ids))
            unread += len(delta.token_ids)
            if unread >= RESTORED_TOKENS:
                await asyncio.sleep(0)
                unread = 0
        if past and past[-1].last and request.generated < request.max_tokens:
            request.stopped = True  # also where its end token is of a worker with another checkpoint than is known here

    def admitted(self, admitted: decode_pb2.Admitted, worker_id: str) -> None:
        """A decode worker has admitted an attempt."""
        _check_adapter(self.request, admitted, worker_id)
        self._adapter = admitted.adapter_fingerprint

    def take(self, event: decode_pb2.DecodeResponse) -> bool:
        """Adds an event of a decode worker to the journal and passes it on. True: the attempt is over."""
        request, timeline = self.request, self.timeline
        if event.HasField("ended"):
            timeline.ended(event.ended)
            if request.finish() is None:
                raise WorkerLost(f"{timeline.decode_worker} ended the stream after {request.generated} tokens")
            return True
        tokens, first = event.tokens, request.generated
        count = len(tokens.token_ids)
        _check_position(request, tokens, timeline.decode_worker)
        _check_tokens(request, tokens, timeline.decode_worker)
        prompt_logprobs = None if first else _prompt_logprobs(request, tokens, timeline.decode_worker)
        request.adapter_fingerprint = self._adapter
        request.tokens.extend(tokens.token_ids)
        if tokens.HasField("first"):
            timeline.first_token(tokens.first)
        else:
            self.begun.set()  # this token was computed from the prompt's KV, so the KV is complete
        timeline.report(tokens)
        self._usage.generated(request, count)
        at = 0
        for run in self._reader.read(tokens):
            # filled in place: copying a separate delta takes twice as long
            response = generation_pb2.GenerateResponse()
            delta = response.delta
            put_parts(delta, run.parts)
            delta.index, delta.choice = first + at, request.choice
            delta.token_ids.extend(tokens.token_ids[at : at + run.tokens])
            if tokens.HasField("logprobs"):
                _add_logprobs(delta.logprobs, tokens, at, run.tokens)
            if prompt_logprobs and at == 0:
                delta.prompt_logprobs.CopyFrom(prompt_logprobs)
            if first + at == 0:
                delta.adapter_fingerprint = self._adapter
                delta.computes_with = timeline.begun_with.computes_with if timeline.begun_with else ""
            at += run.tokens
            delta.last = at == len(tokens.token_ids) and request.finish() is not None
            self._usage.sent(run.tokens, timeline.sent(run.tokens))
            if delta.index == 0 and not request.is_job:
                self._usage.first_token(timeline)
            self._output.put(response)
        return request.stopped

    def over(self) -> None:
        """It has ended, however it did."""
        self.begun.set()
        self._usage.over(self.timeline)

    def finish(self, model: str) -> None:
        """Sends the end of a complete journal: the rest of the text, and the receipt."""
        request, timeline = self.request, self.timeline
        parts = self._reader.finish()
        receipt = timeline.receipt(request, model)
        receipt.reasoning_tokens = self._reader.reasoning_tokens
        if timeline.attempts:  # otherwise every token came from an earlier router
            self._usage.finished(receipt)
        finished = generation_pb2.Finished(
            reason=request.finish(), receipt=receipt, choice=request.choice, stop=self._reader.stop
        )
        put_parts(finished, parts)
        timeline.span.answered(finished)
        self._output.put(generation_pb2.GenerateResponse(finished=finished))


def _add_logprobs(to: common_pb2.Logprobs, tokens: decode_pb2.Tokens, at: int, count: int) -> None:
    """Adds the log probabilities of `count` tokens from `at` on."""
    if count == len(tokens.token_ids):
        to.CopyFrom(tokens.logprobs)
        return
    each = len(tokens.logprobs.top_ids) // len(tokens.token_ids)
    likely = slice(at * each, (at + count) * each)
    to.chosen.extend(tokens.logprobs.chosen[at : at + count])
    to.top_ids.extend(tokens.logprobs.top_ids[likely])
    to.top.extend(tokens.logprobs.top[likely])


def _check_adapter(request: Request, admitted: decode_pb2.Admitted, worker_id: str) -> None:
    """Checks the adapter, because an older worker without adapters would answer with the base model."""
    fingerprint, began = admitted.adapter_fingerprint, request.adapter_fingerprint
    if bool(fingerprint) != bool(request.adapter) or (began and fingerprint != began):
        raise InternalError(f"{worker_id} did not admit the request with adapter {request.adapter!r}; it was stopped")


def _check_position(request: Request, tokens: decode_pb2.Tokens, worker_id: str) -> None:
    """Checks that no token was lost or duplicated."""
    if tokens.position != len(request.tokens):
        raise InternalError(
            f"{worker_id} sent position {tokens.position}, expected {len(request.tokens)};"
            " the stream was stopped to keep it exact"
        )


def _check_tokens(request: Request, tokens: decode_pb2.Tokens, worker_id: str) -> None:
    """Checks, before the tokens enter the journal, that a working decode worker can have sent them."""
    ids = tokens.token_ids
    if not 0 < len(ids) <= request.max_tokens - request.generated:
        raise WorkerLost(f"{worker_id} sent {len(ids)} tokens after {request.generated} of {request.max_tokens}")
    if max(ids) >= request.vocab_size:
        raise WorkerLost(f"{worker_id} sent token {max(ids)}, which the vocabulary does not have")
    _check_scores(tokens.logprobs, len(ids) if request.sampling.HasField("logprobs") else 0, worker_id)


def _check_scores(scores: common_pb2.Logprobs, count: int, worker_id: str) -> None:
    likely = len(scores.top_ids)
    if len(scores.chosen) != count or likely != len(scores.top) or likely % max(count, 1):
        raise WorkerLost(
            f"{worker_id} sent {len(scores.chosen)} log probabilities and {likely} likely tokens for {count} tokens"
        )


def _prompt_logprobs(
    request: Request, tokens: decode_pb2.Tokens, worker_id: str
) -> generation_pb2.PromptLogprobs | None:
    """Checks, before the first token enters the journal, that all requested log probabilities are there."""
    if not request.sampling.HasField("prompt_logprobs"):
        return None
    _check_scores(tokens.prompt_logprobs, request.prompt_len - 1, worker_id)
    return generation_pb2.PromptLogprobs(
        token_ids=request.tokens[: request.prompt_len], logprobs=tokens.prompt_logprobs
    )
