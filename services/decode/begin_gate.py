"""Lets one request begin on a decode worker while no other request begins there.

A request begins when it joins the engine, and has begun when the engine has sampled its next token. If the worker
crashes while a request begins alone, either that request is the cause or the crash is a coincidence
(services/router/execution/poison_requests.py).
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack


class BeginGate:
    """Counts a request from `enter` until the ExitStack that it returned is closed."""

    def __init__(self) -> None:
        self._count = 0  # requests that begin
        self._empty = asyncio.Event()  # the count is 0
        self._empty.set()
        self._open = asyncio.Event()  # no request begins alone, or waits for it
        self._open.set()
        self._alone = asyncio.Lock()  # held by the request that begins alone

    async def enter(self) -> ExitStack:
        """Waits while another request begins alone."""
        while not self._open.is_set():
            await self._open.wait()
        return self._enter(alone=False)

    async def enter_alone(self) -> ExitStack:
        """Waits for earlier requests that begin alone, blocks new requests, and waits for those that are beginning. The
        caller bounds the wait."""
        await self._alone.acquire()
        self._open.clear()
        try:
            await self._empty.wait()
        except BaseException:
            self._reopen()
            raise
        return self._enter(alone=True)

    def _enter(self, alone: bool) -> ExitStack:
        self._count += 1
        self._empty.clear()
        beginning = ExitStack()
        beginning.callback(self._leave, alone)
        return beginning

    def _leave(self, alone: bool) -> None:
        self._count -= 1
        if self._count == 0:
            self._empty.set()
        if alone:
            self._reopen()

    def _reopen(self) -> None:
        self._open.set()
        self._alone.release()
