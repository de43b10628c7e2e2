"""How long large bodies hold the router's event loop, on which the tokens of all streams are relayed.

Starts a cluster on this machine with two tenants. `polite` keeps eight streams open over HTTP. `greedy`, a process of
its own, sends the bodies of one door again and again, two at a time, for `--seconds`: chats of a thousand messages with
tools, prompts of 4 MiB, lists of stop strings, schemas, stored responses, files of 8 MiB, jobs over gRPC, and others
(bodies.py). The chat template shows only the end of a chat, so long ones are answered and not only refused.

Prints for each door the longest time that one callback held the event loop, by the processor time of its thread and by
the clock, the number over 20 ms, the 99th percentile of the time between two messages of a stream, without and with
greedy, and what greedy was answered. Exits with 1 if one held the loop for 20 ms of processor time or more: the clock
has the time of other processes too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import monotonic, perf_counter
from typing import Annotated

import typer

from loadtest.harness.demo_model import DEMO
from loadtest.harness.options import Seconds, names
from loadtest.harness.stats import percentile
from loadtest.scenarios.blocking import timed_loop
from loadtest.scenarios.blocking.bodies import (
    CALLS,
    DOORS,
    TEMPLATE,
    batch_input,
    chat,
    job_prompts,
    long_message,
    prompts,
)
from loadtest.scenarios.two_tenants import GREEDY, POLITE, Target, be_greedy, greedy, head, two_tenants
from tandem.async_client import AsyncClient
from tandem.errors import TandemError

LIMIT_S = 0.020
STREAMS, AT_ONCE = 8, 2
TOKENS = 1900
WATCHED = 16  # jobs of one call
ALL = (*DOORS, *CALLS)


class Greedy:
    """Sends, and counts the answers."""

    def __init__(self, target: Target, outcomes: Counter[str]) -> None:
        self._target = target
        self._outcomes = outcomes

    async def door(self, name: str) -> None:
        if name in CALLS:
            await getattr(self, f"_{name}")()
        path, bodies = DOORS[name]
        for body in cycle([json.dumps(one).encode() for one in bodies()]):
            answer = await self.send("POST", path, body)
            if name == "responses" and b'"store":true' in answer:
                await self._continued(_id(answer))

    async def _continued(self, stored: str) -> None:
        body = {"input": "and?", "previous_response_id": stored, "max_output_tokens": 8}
        await self.send("POST", "/v1/responses", json.dumps(body).encode())
        await self.send("GET", f"/v1/responses/{stored}")
        await self.send("GET", f"/v1/responses/{stored}/input_items?limit=100")
        await self.send("DELETE", f"/v1/responses/{stored}")

    async def _models(self) -> None:
        while True:
            for path in ("/v1/models", f"/v1/models/{'x' * 4000}", "/metrics", "/health"):
                await self.send("GET", path)

    async def _grpc(self) -> None:
        async with AsyncClient(self._target.grpc, api_key=GREEDY) as client:
            for body in cycle([*chat(), *long_message(), *islice(prompts(), 2)]):
                given = {name: body[name] for name in ("messages", "tools", "max_tokens") if name in body}
                try:
                    await client.generate(body.get("prompt"), **given)
                    self._outcomes["OK"] += 1
                except TandemError as error:
                    self._outcomes[error.reason] += 1

    async def _jobs(self) -> None:
        """As many as one call may have, and watchers of some."""
        async with AsyncClient(self._target.grpc, api_key=GREEDY) as client:
            while True:
                for prompts in job_prompts():
                    try:
                        jobs = await client.submit_many(prompts, max_tokens=4, ignore_eos=True, stop=["~" * 200] * 16)
                        self._outcomes["jobs"] += len(jobs)
                        await asyncio.gather(*(self._watched(client, job.job_id) for job in jobs[:WATCHED]))
                    except TandemError as error:
                        self._outcomes[error.reason] += 1

    @staticmethod
    async def _watched(client: AsyncClient, job_id: str) -> None:
        async for _ in client.watch(job_id):
            pass

    async def _files(self) -> None:
        content = batch_input()
        while True:
            await self._batch(content)

    async def _batch(self, content: bytes) -> None:
        mark = "----tandem"
        parts = (
            f'--{mark}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{mark}\r\n'
            'content-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
        )
        body = parts.encode() + content + f"\r\n--{mark}--\r\n".encode()
        file = _id(await self.send("POST", "/v1/files", body, f"multipart/form-data; boundary={mark}"))
        about = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = _id(await self.send("POST", "/v1/batches", json.dumps(about).encode()))
        await asyncio.sleep(0.5)  # the router reads its lines, and runs some
        await self.send("GET", f"/v1/files/{file}/content")
        await self.send("POST", f"/v1/batches/{batch}/cancel")
        await self.send("DELETE", f"/v1/files/{file}")

    async def send(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        """Returns the body of the answer, with the marks between its chunks."""
        status, answer = await self._target.send(method, path, body, kind=kind)
        field = re.search(rb'"(?:param|message)": ?"([^"\']{1,60})', answer) if status.startswith("40") else None
        self._outcomes[f"{status} ({field[1].decode(errors='replace')})" if field else status] += 1
        return answer


def _id(answer: bytes) -> str:
    start = answer.find(b'"id":"')
    return answer[start + 6 : answer.find(b'"', start + 6)].decode() if start >= 0 else ""


# ---- polite's streams


@dataclass
class Streams:
    """Seconds between two messages of a stream."""

    target: Target
    gaps: list[float] = field(default_factory=list)
    failed: int = 0

    async def measure(self, seconds: float) -> float:
        """Measures for `seconds`; returns the 99th percentile of the time between two messages of a stream."""
        self.gaps.clear()
        await asyncio.sleep(seconds)
        return percentile(self.gaps, 0.99) if self.gaps else float("inf")

    async def keep(self) -> None:
        asked = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(asked)
        request = head("POST", "/v1/completions", POLITE, "application/json", len(body)) + body.encode()
        while True:
            reader, writer = await self.target.connect()
            writer.write(request)
            status = await reader.readline()
            self.failed += b"200" not in status
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = perf_counter()
                    if last:
                        self.gaps.append(now - last)
                    last = now
            writer.close()


@dataclass(frozen=True)
class Held:
    """The callbacks that held the loop for some time, between two instants."""

    longest_cpu_s: float
    longest_wall_s: float
    over: int
    what: str

    @classmethod
    def read(cls, path: Path, since: float, until: float) -> Held:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = sorted((one for one in lines if since <= one["at"] <= until), key=lambda one: -one["cpu_s"])
        if not found:
            return cls(0.0, 0.0, 0, f"none for {1000 * timed_loop.NOTED_S:.0f} ms")
        worst = found[0]
        collecting = f" (garbage: {1000 * worst['collecting_s']:.0f} ms)" if worst["collecting_s"] > 0.001 else ""
        over = sum(one["cpu_s"] >= LIMIT_S for one in found)
        return cls(worst["cpu_s"], max(one["wall_s"] for one in found), over, worst["what"] + collecting)


async def run(target: Target, doors: tuple[str, ...], seconds: float, noted: Path) -> int:
    """Prints a row for each door. Returns the number of those that held the loop too long."""
    print(f"{'':>10}  {'loop cpu':>8} {'wall ms':>8} {'over':>5}   {'p99 without':>11} {'with, ms':>8}", flush=True)
    streams, wrong = Streams(target), 0
    async with asyncio.TaskGroup() as tasks:
        kept = [tasks.create_task(streams.keep()) for _ in range(STREAMS)]
        await streams.measure(2.0)  # what is slow once
        for name in doors:
            without, lines = await streams.measure(seconds / 2), list[str]()
            since = monotonic()
            async with greedy("blocking", name, target, lines):
                during = await streams.measure(seconds)
            held = Held.read(noted, since, monotonic())
            wrong += held.longest_cpu_s >= LIMIT_S
            print(
                f"{name:>10}  {1000 * held.longest_cpu_s:8.1f} {1000 * held.longest_wall_s:8.1f} {held.over:>5}"
                f"   {1000 * without:11.1f} {1000 * during:8.1f}   greedy: {lines[-1]}; {held.what}",
                flush=True,
            )
        for task in kept:
            task.cancel()
    print(f"streams that were refused: {streams.failed}", flush=True)
    return wrong + streams.failed


def main(
    seconds: Seconds = 10.0,
    only: Annotated[str, typer.Option(metavar="DOOR,...", help="Doors to try.")] = ",".join(ALL),
    as_greedy: Annotated[tuple[str, str, str] | None, typer.Option("--greedy", hidden=True)] = None,
) -> int:
    if as_greedy:
        name, *addresses = as_greedy
        outcomes: Counter[str] = Counter()
        sender = Greedy(Target(*addresses), outcomes)
        asyncio.run(be_greedy([sender.door(name) for _ in range(AT_ONCE)], outcomes))
        return 0
    doors = names(only, ALL)
    with tempfile.TemporaryDirectory(prefix="tandem-blocking-") as folder:
        model, noted = Path(folder) / "model", Path(folder) / "callbacks"
        shutil.copytree(DEMO, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        os.environ[timed_loop.VARIABLE] = str(noted)
        limits, settings = "admin requests=64", {"model": str(model), "tool_call_format": "hermes"}
        with two_tenants(limits, timed_loop.LAUNCHER, **settings) as target:
            return 1 if asyncio.run(run(target, doors, seconds, noted)) else 0
