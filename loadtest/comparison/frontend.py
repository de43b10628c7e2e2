"""Tandem's router compared with NVIDIA Dynamo's frontend: the same HTTP client, and workers that compute nothing.

Tandem's worker is loadtest/comparison/instant_worker.py, Dynamo's is its mocker. Sides take turns; each ratio is of two
neighbouring runs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

import psutil
from tokenizers import Tokenizer

from loadtest.comparison.frontend_servers import TANDEM, Side, Workers, pin, started
from loadtest.comparison.peer_servers import Peers
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.http_connection import Answer, Connection
from loadtest.harness.processes import cpu_seconds, precedence
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios
from loadtest.microbench.hop import Straight
from tandem.errors import Unavailable

INSTANT = "1000000"  # times as fast as the machine that the mocker plays; its 0 ("infinite") still waits 6 ms a token
WARM_UP = 10  # requests
BODIES = 256  # prepared before a run, so that it is not the client's work


@dataclass(frozen=True)
class Shape:
    """`at_once` requests of `prompt` tokens of text, with `output` tokens each."""

    name: str
    prompt: int
    output: int
    at_once: int


REQUESTS = Shape("requests", prompt=128, output=1, at_once=64)
# No more than Tandem's router reads in a second or two: its worker runs ahead by what the connection holds.
TOKENS = Shape("tokens", prompt=128, output=128, at_once=48)


@dataclass(frozen=True)
class Plan:
    """`rounds` of each shape, at each layout, of `seconds` each; `alone` requests one after another before."""

    modes: tuple[str, ...] = ("round-robin", "kv")
    layouts: tuple[str, ...] = ("apart", "shared")
    rounds: int = 5
    seconds: float = 8.0
    alone: int = 200

    @property
    def ticks(self) -> int:
        sides = 1 + len(self.modes)
        return 2 * (1 + sides) + 1 + sides * (self.rounds + 1) * (2 * len(self.layouts) + 1)


@dataclass(frozen=True)
class Run:
    """A second's requests and tokens; CPU seconds of the router for each; cores that each used."""

    requests: float
    tokens: float
    cpu_request: float
    cpu_token: float
    router: float
    worker: float
    client: float
    idle: float  # idle cores, not used by other processes either
    interval: float  # seconds between the tokens of a stream, the median; 0 for one token
    per_message: float  # tokens


# ---- what is measured


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """A section of instant workers for each layout, and one of workers at a model's pace. Raises SettingsError."""
    texts = Texts()
    cores = sorted(os.sched_getaffinity(0))
    try:
        sections = []
        with started(peers, plan.modes, INSTANT, lambda _: 0.0, tick) as (sides, workers):
            tick(f"{plan.alone} requests one at a time")
            sections.append(asyncio.run(_alone(sides, workers, texts, plan)))
            for layout in plan.layouts:
                pin(sides, layout, cores)
                results = _rounds(sides, (REQUESTS, TOKENS), plan, texts, f"{layout}, instant", tick)
                sections.append(_compared(layout, results, plan))
            pin(sides, "shared", cores)
        with started(peers, plan.modes, "1", lambda side: _pace(side, texts), tick) as (sides, _):
            results = _rounds(sides, (TOKENS,), plan, texts, "paced", tick)
            sections.append(_paced(results, plan))
    finally:
        os.sched_setaffinity(0, cores)
    return sections


async def _alone(sides: Sequence[Side], workers: Workers, texts: Texts, plan: Plan) -> Section:
    """Time to first token through each router, nothing else running, and how much of it the workers take."""
    prompt = REQUESTS.prompt
    ours = Straight(workers.address, DEMO_VOCAB, prompt)
    connections = [await Connection.open(side.port) for side in sides]
    ttft: dict[str, list[float]] = {side.name: [] for side in sides}
    own = []
    with precedence() as priority_note:
        for number in range(plan.alone + WARM_UP):
            for side, connection in list(zip(sides, connections, strict=True))[:: 1 if number % 2 else -1]:
                answer = await connection.complete(side.request(texts.draw(prompt), 1))
                ttft[side.name].append(answer.ttft)
            own.append((await ours.stream(1)).ttft)
        mocked = workers.mocked(plan.alone + WARM_UP, prompt)
    for connection in connections:
        connection.close()
    await ours.channel.close()
    behind = {name: median((own if name == TANDEM else mocked)[WARM_UP:]) for name in ttft}
    through = {name: seconds[WARM_UP:] for name, seconds in ttft.items()}
    added = {name: [second - behind[name] for second in seconds] for name, seconds in through.items()}
    rows = []
    for title, values in (("TTFT", through), ("TTFT that the router adds", added)):
        for name in ttft:
            if name != TANDEM:
                beside = {side_name: (Spread.of(values[side_name]), "s") for side_name in (TANDEM, name)}
                rows.append(Row(f"{title}: tandem / {name}", ratios(values[TANDEM], values[name]), beside))
    workers_said = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in behind.items())
    notes = [
        f"{prompt} tokens of text, one of output, instant workers; no process pinned; {priority_note}",
        f"added: less the median of the worker asked straight, by each side's own protocol: {workers_said}",
    ]
    return Section("Routers: one request at a time", "tandem / dynamo: below 1, Tandem is faster", rows, notes)


Found = dict[str, dict[str, list[Run]]]  # shape -> side -> its runs


def _rounds(sides: Sequence[Side], shapes: Sequence[Shape], plan: Plan, texts: Texts, what: str, tick: Tick) -> Found:
    results: Found = {shape.name: {side.name: [] for side in sides} for shape in shapes}
    for number in range(plan.rounds + 1):
        for shape in shapes:
            for side in sides[:: 1 if number % 2 else -1]:
                tick(f"{what}: {side.name}, {shape.name}, {f'round {number}' if number else 'warm-up'}")
                run = asyncio.run(_load(side, shape, plan.seconds if number else min(2.0, plan.seconds), texts))
                if number:  # the first round warms up
                    results[shape.name][side.name].append(run)
    return results


async def _load(side: Side, shape: Shape, seconds: float, texts: Texts) -> Run:
    """Raises Unavailable when an answer was an error, or shorter than asked for."""
    bodies = [side.request(texts.draw(shape.prompt), shape.output) for _ in range(BODIES)]
    waiting, answers = itertools.cycle(bodies), list[Answer]()
    connections = [await Connection.open(side.port) for _ in range(shape.at_once)]

    async def place(connection: Connection) -> None:
        while perf_counter() < end:
            answers.append(await connection.complete(next(waiting)))

    with precedence():
        router, worker, client, began = (
            cpu_seconds(side.router),
            cpu_seconds(side.worker),
            process_time(),
            perf_counter(),
        )
        idle, end = psutil.cpu_times().idle, began + seconds
        try:
            await asyncio.gather(*map(place, connections))
        finally:
            for connection in connections:
                connection.close()
        took = perf_counter() - began
        idle = psutil.cpu_times().idle - idle
        router, worker = cpu_seconds(side.router) - router, cpu_seconds(side.worker) - worker
        client = process_time() - client
    if short := [answer for answer in answers if answer.tokens != shape.output]:
        raise Unavailable(f"{side.name}: {len(short)} of {len(answers)} answers were short: {short[0]}")
    tokens = len(answers) * shape.output
    gaps = [(answer.seconds - answer.ttft) / (answer.tokens - 1) for answer in answers] if shape.output > 1 else [0.0]
    messages = sum(answer.messages - 1 for answer in answers)  # the last one is the usage
    return Run(
        requests=len(answers) / took,
        tokens=tokens / took,
        cpu_request=router / len(answers),
        cpu_token=router / tokens,
        router=router / took,
        worker=worker / took,
        client=client / took,
        idle=idle / took,
        interval=median(gaps),
        per_message=tokens / messages,
    )


def _pace(side: Side, texts: Texts) -> float:
    """Seconds of a step of the mocker, as its streams have them."""
    return asyncio.run(_load(side, TOKENS, 3.0, texts)).interval


# ---- the report


def _compared(layout: str, results: Found, plan: Plan) -> Section:
    rows = []
    for shape, metric, cpu in ((REQUESTS, "requests", "cpu_request"), (TOKENS, "tokens", "cpu_token")):
        rows += _against(f"{metric} a second", shape, results, metric, "1")
        rows += _against(f"router's CPU for one of the {metric}", shape, results, cpu, "s")
    where = {
        "apart": "the router alone on the first core, its worker, the client and everything else on the second",
        "shared": "no process pinned, two cores for all",
    }[layout]
    notes = [where, *_shapes((REQUESTS, TOKENS), plan), *_used(results)]
    return Section(f"Routers: saturated, {layout}", "tandem / dynamo", rows, notes, _details(results))


def _paced(results: Found, plan: Plan) -> Section:
    rows = []
    for title, metric, unit in (
        ("router's CPU for one of the tokens", "cpu_token", "s"),
        ("tokens a second", "tokens", "1"),
        ("seconds between tokens", "interval", "s"),
    ):
        rows += _against(title, TOKENS, results, metric, unit)
    notes = [
        "the mocker at the speed of the machine that it plays, Tandem's worker with steps as long as that one's;"
        " no process pinned",
        *_shapes((TOKENS,), plan),
        *_used(results),
    ]
    return Section("Routers: at a model's pace", "tandem / dynamo", rows, notes, _details(results))


def _against(title: str, shape: Shape, results: Found, metric: str, unit: str) -> list[Row]:
    """Tandem's against each of the others."""
    values = {name: [getattr(run, metric) for run in runs] for name, runs in results[shape.name].items()}
    ours = values.pop(TANDEM)
    return [
        Row(
            f"{title}: tandem / {name}",
            ratios(ours, theirs),
            {TANDEM: (Spread.of(ours), unit), name: (Spread.of(theirs), unit)},
        )
        for name, theirs in values.items()
    ]


def _shapes(shapes: Sequence[Shape], plan: Plan) -> list[str]:
    notes = [
        f"{shape.name}: {shape.prompt} tokens of text in, {shape.output} out, {shape.at_once} at once"
        for shape in shapes
    ]
    return [*notes, f"{plan.rounds} rounds of {plan.seconds:g} s in turn after one that warms up; new prompts in each"]


def _used(results: Found) -> list[str]:
    """Which processes were busy: the result is invalid if a client or a worker had no core left."""
    notes = []
    for shape, sides in results.items():
        for side, runs in sides.items():
            cores = {
                name: median(getattr(run, name) for run in runs) for name in ("router", "worker", "client", "idle")
            }
            used = ", ".join(f"{name} {value:.2f}" for name, value in cores.items())
            per_message = median(run.per_message for run in runs)
            notes.append(f"{shape}, {side}: cores: {used}; {per_message:.2f} tokens a message")
    return notes


def _details(results: Found) -> dict[str, object]:
    return {
        f"{shape}, {side}": [vars(run) for run in runs]
        for shape, sides in results.items()
        for side, runs in sides.items()
    }


class Texts:
    """Random text of about `tokens` tokens."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))

    def draw(self, tokens: int) -> str:
        text: str = self._tokenizer.decode(random.choices(range(2, DEMO_VOCAB), k=tokens))
        return text
