"""Accounts for each request once, from its arrival to any end: the metrics, a line of the log, and the dashboard's
totals.

    Generation ── RequestAccounts.open ─┬─ RouterMetrics.request   Prometheus
                                        ├─ log line "request"      who, what, how it ended, how long; no text, no key
                                        └─ EndedRequests           totals and the latest failures
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, time
from typing import NamedTuple

import structlog

from services.router.execution.request_timeline import RequestTimeline
from services.router.preprocess.request import PromptCount, Request
from tandem.telemetry.metrics import TTFT_BUCKETS, RouterMetrics
from tandem.telemetry.outcomes import WAITS
from tandem.telemetry.tracing import Span

log = structlog.get_logger(__name__)
MAX_FAILURES = 200  # failed and refused requests, for the dashboard


class Failure(NamedTuple):
    """A request that failed or was refused. Its error's message is left out: it may quote the request."""

    at: float  # unix seconds
    request_id: str
    tenant: str
    outcome: str
    reason: str
    seconds: float
    tokens: int  # that its client received
    trace_id: str


class EndedRequests:
    """Totals of the requests that ended at this router, since its start, and the latest failures."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0  # that clients received
        self.ttft = [0] * (len(TTFT_BUCKETS) + 1)  # answers, not of jobs, by the first edge not below; last: above all
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)


class RequestAccount:
    """One request in progress."""

    def __init__(self, request_id: str, timeline: RequestTimeline, prompt_count: PromptCount | None) -> None:
        self.request_id = request_id
        self.prompt_count = prompt_count  # None: not of a job
        self.tenant = ""
        self.adapter = ""
        self.prompt_tokens = 0
        self.tokens = 0  # that its client received, of all answers
        self.goes_on = False  # a job's attempt after others whose prompt was counted
        self.complete = False  # every answer was delivered
        self._timeline = timeline

    def admitted(self, request: Request) -> None:
        """The request is valid."""
        self.request_id, self.adapter = request.request_id, request.adapter
        self.prompt_tokens = request.prompt_len

    @property
    def new_prompt_tokens(self) -> int:
        """Those of its prompt if it reached a worker, and no earlier attempt of its job counted them."""
        return self.prompt_tokens if self._timeline.attempts and not self.goes_on else 0

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token; None before that."""
        return self._timeline.ttft


class RequestAccounts:
    def __init__(self, metrics: RouterMetrics, ended: EndedRequests, model: str) -> None:
        self._metrics = metrics
        self._ended = ended
        self._model = model

    @contextmanager
    def open(
        self, request_id: str, timeline: RequestTimeline, span: Span, prompt_count: PromptCount | None = None
    ) -> Iterator[RequestAccount]:
        """`request_id`: the client's, used until the request was checked. A job's attempt that found no room leaves no
        account: JobRunner logs it, and makes it again unless the job's time is over."""
        account = RequestAccount(request_id, timeline, prompt_count)
        counted = None
        try:
            with self._metrics.request(is_job=prompt_count is not None) as counted:
                try:
                    yield account
                finally:
                    counted.complete = account.complete
                    counted.begun = timeline.attempts > 0 or account.tokens > 0
        finally:
            if counted is not None and counted.outcome != WAITS:
                self._close(account, counted.outcome, counted.reason, monotonic() - timeline.arrived, span.trace_id)

    def _close(self, account: RequestAccount, outcome: str, reason: str, seconds: float, trace_id: str) -> None:
        ended, tokens, ttft = self._ended, account.tokens, account.ttft
        self._metrics.ended(account.tenant, outcome, account.new_prompt_tokens, tokens)
        if account.prompt_count and account.new_prompt_tokens:
            account.prompt_count.done = True
        ended.outcomes[outcome] += 1
        ended.tokens += tokens
        if ttft is not None and account.prompt_count is None:
            ended.ttft[bisect_left(TTFT_BUCKETS, ttft)] += 1
        if outcome in ("failed", "refused"):
            ended.failures.append(
                Failure(
                    time(), account.request_id, account.tenant, outcome, reason, round(seconds, 3), tokens, trace_id
                )
            )
        line = {
            "request": account.request_id,
            "tenant": account.tenant,
            "model": account.adapter or self._model,
            "status": outcome,
            "reason": reason,
            "prompt_tokens": account.prompt_tokens,
            "completion_tokens": tokens,
            "ttft_s": None if ttft is None else round(ttft, 4),
            "duration_s": round(seconds, 4),
        }
        level = log.warning if outcome == "failed" else log.info
        level("request", **line, **({"trace_id": trace_id} if trace_id else {}))
