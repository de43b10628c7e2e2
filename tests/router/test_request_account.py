"""Which ends of requests a router accounts for."""

from __future__ import annotations

from time import monotonic

import pytest

from services.router.execution.request_account import EndedRequests, RequestAccounts
from services.router.execution.request_timeline import RequestTimeline
from services.router.preprocess.request import PromptCount
from tandem.errors import Busy
from tandem.settings import Settings
from tandem.telemetry.metrics import RouterMetrics
from tandem.telemetry.tracing import NO_SPAN
from tests.support.metric_values import values


@pytest.mark.parametrize("is_job", [True, False], ids=["job", "control"])
def test_a_job_that_waits_fills_no_account(is_job: bool) -> None:
    """A thousand jobs that ask for room every 30 s would leave nothing else among the latest failures, and would make
    their tenant the one that sends most. The control is a client's request."""
    metrics, ended = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0), EndedRequests()
    accounts = RequestAccounts(metrics, ended, "toy")
    with (
        pytest.raises(Busy),
        accounts.open("x", RequestTimeline(monotonic()), NO_SPAN, PromptCount() if is_job else None) as account,
    ):
        account.tenant = "acme"
        raise Busy("x", reason="OVERLOADED")
    found = values(metrics).get(("tandem_tenant_requests_total", "refused", "acme"), 0)
    assert (len(ended.failures), ended.outcomes.total(), found) == ((0, 0, 0) if is_job else (1, 1, 1))


def test_what_a_job_got_before_it_had_to_wait_is_counted() -> None:
    """One of its answers found no room, and another one was served."""
    metrics, ended = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0), EndedRequests()
    accounts = RequestAccounts(metrics, ended, "toy")
    with (
        pytest.raises(Busy),
        accounts.open("x", RequestTimeline(monotonic()), NO_SPAN, PromptCount()) as account,
    ):
        account.tenant, account.tokens = "acme", 5
        raise Busy("x", reason="QUEUE_TIMEOUT")
    assert (ended.tokens, len(ended.failures), ended.outcomes["cancelled"]) == (5, 0, 1)
    assert values(metrics)["tandem_tenant_tokens_total", "completion", "acme"] == 5


@pytest.mark.parametrize("is_job", [True, False], ids=["job", "control"])
def test_the_dashboards_times_are_those_of_clients(is_job: bool) -> None:
    """A batch's lines wait as long as they must. The control is a client's answer."""
    metrics, ended = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0), EndedRequests()
    timeline = RequestTimeline(monotonic())
    with RequestAccounts(metrics, ended, "toy").open("x", timeline, NO_SPAN, PromptCount() if is_job else None):
        timeline.sent(1)
    assert (sum(ended.ttft), ended.outcomes["ok"]) == (not is_job, 1)
