"""Accounts for generated tokens: shares and limits of tenants, metrics, receipts."""

from __future__ import annotations

from services.router.execution.request_timeline import ReceiptLog, RequestTimeline
from services.router.preprocess.request import Request
from services.router.routing.request_scheduler import RequestScheduler
from services.router.tenancy.rate_limits import RateLimits
from tandem.telemetry.metrics import RouterMetrics
from tandem.v1 import generation_pb2


class UsageMeter:
    def __init__(
        self, metrics: RouterMetrics, receipts: ReceiptLog, rate_limits: RateLimits, scheduler: RequestScheduler
    ) -> None:
        self._metrics = metrics
        self._receipts = receipts
        self._rate_limits = rate_limits
        self._scheduler = scheduler

    def generated(self, request: Request, tokens: int) -> None:
        """A decode worker generated these tokens, which count towards the tenant's share, and towards its limit if the
        request's key has one: another key of the tenant may have none."""
        if request.metered:
            self._rate_limits.generated(request.tenant, tokens)
        self._scheduler.generated(request.tenant, tokens)

    def sent(self, tokens: int, gap_s: float | None) -> None:
        """These tokens are ready for the client, `gap_s` after the previous ones; None for the first."""
        self._metrics.sent(tokens, gap_s)

    def first_token(self, timeline: RequestTimeline) -> None:
        """Counts a first token once it is ready for the client: clients give up on slow answers first, so those of
        complete answers alone would look too fast. Not of a job, which waits as long as it must, and of which a router
        knows the time since an attempt at most."""
        if first := timeline.first:
            self._metrics.first_token(*first)

    def over(self, timeline: RequestTimeline) -> None:
        """Counts the retries of a completion, however it ended."""
        self._metrics.retried(max(0, timeline.attempts - 1))

    def finished(self, receipt: generation_pb2.Receipt) -> None:
        self._receipts.keep(receipt)
        self._metrics.finished(receipt)
