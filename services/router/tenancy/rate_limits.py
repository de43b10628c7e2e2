"""Each tenant's requests in progress and tokens of the last minute, at this router.

A bucket holds the tokens of a minute and fills evenly. A request takes its prompt out before it begins, and generated
tokens as they are sent; the bucket may become negative, and the tenant's next request then waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from services.router.tenancy.api_keys import ANONYMOUS, ApiKey, ApiKeys
from tandem.errors import Busy, TooLarge

MINUTE_S = 60.0
INTERACTIVE_SHARE = 0.5  # of the bucket, reserved for requests other than jobs
JOB_ALLOWANCE_SHARE = 0.125  # of the bucket, that a job may generate per allowance
RETRY_S = 1.0  # it is unknown when a request in progress will end


@dataclass(slots=True)
class _Tenant:
    running: int = 0
    tokens: float = 0.0  # in its bucket
    filled: float = 0.0  # when `tokens` was correct
    known: bool = False  # whether its bucket has been filled before
    promised: int = 0  # tokens in it that running jobs may still generate

    def fill(self, per_minute: int) -> None:
        """Fills the bucket for the time that has passed. A new bucket is full; a reduced limit applies at once."""
        now = monotonic()
        self.tokens = per_minute if not self.known else self.tokens + per_minute * (now - self.filled) / MINUTE_S
        self.tokens, self.filled, self.known = min(self.tokens, per_minute), now, True


class RateLimits:
    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys
        self._tenants: dict[str, _Tenant] = {}

    def who(self, authorization: str | None) -> ApiKey:
        """The key. Raises Unauthenticated."""
        return self._keys.check(authorization) if self._keys else ANONYMOUS

    def named(self, name: str) -> ApiKey:
        """The tenant of that name, with its current limits: for work that continues without its client, such as a job.
        Raises PermissionDenied when its last key has been removed."""
        return self._keys.named(name) if self._keys and name else ApiKey(name)

    @contextmanager
    def admitted(
        self, key: ApiKey, prompt_tokens: int, requests: int, began: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Counts `requests` as in progress inside the block. If no worker `began` with them, the prompt is given back:
        refused for want of room, they will be sent again. Raises Busy when the tenant is at its limit, TooLarge when
        the limit never permits them."""
        if key == ANONYMOUS:
            yield
            return
        tenant = self._tenants.setdefault(key.name, _Tenant())
        _check_requests(key, tenant, requests)
        taken = _take(key, tenant, prompt_tokens)
        tenant.running += requests
        try:
            yield
        finally:
            tenant.running -= requests
            if not began():
                tenant.tokens += taken

    @contextmanager
    def job(self, key: ApiKey, prompt_tokens: int, longest: int) -> Iterator[Allowance]:
        """Charges a job's prompt, and allows it a part of its `longest` tokens. Raises Busy while that would leave too
        little for the tenant's other requests. Jobs do not count as requests in progress."""
        if key.limits.tokens_per_minute is None:
            yield Allowance(key, _Tenant(), longest)
            return
        check_prompt(key, prompt_tokens)
        allowance = Allowance(key, self._tenants.setdefault(key.name, _Tenant()), longest)
        allowance.take(prompt_tokens)
        try:
            yield allowance
        finally:
            allowance.give_back()

    def generated(self, name: str, tokens: int) -> None:
        """Only of requests whose key has a limit: nothing would fill the bucket again for the others."""
        if (tenant := self._tenants.get(name)) is not None:
            tenant.tokens -= tokens


class Allowance:
    """The tokens that a running job may still generate before it needs more. Jobs never use the last INTERACTIVE_SHARE
    of their tenant's bucket, so jobs wait for the tenant's other requests and not vice versa."""

    def __init__(self, key: ApiKey, tenant: _Tenant, longest: int) -> None:
        self._key, self._tenant = key, tenant
        self._most = key.limits.tokens_per_minute
        self._part = longest if self._most is None else max(1, min(longest, int(self._most * JOB_ALLOWANCE_SHARE)))
        self._left = 0

    def take(self, prompt_tokens: int = 0) -> None:
        """Raises Busy."""
        if self._most is None:
            return
        self._tenant.fill(self._most)
        wanted = min(self._most * INTERACTIVE_SHARE + prompt_tokens + self._part, self._most)
        missing = wanted - (self._tenant.tokens - self._tenant.promised)
        if missing > 0:
            raise Busy(
                f"the jobs of {self._key.name} have used their share of its {self._most} tokens per minute",
                reason="TENANT_TOKENS",
                retry_after=missing / self._most * MINUTE_S,
            )
        self._tenant.tokens -= prompt_tokens
        self._tenant.promised += self._part
        self._left += self._part

    def spend(self, tokens: int) -> None:
        """Counts generated tokens; `RateLimits.generated` charges them."""
        used = min(tokens, self._left)
        self._left -= used
        self._tenant.promised -= used

    def check(self) -> None:
        """Raises Busy when the allowance is spent and the bucket has too little for another one."""
        if self._left <= 0:
            self.take()

    def give_back(self) -> None:
        self._tenant.promised -= self._left
        self._left = 0


def _check_requests(key: ApiKey, tenant: _Tenant, requests: int) -> None:
    check_count(key, requests)
    most = key.limits.requests
    if most is not None and tenant.running + requests > most:
        raise Busy(
            f"{key.name} has {tenant.running} requests in progress, and {most} is its limit",
            reason="TENANT_REQUESTS",
            retry_after=RETRY_S,
        )


def check_count(key: ApiKey, requests: int) -> None:
    """Raises TooLarge if `requests` are more than the tenant may ever have in progress."""
    most = key.limits.requests
    if most is not None and requests > most:
        raise TooLarge(
            f"{key.name} may have {most} requests in progress, this one counts as {requests}",
            field="sampling.n",
            bound=f"at most {most}",
        )


def check_prompt(key: ApiKey, tokens: int) -> None:
    """Raises TooLarge for a prompt that can never be charged to its tenant."""
    most = key.limits.tokens_per_minute
    if most is not None and tokens > most:
        raise TooLarge(
            f"{key.name} may have {most} tokens in a minute, this prompt has {tokens}",
            field="text",
            bound=f"at most {most} tokens",
        )


def _take(key: ApiKey, tenant: _Tenant, tokens: int) -> int:
    """Returns how many were taken."""
    check_prompt(key, tokens)
    most = key.limits.tokens_per_minute
    if most is None:
        return 0
    tenant.fill(most)
    if tenant.tokens < tokens:
        raise Busy(
            f"{key.name} has used its {most} tokens of this minute",
            reason="TENANT_TOKENS",
            retry_after=(tokens - tenant.tokens) / most * MINUTE_S,
        )
    tenant.tokens -= tokens
    return tokens
