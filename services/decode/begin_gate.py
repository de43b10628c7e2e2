"""Lets one request begin on a decode worker while no other request begins there.

A request begins when it joins the engine, and has begun when the engine has sampled its next token. If the worker
crashes while a request begins alone, either that request is the cause or the crash is a coincidence
(services/router/execution/poison_requests.py).
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Beginning:
    """One request that begins. The gate counts it until `over`, or until the `with` block ends."""

    def __init__(self, gate: BeginGate, alone: bool) -> None:
        self._gate: BeginGate | None = gate
        self._alone = alone

    def over(self) -> None:
        """Safe to repeat."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate._leave(self._alone)

    def __enter__(self) -> Beginning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()


class BeginGate:
    def __init__(self) -> None:
        self._count = 0  # requests that begin
        self._empty = asyncio.Event()  # that count is 0
        self._empty.set()
        self._open = asyncio.Event()  # no request begins alone, or waits for it
        self._open.set()
        self._alone = asyncio.Lock()  # held by the one that begins alone

    async def enter(self) -> Beginning:
        """Waits while another request begins alone."""
        while not self._open.is_set():
            await self._open.wait()
        return self._enter(alone=False)

    async def enter_alone(self) -> Beginning:
        """Waits for those that begin alone, in their order, keeps new requests out, and waits for those that begin
        already. The caller bounds the wait."""
        await self._alone.acquire()
        self._open.clear()
        try:
            await self._empty.wait()
        except BaseException:
            self._reopen()
            raise
        return self._enter(alone=True)

    def _enter(self, alone: bool) -> Beginning:
        self._count += 1
        self._empty.clear()
        return Beginning(self, alone)

    def _leave(self, alone: bool) -> None:
        self._count -= 1
        if self._count == 0:
            self._empty.set()
        if alone:
            self._reopen()

    def _reopen(self) -> None:
        self._open.set()
        self._alone.release()
