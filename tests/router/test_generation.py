"""What a request, or a job's attempt, leaves in the accounts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution.request_account import EndedRequests, RequestAccounts
from services.router.execution.request_timeline import RequestTimeline
from services.router.generation import Generation
from services.router.preprocess.request import PromptCount, Request, ResumeState, build_request
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.tenancy.api_keys import ApiKey
from tandem.errors import Busy, TandemError, Unavailable
from tandem.settings import Settings
from tandem.telemetry.metrics import RouterMetrics
from tandem.telemetry.tracing import NO_SPAN
from tandem.v1 import generation_pb2
from tests.support.metric_values import values

ANY: Any = SimpleNamespace
MESSAGE = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))


class Preprocessor:
    async def build(self, message: Any, *about: Any, **more: Any) -> Request:
        return build_request(message, Tokenizer(None, None), ModelFacts(context=64, vocab_size=100, eos_token_ids=()))


class Executor:
    """Each request ends with the next error."""

    def __init__(self, *errors: TandemError) -> None:
        self._errors = list(errors)
        self.requests: list[Request] = []
        self.attempts = 0  # that a decode worker got

    @asynccontextmanager
    async def completing(self, request: Request, timeline: RequestTimeline, *about: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        timeline.attempts = self.attempts
        raise self._errors.pop(0)
        yield


class Router:
    def __init__(self, *errors: TandemError) -> None:
        settings = Settings(model="toy")
        self.executor: Any = Executor(*errors)
        self.metrics = RouterMetrics(settings, "router-0", lambda: 0)
        accounts = RequestAccounts(self.metrics, EndedRequests(), "toy")
        preprocessor: Any = Preprocessor()
        poison, tracing = ANY(check=lambda request: None), ANY(request=lambda *about: NO_SPAN)
        self._generation = Generation(settings, preprocessor, ANY(), poison, self.executor, accounts, tracing)

    async def attempt(self, resume: ResumeState) -> None:
        """A job's attempt, with its error."""
        with pytest.raises(TandemError):
            async for _ in self._generation.generate(MESSAGE, 60.0, tenant=ApiKey("acme"), resume=resume):
                pass


@pytest.mark.parametrize("begun", [False, True], ids=["waits", "begun"])
async def test_a_waiting_jobs_attempts_are_no_refused_requests(begun: bool) -> None:
    """It asks again until there is room. One that a worker began, as one of several answers, is a pause."""
    router = Router(Busy("x", reason="OVERLOADED"), Busy("x", reason="QUEUE_TIMEOUT"))
    router.executor.attempts = int(begun)
    for _ in range(2):
        await router.attempt(ResumeState())
    counted = {key[1]: value for key, value in values(router.metrics).items() if key[0] == "tandem_requests_total"}
    assert {outcome for outcome, value in counted.items() if value} == ({"cancelled"} if begun else set())
    assert all(request.is_job for request in router.executor.requests)


async def test_a_jobs_prompt_is_its_tenants_once() -> None:
    """However many of its attempts fail after workers began with it; those that found no worker's room do not count.
    The control is another job."""
    router, count = Router(Busy("x"), Unavailable("x"), Unavailable("x"), Unavailable("x")), PromptCount()
    for number, resume in enumerate([*[ResumeState(prompt_count=count) for _ in range(3)], ResumeState()]):
        router.executor.attempts = min(number, 1)
        await router.attempt(resume)
        found = values(router.metrics).get(("tandem_tenant_tokens_total", "prompt", "acme"), 0)
        assert found == (0, 3, 3, 6)[number]
