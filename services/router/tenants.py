"""What each tenant has in progress, and what it has had in the last minute, at this router.

A bucket holds the tokens of a minute and fills evenly. A request takes its prompt out before it begins, and what it
generates as that is sent; this may go below nothing, which the tenant's next request then waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from services.router.keys import ANYBODY, Key, Keys
from tandem.errors import Busy, TooLarge

MINUTE_S = 60.0
RETRY_S = 1.0  # when one of so many in progress has ended, nobody knows


@dataclass(slots=True)
class _Tenant:
    running: int = 0
    tokens: float = 0.0  # in its bucket
    filled: float = 0.0  # when that was so
    known: bool = False  # whether its bucket has been filled before

    def fill(self, per_minute: int) -> None:
        """Brings the bucket up to now; a new one is full, and a limit that has become smaller holds at once."""
        now = monotonic()
        self.tokens = per_minute if not self.known else self.tokens + per_minute * (now - self.filled) / MINUTE_S
        self.tokens, self.filled, self.known = min(self.tokens, per_minute), now, True


class Tenants:
    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._tenants: dict[str, _Tenant] = {}

    def who(self, authorization: str | None) -> Key:
        """Raises Unauthenticated."""
        return self._keys.check(authorization) if self._keys else ANYBODY

    @contextmanager
    def admitted(self, key: Key, prompt_tokens: int, requests: int) -> Iterator[None]:
        """Counts `requests` in progress inside. Raises Busy when the tenant may have no more now, TooLarge when it
        never may."""
        if key == ANYBODY:
            yield
            return
        tenant = self._tenants.setdefault(key.name, _Tenant())
        _check_requests(key, tenant, requests)
        _take(key, tenant, prompt_tokens)
        tenant.running += requests
        try:
            yield
        finally:
            tenant.running -= requests

    def generated(self, name: str, tokens: int) -> None:
        if (tenant := self._tenants.get(name)) is not None:
            tenant.tokens -= tokens


def _check_requests(key: Key, tenant: _Tenant, requests: int) -> None:
    most = key.limits.requests
    if most is None:
        return
    if requests > most:
        raise TooLarge(
            f"{key.name} may have {most} requests in progress, this one counts as {requests}",
            field="sampling.n",
            bound=f"at most {most}",
        )
    if tenant.running + requests > most:
        raise Busy(
            f"{key.name} has {tenant.running} requests in progress, and {most} is its limit",
            reason="TENANT_REQUESTS",
            retry_after=RETRY_S,
        )


def _take(key: Key, tenant: _Tenant, tokens: int) -> None:
    most = key.limits.tokens_per_minute
    if most is None:
        return
    if tokens > most:
        raise TooLarge(
            f"{key.name} may have {most} tokens in a minute, this prompt has {tokens}",
            field="text",
            bound=f"at most {most} tokens",
        )
    tenant.fill(most)
    if tenant.tokens < tokens:
        raise Busy(
            f"{key.name} has had its {most} tokens of this minute",
            reason="TENANT_TOKENS",
            retry_after=(tokens - tenant.tokens) / most * MINUTE_S,
        )
    tenant.tokens -= tokens
