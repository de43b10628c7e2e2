"""The timeline of one request, and its receipt, whose phases add up to the time to first token.

    arrived ─tokenize─▶ admitted ─queue─▶ sent ─dispatch─▶ [ reserve, handoff, prefill_queue, prefill_compute ] ─▶ token
                            ▲────────retries───────┘         in the workers; handoff is their hop

Each answer but the first to a prompt also waits for the first one's KV: `first_answer`, between queue and dispatch.
Each process measures durations on its own clock; a hop is the caller's duration minus the duration that the callee
reports. So the phases add up to the router's time to first token without comparing clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic, time

from services.router.preprocess.request import Request
from services.router.routing.placement import Begun, Estimate, Placement
from tandem.telemetry.tracing import NO_SPAN, Span
from tandem.v1 import common_pb2, decode_pb2, generation_pb2

# The other phases are the workers' spans.
ROUTER_PHASES = ("tokenize", "queue", "first_answer", "retries", "dispatch", "deliver")
MAX_RECEIPTS = 1000  # receipts, for `tandem explain`, `tandem slow` and the dashboard


class ReceiptLog:
    """The receipts of the latest requests: of all that ended after `since`."""

    def __init__(self, most: int = MAX_RECEIPTS) -> None:
        self.since = time()
        self._kept: deque[generation_pb2.Receipt] = deque(maxlen=most)

    def keep(self, receipt: generation_pb2.Receipt) -> None:
        if len(self._kept) == self._kept.maxlen:
            self.since = self._kept[0].ended_at
        self._kept.append(receipt)

    def __reversed__(self) -> Iterator[generation_pb2.Receipt]:
        """The newest first."""
        return reversed(self._kept)


class RequestTimeline:
    def __init__(self, arrived: float, span: Span = NO_SPAN) -> None:
        """`span` receives the phases that the router measures."""
        self.arrived = arrived
        self.span = span
        self.job_begun_with: Begun | None = None  # what earlier attempts of its job computed with
        self.attempts = 0
        self._admitted = arrived
        self._first_answer = 0.0  # its wait for the KV of the first answer to its prompt, without that one's queueing
        self._retries = 0.0  # attempts that failed or were refused, before the first token
        self._dispatched = arrived
        self._spared = False
        self._unsent_since: float | None = None
        self._placement: Placement | None = None
        self._expected: Estimate | None = None  # of the placement that gave the first token
        self._first: decode_pb2.FirstTokenTiming | None = None
        self._attempt_first: decode_pb2.FirstTokenTiming | None = None
        self._placements: list[Placement] = []  # of the attempts that gave tokens
        self._first_at = 0.0  # when the first token reached the router
        self._last_at = 0.0
        self._ttft = 0.0
        self._before_dispatch = 0.0
        self._sent = 0
        self._ended: decode_pb2.Ended | None = None
        self._transferred: common_pb2.TransferReport | None = None
        self._preemptions = 0
        self._drafted = self._accepted = 0
        self._preempted = 0  # in the current attempt

    def admitted(self, like: RequestTimeline | None = None) -> None:
        """Now, or at the time of `like`, the first completion of the same prompt, for whose KV this one has waited."""
        self._admitted = like._admitted if like else monotonic()
        if like:
            self._first_answer = monotonic() - like._admitted - like._queued

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None before that."""
        return self._ttft if self._sent else None

    @property
    def first(self) -> tuple[common_pb2.Path, float, list[tuple[str, float]]] | None:
        """The path, the seconds and the phases of the first token; None before it."""
        return (self._first.path, self._ttft, self._phases()) if self._first and self._sent else None

    def elapsed(self) -> float:
        return monotonic() - self.arrived

    def placed(self, placement: Placement) -> None:
        self._placement = placement
        if self._first is None:
            self._expected = placement.estimate

    def dispatched(self) -> None:
        self.attempts += 1
        self._attempt_first = self._ended = self._transferred = None
        self._preemptions, self._preempted = self._preemptions + self._preempted, 0
        self._dispatched = monotonic()

    def refused(self) -> None:
        """The decode worker had no room after all, did not receive the request, or is too small for it, or a worker
        lacks its adapter. This counts as time but not as an attempt."""
        self.attempts -= 1
        self.failed()

    def unsent(self) -> float:
        """No connection to the worker could be made. Returns the seconds since the first such failure without a first
        token in between."""
        self._unsent_since = self._unsent_since or self._dispatched
        return monotonic() - self._unsent_since

    def spare(self) -> bool:
        """Whether a loss that may not be the request's doing is spared from its attempts: only the first."""
        spared, self._spared = not self._spared, True
        return spared

    def failed(self) -> None:
        if self._first is None:
            self._retries += monotonic() - self._dispatched

    def first_token(self, timing: decode_pb2.FirstTokenTiming) -> None:
        """The first token of an attempt. The first of these is the request's first token."""
        self._attempt_first, self._unsent_since = timing, None
        if self._placement:
            self._placements.append(self._placement)
        if self._first is None:
            self._first = timing
            self._first_at = monotonic()
            self._before_dispatch = self._dispatched - self.arrived

    def report(self, tokens: decode_pb2.Tokens) -> None:
        """Transfer and preemptions as reported with tokens, for a stream that the router ends before its Ended."""
        if tokens.HasField("transfer"):
            self._transferred = tokens.transfer
        self._preempted = tokens.preemptions

    @property
    def decode_worker(self) -> str:
        return self._placement.decode.worker_id if self._placement else ""

    @property
    def begun_with(self) -> Begun | None:
        """The checkpoint and types with which the latest tokens were computed; None before the first token."""
        return self._placements[-1].decode.begun if self._placements else self.job_begun_with

    def sent(self, tokens: int) -> float | None:
        """These tokens are ready for the client now. Returns the seconds since the previous ones; None for the
        first."""
        now = monotonic()
        gap = now - self._last_at if self._sent else None
        if self._sent == 0:
            self._ttft = now - self.arrived
            self._record_phases()
        self._last_at = now
        self._sent += tokens
        return gap

    def ended(self, ended: decode_pb2.Ended) -> None:
        self._ended = ended
        self._preempted = ended.preemptions
        self._drafted += ended.drafted
        self._accepted += ended.accepted

    def receipt(self, request: Request, model: str) -> generation_pb2.Receipt:
        """A job whose tokens all came from an earlier router has no workers and no durations in its receipt."""
        placement, last = self._placement, self._attempt_first
        receipt = generation_pb2.Receipt(
            request_id=request.request_id,
            model=model,
            prompt_tokens=request.prompt_len,
            completion_tokens=request.generated,
            seed=request.sampling.seed,
            notes=request.notes,
            choice=request.choice,
            choices=request.choices,
            adapter=request.adapter,
            ended_at=time(),
        )
        if placement is None or self._first is None:
            receipt.notes.append("its router was lost after the last token, and the times with it")
            return receipt
        if placement.prefill is None:
            receipt.notes.append(f"prefilled on the decode worker: {placement.why_local}")
        if unlike := _unlike_orders(self._placements):
            receipt.notes.append(unlike)
        after_first = self._last_at - self.arrived - self._ttft
        known = generation_pb2.Receipt(
            path=last.path if last else self._first.path,
            prefill_worker=placement.prefill.worker_id if placement.prefill else "",
            decode_worker=placement.decode.worker_id,
            prefill_tp=placement.prefill.tp if placement.prefill else 0,
            decode_tp=placement.decode.tp,
            cached_tokens=min(self._first.prefill.cached_tokens, request.prompt_len),
            unresumed_tokens=self._first.prefill.unresumed_tokens,
            ttft_seconds=self._ttft,
            phases=[generation_pb2.Phase(name=name, seconds=seconds) for name, seconds in self._phases()],
            tpot_seconds=after_first / (self._sent - 1) if self._sent > 1 else 0.0,  # of the tokens that came here
            total_seconds=monotonic() - self.arrived,
            transfer=self._transfer(),
            attempts=self.attempts,
            preemptions=self._preemptions + self._preempted,
            drafted=self._drafted,
            accepted=self._accepted,
            estimate=_estimate(self._expected),
            trace_id=self.span.trace_id if self.span else "",
        )
        receipt.MergeFrom(known)
        return receipt

    def path_latency(self) -> tuple[float, int, float] | None:
        """The path latency of the attempt that ended: the seconds to its first token apart from queueing, computing and
        preparing (the reservation, and on each of its workers the adapter and the grammar, as on any path), the number
        of blocks moved, and the seconds by which the move delayed the second token. None if unknown."""
        first, transfer = self._attempt_first, self._transfer()
        if first is None or first is not self._first or self._ended is None:
            return None
        prefill = first.prefill
        prepared = first.admit_seconds + prefill.prepare_seconds
        inside = prepared + prefill.queue_seconds + prefill.compute_seconds
        seconds = self._first_at - self.arrived - self._before_dispatch - inside
        return (seconds, transfer.blocks, transfer.exposed_seconds) if transfer else (seconds, 0, 0.0)

    @property
    def _queued(self) -> float:
        """The router's other work between admission and dispatch counts as queueing. 0 before the first token."""
        if self._first is None:
            return 0.0
        return self._before_dispatch - (self._admitted - self.arrived) - self._first_answer - self._retries

    def _phases(self) -> list[tuple[str, float]]:
        first = self._first
        assert first is not None
        inside = first.prefill.queue_seconds + first.prefill.compute_seconds
        return [
            ("tokenize", self._admitted - self.arrived),
            ("queue", self._queued),
            *([("first_answer", self._first_answer)] if self._first_answer else []),
            *([("retries", self._retries)] if self._retries else []),
            ("dispatch", self._first_at - self.arrived - self._before_dispatch - first.total_seconds),
            ("reserve", first.admit_seconds),
            ("handoff", first.total_seconds - first.admit_seconds - inside),
            ("prefill_queue", first.prefill.queue_seconds),
            ("prefill_compute", first.prefill.compute_seconds),
            ("deliver", self.arrived + self._ttft - self._first_at),
        ]

    def _record_phases(self) -> None:
        if self.span:
            start = self.arrived
            for name, seconds in self._phases():
                if name in ROUTER_PHASES:
                    self.span.phase(name, start, seconds)
                start += seconds

    def _transfer(self) -> common_pb2.TransferReport | None:
        return self._ended.transfer if self._ended and self._ended.HasField("transfer") else self._transferred


def _unlike_orders(gave: Iterable[Placement]) -> str:
    """A note if the workers of a stream do not compute equal bits; otherwise ""."""
    workers = [worker for placement in gave for worker in (placement.prefill, placement.decode) if worker]
    orders = {worker.worker_id: worker.sum_order for worker in workers if worker.sum_order}
    if len(set(orders.values())) < 2:
        return ""
    names = ", ".join(f"{worker_id} {order}" for worker_id, order in orders.items())
    return (
        f"its workers sum in different orders ({names}): with one order it might have other, equally valid tokens; the"
        " setting sum_order, and equal sizes (--tp), make workers agree"
    )


def _estimate(estimate: Estimate | None) -> generation_pb2.Estimate | None:
    if estimate is None:
        return None
    return generation_pb2.Estimate(
        wait_seconds=estimate.wait_s,
        compute_seconds=estimate.compute_s,
        here_seconds=estimate.local_cost_s,
        there_seconds=estimate.remote_cost_s,
    )
