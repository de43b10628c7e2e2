"""Effect of long prompts on steady streams: each server undisturbed and disturbed in turn, one server after another."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from statistics import mean
from time import perf_counter, process_time

from loadtest.comparison.peer_servers import Peers, Server, make, started
from loadtest.harness.goodput import Load, Outcome
from loadtest.harness.processes import precedence
from loadtest.harness.stats import Row, Section, Tick, percentile
from loadtest.loadgen.generator import follow, tick_late
from loadtest.loadgen.targets import Http
from tandem.errors import Unavailable

SHAPE, VOCAB = "SmolLM2-135M", 49152
REST_S = 1.0  # in which a server drops what was cut off


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


@dataclass(frozen=True)
class Window:
    """What readers of the streams saw in the counted seconds. Seconds; tokens a second."""

    itl_p99: float
    ttft_mean: float
    ttft_worst: float
    throughput: float
    long_ttft: float  # mean of the long prompts'; 0 without them
    client_cpu: float  # cores that this client used itself

    @classmethod
    def of(cls, load: Load) -> Window:
        """A stream or long prompt that has no token yet counts as waiting until the end. Raises ValueError when there
        are none."""
        waits = load.values("ttft")
        longs = [outcome.waited for outcome in load.outcomes if outcome.beside and outcome.waited is not None]
        if not waits:
            raise ValueError("no stream began within the window; make it longer")
        return cls(
            percentile(load.values("itl"), 0.99),
            mean(waits),
            max(waits),
            load.throughput,
            mean(longs) if longs else 0.0,
            load.cores,
        )


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """A section for each server. Raises SettingsError, Unavailable."""
    sections = []
    for side in plan.sides:
        tick(f"starting {side}")
        server = make(side, peers.checkpoint(SHAPE), peers)
        with started([server]):
            with precedence() as priority_note:
                sections.append(_server(server, plan, tick, priority_note))
    return sections


def _server(server: Server, plan: Plan, tick: Tick, priority_note: str) -> Section:
    calm: list[Window] = []
    disturbed: list[Window] = []
    asyncio.run(observe(server, plan, seconds=min(5.0, plan.seconds), disturb=True))  # warms up
    for number in range(plan.rounds):
        for windows in (calm, disturbed):
            tick(f"{server.name}: {'undisturbed' if windows is calm else 'disturbed'}, round {number + 1}")
            load = asyncio.run(observe(server, plan, seconds=plan.seconds, disturb=windows is disturbed))
            windows.append(Window.of(load))
    names = {"itl_p99": "ITL p99", "ttft_mean": "stream TTFT, mean", "ttft_worst": "stream TTFT, worst"}
    rows = []
    for name, title in {**names, "throughput": "stream tokens/s"}.items():
        a, b = ([getattr(window, name) for window in windows] for windows in (disturbed, calm))
        unit = "1" if name == "throughput" else "s"
        rows.append(Row.of(f"{server.name}: {title}", a, b, {"disturbed": a, "undisturbed": b}, unit))
    cpu = max(window.client_cpu for window in calm + disturbed)
    notes = [
        f"{plan.streams} streams of {plan.prompt} tokens in and {plan.output} out; a prompt of {plan.long} tokens every"
        f" {plan.every:g} s; {plan.rounds} rounds of {plan.seconds:g} s each way",
        f"first token of the long prompts: {mean(window.long_ttft for window in disturbed):.2f} s (mean)",
        f"the client shares the server's two cores: it used {cpu:.2f} of one at most; {priority_note}",
    ]
    details = {"undisturbed": [vars(window) for window in calm], "disturbed": [vars(window) for window in disturbed]}
    return Section(f"Interference: {server.name}", "disturbed / undisturbed", rows, notes, details)


async def observe(server: Server, plan: Plan, *, seconds: float, disturb: bool) -> Load:
    """Streams for `settle` and `seconds`, and long prompts in the latter, which alone are counted. Raises Unavailable
    when one of them fails."""
    load = Load("with long prompts" if disturb else "undisturbed", 0.0, plan.settle, seconds)
    lags: list[float] = []
    async with Http(f"http://127.0.0.1:{server.port}", server.model) as target:
        began, used = perf_counter(), process_time()

        async def ask(prompt: int, output: int, beside: bool) -> None:
            messages = target.stream(random.choices(range(VOCAB), k=prompt), output)
            outcome = Outcome(perf_counter() - began, prompt, output, beside)
            load.outcomes.append(outcome)
            await follow(messages, outcome, began)
            if outcome.state != "done":
                raise Unavailable(f"{server.name}: a request was {outcome.state}: {outcome.why}")

        async def stay(place: int) -> None:
            # The first of a place is shorter, so that not all end at once.
            output = max(2, plan.output * (place + 1) // plan.streams)
            while True:
                await ask(plan.prompt, output, False)
                output = plan.output

        async def disturb_at(at: float) -> None:
            await asyncio.sleep(began + at - perf_counter())
            await ask(plan.long, plan.long_output, True)

        tasks = [asyncio.create_task(stay(place)) for place in range(plan.streams)]
        if disturb:
            times = [plan.settle + place * plan.every for place in range(math.ceil(seconds / plan.every))]
            tasks += [asyncio.create_task(disturb_at(at)) for at in times]
        ticking = asyncio.create_task(tick_late(lags, lambda: None))
        try:
            await asyncio.wait(tasks, timeout=load.until, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (*tasks, ticking):
                task.cancel()
            await asyncio.gather(*tasks, ticking, return_exceptions=True)
        load.lag = percentile(lags or [0.0], 0.99)
        load.cores = (process_time() - used) / (perf_counter() - began)
    await asyncio.sleep(REST_S)
    return load
