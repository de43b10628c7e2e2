"""The path of one request, from gRPC, HTTP or a job.

message ─▶ tenant ─▶ parse and validate (preprocess) ─▶ Request ─▶ the tenant's limits ─▶ completions (execution)
client  ◀─ started, deltas, finished ◀─ output queue ◀─────────────────────────────────────┘
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic

from services.router.execution.poison_check import PoisonCheck
from services.router.execution.request_account import RequestAccounts
from services.router.execution.request_executor import RequestExecutor
from services.router.execution.request_timeline import RequestTimeline
from services.router.preprocess.preprocessor import Preprocessor
from services.router.preprocess.request import DEFAULT_MAX_TOKENS, Request, ResumeState
from services.router.preprocess.validation import DEFAULT_PRIORITY, MAX_REQUEST_ID
from services.router.tenancy.api_keys import ApiKey
from services.router.tenancy.rate_limits import RateLimits
from tandem.settings import Settings
from tandem.telemetry.tracing import Headers, Tracing
from tandem.v1 import generation_pb2


class Generation:
    def __init__(
        self,
        settings: Settings,
        preprocessor: Preprocessor,
        rate_limits: RateLimits,
        poison: PoisonCheck,
        executor: RequestExecutor,
        accounts: RequestAccounts,
        tracing: Tracing,
    ) -> None:
        self._settings = settings
        self._model = settings.model_names[0]
        self._preprocessor = preprocessor
        self._rate_limits = rate_limits
        self._poison = poison
        self._executor = executor
        self._accounts = accounts
        self._tracing = tracing
        self.running = 0  # requests in progress

    async def generate(
        self,
        message: generation_pb2.GenerateRequest,
        remaining_s: float | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        authorization: str | None = None,
        tenant: ApiKey | None = None,
        resume: ResumeState | None = None,
        headers: Headers = tuple,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yields started, deltas, finished. The caller closes the generator when it stops reading.

        `remaining_s` is the time until the client's deadline, None without one. `authorization` is the header with its
        key, if `tenant` is not known yet. `resume` is a job's, also at its first attempt; the message is then one that
        `fixed` returned. `headers` may name the request's trace.
        """
        is_job, resume = resume is not None, resume or ResumeState()
        arrived = monotonic()
        longest_s = self._settings.request_timeout_s
        deadline = arrived + (longest_s if remaining_s is None else min(remaining_s, longest_s))
        span = self._tracing.request(message, self._model, headers)
        timeline = RequestTimeline(arrived, span)
        prompt_count = resume.prompt_count if is_job else None
        with self._accounts.open(message.request_id[:MAX_REQUEST_ID], timeline, span, prompt_count) as account, span:
            tenant = tenant or self._rate_limits.who(authorization)
            account.tenant = tenant.name
            request = await self._build(message, tenant, default_max_tokens, fixed=is_job)
            timeline.admitted()
            account.admitted(request)
            self._poison.check(request)
            account.goes_on = resume.prompt_count.done or bool(resume.deltas)
            request.adapter_fingerprint = resume.adapter_fingerprint or request.adapter_fingerprint
            request.is_job = is_job
            left = request.choices - len(resume.ended)
            # The tokens of a job are charged by services/router/frontend/jobs_service.py.
            charged = (
                self._rate_limits.admitted(tenant, request.prompt_len, request.choices, lambda: timeline.attempts > 0)
                if not is_job
                else nullcontext()
            )
            with charged:
                yield generation_pb2.GenerateResponse(started=self._started(request))
                with self._in_progress():
                    async with self._executor.completing(request, timeline, deadline, resume) as output:
                        while left:
                            event = await output.take()
                            left -= event.HasField("finished")
                            account.tokens += len(event.delta.token_ids)
                            account.complete = left == 0
                            yield event

    async def fixed(
        self,
        message: generation_pb2.GenerateRequest,
        tenant: ApiKey,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> generation_pb2.GenerateRequest:
        """The same message with everything determined: the prompt as token ids, the seed, the limits. Raises the errors
        that `generate` raises before it starts."""
        request = await self._build(message, tenant, default_max_tokens)
        fixed = generation_pb2.GenerateRequest()
        fixed.CopyFrom(message)
        fixed.request_id, fixed.priority = request.request_id, request.priority
        fixed.token_ids.ids[:] = request.tokens  # `suffix` stays: the tokens that end what fills a gap follow from it
        fixed.sampling.seed, fixed.sampling.max_tokens = request.sampling.seed, request.max_tokens
        if request.sampling.HasField("grammar"):  # a forced call's grammar is built from the chat, which is tokens now
            fixed.sampling.grammar.CopyFrom(request.sampling.grammar)
        if request.reading is not None:
            fixed.reading.CopyFrom(request.reading.message())
        return fixed

    async def _build(
        self,
        message: generation_pb2.GenerateRequest,
        tenant: ApiKey,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        fixed: bool = False,
    ) -> Request:
        """The validated request, under its tenant's rules. Raises as `Preprocessor.build`."""
        request = await self._preprocessor.build(message, tenant.name, default_max_tokens, fixed=fixed)
        apply_tenant(tenant, request)
        return request

    def _started(self, request: Request) -> generation_pb2.Started:
        return generation_pb2.Started(
            request_id=request.request_id,
            model=self._model,
            prompt_tokens=request.prompt_len,
            choices=request.choices,
        )

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


def apply_tenant(tenant: ApiKey, request: Request) -> None:
    """Sets the request's tenant, bounds its priority, and salts its prefix hashes, so that no other tenant can infer
    from the time to first token which prompts this tenant has sent."""
    if tenant.name:
        most_urgent = DEFAULT_PRIORITY if tenant.limits.priority is None else tenant.limits.priority
        request.priority = max(request.priority, most_urgent)
        request.tenant = tenant.name
        request.metered = tenant.limits.tokens_per_minute is not None
        request.salt = hashlib.blake2b(
            request.salt, key=tenant.name.encode(), digest_size=32, person=b"tandem.tenant"
        ).digest()
