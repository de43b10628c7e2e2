"""One supervisor for each cluster name in a registry: a lease that it renews.

`run` names one `tandem up`. A supervisor that Ray restarts has the same run and takes over the lease at once; a
supervisor of another run waits until the lease expires, and is refused if the holder renews it. An unreachable registry
does not end a supervisor, only another holder does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

import structlog

from cluster.state.registry import SUPERVISOR_LEASE_S, Registry
from tandem.errors import PreconditionFailed, Unavailable

log = structlog.get_logger(__name__)


class Lease:
    def __init__(self, registry: Registry, run: str, lease_s: float | None = None) -> None:
        self._registry = registry
        self._run = run
        self._lease_s = SUPERVISOR_LEASE_S if lease_s is None else lease_s
        self._every_s = self._lease_s / 4
        self._held = False
        self._token = f"{run}/{socket.gethostname()}:{os.getpid()}/{secrets.token_hex(8)}"

    async def take(self) -> None:
        """Takes the lease, after waiting for another holder's lease to expire. Raises PreconditionFailed when another
        supervisor renews it, Unavailable when the registry does not answer."""
        before = None
        while True:
            holder, left_s = await self._registry.acquire_lease(self._token, self._run, self._lease_s)
            if holder == self._token:
                self._held = True
                return
            if before is not None and left_s > before:
                raise self._other(holder)
            log.info("supervisor.waits_for_lease", holder=_host_and_process(holder), seconds=left_s)
            wait_s = min(left_s, 1.5 * self._every_s)  # long enough for a holder that is alive to renew
            before = left_s - 0.5 * wait_s
            await asyncio.sleep(wait_s)

    async def keep(self) -> None:
        """Renews until it is cancelled. Raises PreconditionFailed when another supervisor has the lease."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                # Once held, it is not taken back from the next incarnation of this supervisor.
                run = "" if self._held else self._run
                holder, _ = await self._registry.acquire_lease(self._token, run, self._lease_s)
            except Unavailable as error:
                log.warning("supervisor.lease_not_renewed", error=error.message)
                continue
            if holder != self._token:
                raise self._other(holder)
            self._held = True

    async def release(self) -> None:
        try:
            await self._registry.release_lease(self._token)
        except Unavailable as error:
            log.warning("supervisor.lease_not_released", error=error.message)  # it expires by itself

    def _other(self, holder: str) -> PreconditionFailed:
        name = self._registry.cluster
        return PreconditionFailed(
            f"cluster {name!r} has a supervisor on this registry already ({_host_and_process(holder)})",
            reason="ALREADY_UP",
            field="cluster",
            bound="a name that no other cluster on this registry has",
        )


def _host_and_process(token: str) -> str:
    return token.split("/")[1] if token.count("/") == 2 else "unknown"
