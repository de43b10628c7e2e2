"""A Decode call that is cancelled at any of its awaits frees its blocks exactly once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

from services.decode.servicer import DecodeServicer
from services.grpc_server import Channels
from tandem.tasks import end
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.muxed import decoded

MOST_AWAITS = 200


class CancelledAt:
    """Awaits a coroutine and cancels the task at its `number`-th await, and with `again` at all later ones."""

    def __init__(self, work: Coroutine[Any, Any, None], number: int, again: bool) -> None:
        self._work, self._number, self._again = work, number, again
        self.awaits = 0

    def __await__(self) -> Generator[Any, None, None]:
        inner, task, raised = self._work.__await__(), asyncio.current_task(), None
        assert task is not None
        while True:
            try:
                waited = inner.throw(raised) if raised else inner.send(None)
            except StopIteration:
                return
            self.awaits += 1
            if self.awaits == self._number or (self._again and self.awaits > self._number):
                task.cancel()
            raised = None
            try:
                yield waited
            except BaseException as error:  # noqa: BLE001, the coroutine gets it
                raised = error


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("remote", [True, False])
async def test_cancelled_at_any_await_the_blocks_are_free(
    inside: Any, monkeypatch: pytest.MonkeyPatch, remote: bool, again: bool
) -> None:
    """With local and remote prefill, with one cancellation, and with another one at each await of the clean-up. The
    last round is not cancelled, and answers."""
    decode, number, runs = DecodeServicer.Decode, 0, list[CancelledAt]()
    over = asyncio.Event()

    async def cancelled(self: Any, request: Any, context: Any) -> None:
        runs.append(CancelledAt(decode(self, request, context), number, again))
        try:
            await runs[-1]
        except asyncio.CancelledError:
            over.set()  # gRPC cannot end a call whose write was cancelled; its caller does
            raise

    monkeypatch.setattr(DecodeServicer, "Decode", cancelled)
    chance = random.Random(1)
    async with inside() as cluster:
        prefill, channels = cluster.workers["prefill-0"], Channels()
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
        for number in range(1, MOST_AWAITS):
            prompt = chance.choices(range(5, 200), k=50)  # not cached
            request = decode_pb2.DecodeRequest(
                request_id=f"r{number}", attempt=1, token_ids=prompt, prompt_tokens=50, max_tokens=3
            )
            request.sampling.top_p = 1.0
            if remote:
                request.prefill.CopyFrom(
                    common_pb2.WorkerRef(
                        worker_id="prefill-0", incarnation=prefill.incarnation, address=prefill.address
                    )
                )
            over.clear()
            call, ended = asyncio.create_task(decoded(stub, request)), asyncio.create_task(over.wait())
            await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            if call.done():
                await end(ended)
                assert len(await call) == 3
                break
            await cluster.freed()
            await end(call)
        assert runs[-1].awaits < number == len(runs)
        assert number > 5
        await cluster.freed()
        assert await cluster.ledgers_balance()
        await channels.close()
