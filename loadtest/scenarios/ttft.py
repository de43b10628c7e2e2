"""Disaggregated and local prefill: the time to first token, idle and during running streams, and the harm of a prompt
to those streams.

Two clusters at once, used in turn: `split` has a prefill and a decode worker, `local` a decode worker only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from loadtest.harness.processes import Local
from loadtest.harness.stats import Row, Section, Spread, Tick, percentile, ratios
from tandem.async_client import AsyncClient
from tandem.results import Piece, Receipt

SIDES = ("split", "local")
STREAM_PROMPT = 16
MAX_GAP_S = 30.0
MAX_ASKED = 5  # how often one prompt is asked until a stream runs beside it
Gap = tuple[float, float]  # when it began and ended, seconds of perf_counter


@dataclass(frozen=True)
class Plan:
    """Prompts of each length, `repeats` times each, on both sides: idle, then with `streams` running. Before the
    prompts of a loaded round the streams run alone for `settle` and then, measured, for `calm` seconds. `dtype` is the
    engines'."""

    prompts: tuple[int, ...] = (64, 512, 2048)
    repeats: int = 5
    streams: int = 4
    stream_tokens: int = 1500
    settle: float = 1.0
    calm: float = 3.0
    dtype: str = "bfloat16"
    kv_blocks: int = 900

    @property
    def ticks(self) -> int:
        return 1 + len(self.prompts) + self.repeats


@dataclass
class Asked:
    """What one prompt of two output tokens showed. `second` is seconds from the first token to the second."""

    receipt: Receipt
    ttft: float
    second: float
    during: Gap


class Gaps(list[Gap]):
    """Of all streams, in the order of their ends."""

    def __init__(self) -> None:
        super().__init__()
        self._longer = asyncio.Event()

    def note(self, piece: Piece, last: float) -> float:
        """Tokens that came together: the first has the gap, the others none, as a reader would see it."""
        if not piece.token_ids:
            return last
        now = perf_counter()
        if last:
            self.append((last, now))
            self.extend([(now, now)] * (len(piece.token_ids) - 1))
            self._longer.set()
        return now

    async def reach(self, moment: float) -> None:
        """Waits for the end of the gap in which the moment lies. Raises TimeoutError if the streams have stopped."""
        async with asyncio.timeout(MAX_GAP_S):
            while not self or self[-1][1] < moment:
                self._longer.clear()
                await self._longer.wait()


@dataclass
class _Round:
    """One loaded round of one side: gaps between tokens of the streams in seconds, alone and by the prompt's length."""

    calm: list[float]
    asked: dict[int, Asked] = field(default_factory=dict)
    gaps: dict[int, list[float]] = field(default_factory=dict)


def run(folder: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    """`folder` holds the checkpoint, `vocab` is its number of token ids."""
    tick("starting two clusters")
    with Local(model=folder, dtype=plan.dtype, kv_blocks=plan.kv_blocks) as local:
        for side in SIDES:
            local.launch("router", f"router-{side}", cluster=side)
            local.launch("decode", f"decode-{side}", core=1, cluster=side)
        local.launch("prefill", "prefill-split", core=0, cluster="split")
        for side, workers in zip(SIDES, (2, 1), strict=True):
            local.wait_seen(f"router-{side}", workers, timeout_s=120.0)
        return asyncio.run(_measure(local, vocab, plan, tick))


async def _measure(local: Local, vocab: int, plan: Plan, tick: Tick) -> Section:
    clients = {side: AsyncClient(local.address(f"router-{side}")) for side in SIDES}
    try:
        idle: dict[int, dict[str, list[Asked]]] = {}
        for length in plan.prompts:
            tick(f"{length} tokens, idle, {plan.repeats} times each way")
            idle[length] = await _idle(clients, vocab, length, plan)
        loaded: dict[str, list[_Round]] = {side: [] for side in SIDES}
        for number in range(plan.repeats):
            tick(f"next to {plan.streams} streams, round {number + 1} of {plan.repeats}")
            for side in SIDES[:: 1 if number % 2 else -1]:
                loaded[side].append(await _loaded(clients[side], vocab, plan))
    finally:
        for client in clients.values():
            await client.close()
    busy = {n: {side: [round_.asked[n] for round_ in rounds] for side, rounds in loaded.items()} for n in plan.prompts}
    rows = [row for n in plan.prompts for row in _first_token(f"{n} tokens, idle", idle[n])]
    rows += [row for n in plan.prompts for row in _first_token(f"{n} tokens, {plan.streams} streams", busy[n])]
    rows += [_harm(side, n, loaded[side]) for n in plan.prompts for side in SIDES]
    read = (
        "first token: split / local (below 1, split is faster). exposed: transfer not hidden by compute / first token."
        " p99 interval: of the running streams while a prompt is computed / before it came"
    )
    first = idle[plan.prompts[0]]["split"][0].receipt
    notes = [
        f"{plan.dtype}, one thread each; the prefill worker pinned to core 0, the decode workers to core 1;"
        f" fresh random prompts; KV over {first.transfer.transport if first.transfer else 'nothing'}",
        "local uses one core where split uses two, so next to streams it is more than a different path",
        *(_phases(n, side, idle[n][side]) for n in plan.prompts for side in SIDES),
    ]
    details = {
        f"{what} {n} {side}": [
            {"ttft": answer.ttft, "second": answer.second, **answer.receipt.to_dict()} for answer in asked
        ]
        for what, answers in (("idle", idle), ("loaded", busy))
        for n, sides in answers.items()
        for side, asked in sides.items()
    }
    return Section("Disaggregated (split) against local prefill", read, rows, notes, details)


async def _idle(clients: dict[str, AsyncClient], vocab: int, length: int, plan: Plan) -> dict[str, list[Asked]]:
    answers: dict[str, list[Asked]] = {side: [] for side in SIDES}
    for number in range(plan.repeats):
        for side in SIDES[:: 1 if number % 2 else -1]:
            answers[side].append(await ask(clients[side], vocab, length))
    return answers


async def ask(client: AsyncClient, vocab: int, length: int) -> Asked:
    sent = perf_counter()
    at, receipt = [], None
    async for piece in client.stream(random.choices(range(vocab), k=length), max_tokens=2, ignore_eos=True):
        at += [perf_counter()] * len(piece.token_ids)
        receipt = piece.receipt or receipt
    assert receipt is not None
    assert receipt.cached_tokens == 0, "a fresh random prompt was cached"
    return Asked(receipt, at[0] - sent, at[1] - at[0], (sent, at[1]))


async def _loaded(client: AsyncClient, vocab: int, plan: Plan) -> _Round:
    async with streams(client, vocab, plan.streams, plan.stream_tokens, plan.settle) as gaps:
        began = perf_counter()
        await asyncio.sleep(plan.calm)
        await gaps.reach(began)
        measured = _Round(within(gaps, (began, perf_counter())))
        for length in plan.prompts:
            measured.asked[length], measured.gaps[length] = await _beside(client, vocab, length, gaps)
    return measured


async def _beside(client: AsyncClient, vocab: int, length: int, gaps: Gaps) -> tuple[Asked, list[float]]:
    """One prompt, and the gaps that it touched. Streams that began together end together, and until the next ones have
    had their first token no gap is open: a prompt that came just then says nothing of them, and is asked again."""
    for _ in range(MAX_ASKED):
        asked = await ask(client, vocab, length)
        await gaps.reach(asked.during[1])
        await asyncio.sleep(0.2)  # the same step's tokens of the other streams
        if touched := within(gaps, asked.during):
            return asked, touched
    raise ValueError(f"no stream ran beside a prompt of {length} tokens, {MAX_ASKED} times; let streams be longer")


@asynccontextmanager
async def streams(
    client: AsyncClient, vocab: int, count: int, tokens: int, settle_s: float = 1.0
) -> AsyncIterator[Gaps]:
    """Running streams, all of which have had their first token for `settle_s`, and the gaps between their tokens so
    far."""
    gaps = Gaps()
    started = [asyncio.Event() for _ in range(count)]

    async def follow(first: asyncio.Event) -> None:
        while True:  # one that came to its end is followed by another
            last = 0.0
            pieces = client.stream(random.choices(range(vocab), k=STREAM_PROMPT), max_tokens=tokens, ignore_eos=True)
            async for piece in pieces:
                last = gaps.note(piece, last)
                first.set()

    tasks = [asyncio.create_task(follow(first)) for first in started]
    try:
        for task, first in zip(tasks, started, strict=True):
            waiting = asyncio.create_task(first.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()  # raises what ended the stream
        await asyncio.sleep(settle_s)
        yield gaps
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.3)  # until the workers have dropped them


def within(gaps: list[Gap], window: Gap) -> list[float]:
    """Seconds of the gaps that touch the window."""
    return [end - start for start, end in gaps if end >= window[0] and start <= window[1]]


def _first_token(what: str, answers: dict[str, list[Asked]]) -> list[Row]:
    split, local = ([answer.ttft for answer in answers[side]] for side in SIDES)
    exposed = [answer.receipt.transfer.exposed if answer.receipt.transfer else 0.0 for answer in answers["split"]]
    reading = [answer.receipt.transfer.seconds if answer.receipt.transfer else 0.0 for answer in answers["split"]]
    second = {f"2nd token {side}": [answer.second for answer in answers[side]] for side in SIDES}
    return [
        Row.of(f"first token, {what}", split, local, {"split": split, "local": local}),
        Row.of(f"exposed transfer, {what}", exposed, split, {"exposed": exposed, "reading": reading, **second}),
    ]


def _harm(side: str, length: int, rounds: list[_Round]) -> Row:
    calm = [gap for round_ in rounds for gap in round_.calm]
    hurt = [gap for round_ in rounds for gap in round_.gaps[length]]
    beside = {
        f"p{share} {name}": (Spread.of([percentile(gaps, share / 100)]), "s")
        for share in (50, 99)
        for name, gaps in (("before", calm), ("during", hurt))
    }
    worst = [percentile(round_.gaps[length], 0.99) for round_ in rounds]
    usual = [percentile(round_.calm, 0.99) for round_ in rounds]
    return Row(f"p99 interval of streams, {length} tokens, {side}", ratios(worst, usual), beside)


def _phases(length: int, side: str, asked: list[Asked]) -> str:
    names = list(asked[0].receipt.phases)
    medians = {name: Spread.of([answer.receipt.phases[name] for answer in asked]).median for name in names}
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in medians.items())
    return f"phases in ms, {length} tokens, idle, {side}: {parts}"
