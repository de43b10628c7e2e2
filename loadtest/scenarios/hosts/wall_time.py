"""The rule that Tandem does not have: a transfer fails when it has lasted for `transfer_timeout_s` since its first read
began, whatever has arrived meanwhile. For the control of a slow link; run in workers."""

from __future__ import annotations

import asyncio
from time import monotonic
from weakref import WeakKeyDictionary

from kvtransfer.receiver import Receiver
from kvtransfer.transport import Pair
from kvtransfer.types import ReadStats
from tandem.errors import TransferFailed

WHY = "the transfer has lasted for longer than its time"


def install() -> None:
    began = WeakKeyDictionary[Receiver, float]()
    read = Receiver._read_once

    async def bounded(self: Receiver, pairs: list[Pair]) -> ReadStats:
        ends = began.setdefault(self, monotonic()) + self._stall
        try:
            async with asyncio.timeout(max(0.0, ends - monotonic())):
                return await read(self, pairs)
        except TimeoutError as error:
            raise TransferFailed(WHY) from error

    Receiver._read_once = bounded  # type: ignore[method-assign]
