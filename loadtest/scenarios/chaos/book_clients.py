"""Clients that send the book's requests, as streams and as jobs, and compare the answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from time import monotonic
from typing import Any

from loadtest.scenarios.chaos.answer_book import Answer, difference, violation, weights
from loadtest.scenarios.chaos.tally import HUNG, UNKEPT, Tally
from tandem.async_client import AsyncClient
from tandem.errors import InternalError, NotFound, TandemError, Unavailable

REQUEST_S = 120.0  # that one answer may take
LEAVES, JOBS = 0.1, 0.3  # shares of the requests
EACH = 10  # requests over one connection, which is to one of the routers

Noted = Callable[[float, float], None]


async def ask(
    client: AsyncClient,
    request: dict[str, Any],
    answer: Answer,
    job: bool = False,
    leave_after: int | None = None,
    gap: Noted = lambda start, end: None,
) -> None:
    """Reads one request to its end, or until `leave_after` pieces have arrived. Raises TandemError."""
    if job:
        submitted = await client.submit(**request)
        answer.job = True
        pieces = client.watch(submitted.job_id)
    else:
        pieces = client.stream(**request, timeout=REQUEST_S)
    count, before = 0, None
    async with aclosing(pieces):
        async for piece in pieces:
            now = monotonic()
            if before is not None and not job:
                gap(before, now)
            before = now
            answer.add(piece)
            count += 1
            if count == leave_after:
                return


async def client_loop(
    target: str, requests: list[dict[str, Any]], references: list[Answer], chance: random.Random, tally: Tally
) -> None:
    """One client: request after request, until it is cancelled."""
    often = weights(requests)
    while True:
        async with AsyncClient(target) as client:
            for _ in range(EACH):
                number = chance.choices(range(len(requests)), often)[0]
                if not await _request_once(client, requests[number], references[number], chance, tally):
                    break  # with another connection: this one may be broken


async def _request_once(
    client: AsyncClient, request: dict[str, Any], reference: Answer, chance: random.Random, tally: Tally
) -> bool:
    job, leaves = chance.random() < JOBS, chance.random() < LEAVES
    received, began, registries = Answer(), monotonic(), tally.registries
    error: TandemError | None = None
    try:
        async with asyncio.timeout(2 * REQUEST_S):
            await ask(client, request, received, job, chance.randint(1, 6) if leaves else None, tally.gap)
    except NotFound as failed:
        kept = tally.registries == registries
        error = failed if kept else Unavailable(failed.message, reason=UNKEPT)
    except TandemError as failed:
        error = failed
    except TimeoutError:
        error = InternalError(f"no end within {2 * REQUEST_S:.0f} s", reason=HUNG)
    ended = monotonic()
    tally.served += [(ended, worker) for pair in received.workers for worker in pair if worker]
    if leaves and error is None:
        tally.outcomes["left in the middle"] += 1
        if not received.begins(reference):
            tally.violate(
                violation(received, reference),
                f"{request!s:.160}: what came differs: {difference(received, reference)}",
            )
        return True
    tally.judge("job" if received.job else "submission" if job else "stream", request, received, reference, error)
    tally.longest_s = max(tally.longest_s, ended - began)
    tally.ended.append(ended)
    return error is None


async def answered(target: str, requests: list[dict[str, Any]], tolerance: float = 0.0) -> list[Answer]:
    """Each request's answer, one after another; others may differ from it by `tolerance`."""
    answers = []
    async with AsyncClient(target) as client:
        for request in requests:
            answers.append(Answer(tolerance))
            await ask(client, request, answers[-1])
    return answers
