"""Bounds the rate of each tenant's units of work that cost the event loop time."""

from __future__ import annotations

import asyncio
from time import monotonic


class TenantRate:
    def __init__(self, per_s: float, burst_s: float) -> None:
        """`per_s`: units of one tenant per second. `burst_s`: seconds by which a tenant may be ahead of this rate."""
        self._per_s = per_s
        self._burst_s = burst_s
        self._paid_at: dict[str, float] = {}  # when the units so far are within the rate (monotonic seconds)

    def count(self, tenant: str, count: float) -> float:
        """Counts `count` units. Returns the seconds until the tenant is within the rate."""
        now = monotonic()
        self._paid_at[tenant] = max(now, self._paid_at.get(tenant, now)) + count / self._per_s
        return max(0.0, self._paid_at[tenant] - now - self._burst_s)

    async def keep(self, tenant: str, count: float) -> None:
        """Counts `count` units, and waits until the tenant is within the rate."""
        if ahead_s := self.count(tenant, count):
            await asyncio.sleep(ahead_s)

    def forget(self) -> None:
        """Drops the state of the tenants that are within the rate."""
        now = monotonic()
        self._paid_at = {tenant: at for tenant, at in self._paid_at.items() if at > now}
