"""What long prompts do to steady streams: each server undisturbed and disturbed in turn, one server after another."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from time import perf_counter, process_time

from loadtest import web
from loadtest.local import precedence
from loadtest.peers.servers import Peers, Server, make, started
from loadtest.stats import Row, Section, Spread, Tick, percentile, ratios

SHAPE, VOCAB = "SmolLM2-135M", 49152


@dataclass(frozen=True)
class Plan:
    """`rounds` of `seconds` undisturbed and as many disturbed, after `settle` seconds of streams alone."""

    sides: tuple[str, ...] = ("vllm-aggregated", "vllm-pd", "tandem-pd")
    rounds: int = 3
    seconds: float = 60.0
    settle: float = 8.0
    streams: int = 8
    prompt: int = 64
    output: int = 256
    long: int = 3000
    long_output: int = 4
    every: float = 10.0

    @property
    def ticks(self) -> int:
        return len(self.sides) * (1 + 2 * self.rounds)


@dataclass
class Stream:
    """When it was sent, and when its messages came, with how many tokens; seconds of perf_counter."""

    sent: float
    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """What readers of the streams saw between two moments. Seconds; tokens a second."""

    itl_p99: float
    ttft_mean: float
    ttft_worst: float
    throughput: float
    long_ttft: float  # mean of the long prompts'; 0 without them
    client_cpu: float  # cores that this client used itself

    @classmethod
    def of(cls, streams: Sequence[Stream], long: Sequence[Stream], start: float, end: float, cpu: float) -> Window:
        """Intervals that end within it, first tokens of streams sent within it; one that has none counts as waiting
        until the end. Raises ValueError when there are none."""
        gaps = [b - a for one in streams for a, b in pairwise(one.at) if start <= b < end]
        waits = [(one.at[0] if one.at else end) - one.sent for one in streams if start <= one.sent < end]
        tokens = sum(n for one in streams for at, n in zip(one.at, one.tokens, strict=True) if start <= at < end)
        longs = [(one.at[0] if one.at else end) - one.sent for one in long]
        if not waits:
            raise ValueError("no stream began within the window; make it longer")
        return cls(
            percentile(gaps, 0.99), mean(waits), max(waits), tokens / (end - start), mean(longs) if longs else 0.0, cpu
        )


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """A section for each server. Raises SettingsError, Unavailable."""
    sections = []
    for side in plan.sides:
        tick(f"starting {side}")
        server = make(side, peers.checkpoint(SHAPE), peers)
        with started([server]):
            with precedence() as said:
                sections.append(_server(server, plan, tick, said))
    return sections


def _server(server: Server, plan: Plan, tick: Tick, said: str) -> Section:
    calm: list[Window] = []
    disturbed: list[Window] = []
    asyncio.run(_window(server, plan, seconds=min(5.0, plan.seconds), disturb=True, needs=False))  # warms up
    for number in range(plan.rounds):
        for windows in (calm, disturbed):
            tick(f"{server.name}: {'undisturbed' if windows is calm else 'disturbed'}, round {number + 1}")
            window = asyncio.run(_window(server, plan, seconds=plan.seconds, disturb=windows is disturbed))
            assert window is not None
            windows.append(window)
    names = {"itl_p99": "ITL p99", "ttft_mean": "stream TTFT, mean", "ttft_worst": "stream TTFT, worst"}
    rows = []
    for name, title in {**names, "throughput": "stream tokens/s"}.items():
        a, b = ([getattr(one, name) for one in windows] for windows in (disturbed, calm))
        unit = "1" if name == "throughput" else "s"
        beside = {"disturbed": (Spread.of(a), unit), "undisturbed": (Spread.of(b), unit)}
        rows.append(Row(f"{server.name}: {title}", ratios(a, b), beside))
    cpu = max(one.client_cpu for one in calm + disturbed)
    notes = [
        f"{plan.streams} streams of {plan.prompt} tokens in and {plan.output} out; a prompt of {plan.long} tokens every"
        f" {plan.every:g} s; {plan.rounds} rounds of {plan.seconds:g} s each way",
        f"first token of the long prompts: {mean(one.long_ttft for one in disturbed):.2f} s (mean)",
        f"the client shares the server's two cores: it used {cpu:.2f} of one at most; {said}",
    ]
    details = {"undisturbed": [vars(one) for one in calm], "disturbed": [vars(one) for one in disturbed]}
    return Section(f"Interference: {server.name}", "disturbed / undisturbed", rows, notes, details)


async def _window(server: Server, plan: Plan, *, seconds: float, disturb: bool, needs: bool = True) -> Window | None:
    """Streams for `settle` + `seconds`; measured in the latter. None where no measurement `needs` to come of it."""
    streams: list[Stream] = []
    long: list[Stream] = []

    async def follow(place: int) -> None:
        # The first of a place is shorter, so that not all end at once.
        output = max(2, plan.output * (place + 1) // plan.streams)
        while True:
            streams.append(Stream(perf_counter()))
            await _read(streams[-1], server, plan.prompt, output)
            output = plan.output

    async def disturb_at(delay: float) -> None:
        await asyncio.sleep(delay)
        long.append(Stream(perf_counter()))
        await _read(long[-1], server, plan.long, plan.long_output)

    tasks = [asyncio.create_task(follow(place)) for place in range(plan.streams)]
    asked: list[asyncio.Task[None]] = []
    try:
        await _watch(tasks, plan.settle)
        start, cpu = perf_counter(), process_time()
        if disturb:
            delays = [place * plan.every for place in range(math.ceil(seconds / plan.every))]
            asked = [asyncio.create_task(disturb_at(delay)) for delay in delays]
        await _watch(tasks, seconds)
        end, used = perf_counter(), process_time() - cpu
        for task in asked:
            if task.done():
                task.result()
    finally:
        for task in [*tasks, *asked]:
            task.cancel()
        await asyncio.gather(*tasks, *asked, return_exceptions=True)
    await asyncio.sleep(1.0)  # the server drops what was cut off
    return Window.of(streams, long, start, end, used / (end - start)) if needs else None


async def _read(stream: Stream, server: Server, prompt: int, output: int) -> None:
    ids = random.choices(range(VOCAB), k=prompt)
    async for tokens in web.stream(server.port, server.model, ids, output):
        stream.at.append(perf_counter())
        stream.tokens.append(tokens)


async def _watch(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Sleeps, unless a task ends, which none should: then raises what ended it."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
