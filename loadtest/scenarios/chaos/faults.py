"""The faults of a running cluster. Each is verified: a fault that was not seen to strike does not count."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from loadtest.harness.processes import Process, environment_of
from loadtest.scenarios.chaos.failure_watch import KNOWN_S, LOOK_S, FailureWatch
from loadtest.scenarios.chaos.injector import POISON, VARIABLE
from loadtest.scenarios.chaos.tally import POISON as POISONED
from loadtest.scenarios.chaos.tally import Detection, Happened, Tally
from tandem.async_client import AsyncClient
from tandem.cluster_results import Worker
from tandem.errors import DeadlineExceeded, InternalError, TandemError, Unavailable

FREEZE_S, REGISTRY_S, HICCUP_S, SILENCE_S, ERRORS_S = 10.0, 4.0, (1.0, 4.0), (5.0, 25.0), 10.0
FLAPS = 12
RANK_PROCESS = "engine.rank_process"
ENGINES = ("prefill", "decode")
HANG_S = 4.0  # a process stopped for longer must be noticed
STRIKES_S = 10.0  # for an order to fire: a worker without work takes no step
REFUSED_S = 60.0  # for a second supervisor to give up
FAULTS = {  # how often
    **{"kill": 4, "pool": 1, "freeze": 3, "hiccup": 3, "registry": 1, "registry-flap": 1, "supervisor": 1},
    **{"two-supervisors": 1, "drain": 2, "scale": 2, "kv-silent": 2, "kv-errors": 3, "step-fails": 3},
    **{"step-hangs": 2, "transport-dies": 2, "poison": 1},
    "rank": 3,
}
OF_ALL = tuple(name for name in FAULTS if name != "rank")  # of clusters whose workers have one rank


class NotStruck(Exception):
    """The fault did not happen, for this reason."""


class Faults:
    """`tandem up`, its processes, and what can be done to them."""

    def __init__(
        self,
        process: Process,
        target: str,
        registry: str,
        sockets: Path,
        settings: dict[str, object],
        chance: random.Random,
        tally: Tally,
    ) -> None:
        self.target = target
        self._process = process
        self._second = {**settings, "redis": registry}
        self._sockets = sockets
        self._chance = chance
        self._tally = tally
        self.watch = FailureWatch(process, target, tally)
        self._by_name: dict[str, Callable[[AsyncClient], Awaitable[str]]] = {
            name: getattr(self, "_" + name.replace("-", "_")) for name in FAULTS
        }

    def tree(self) -> list[psutil.Process]:
        main = psutil.Process(self._process.popen.pid)
        return [main, *main.children(recursive=True)]

    async def harm(self, names: Sequence[str]) -> str:
        """Injects one of these faults, at random. Returns a description; a fault that is impossible now does not
        count."""
        name = self._chance.choices(names, [FAULTS[name] for name in names])[0]
        self._tally.tried[name] += 1
        at = monotonic()
        try:
            async with AsyncClient(self.target) as client, asyncio.timeout(REFUSED_S + 2 * FREEZE_S):
                outcome = await self._by_name[name](client)
        except (TandemError, TimeoutError, psutil.NoSuchProcess, OSError, NotStruck) as error:
            return f"{name}: did not strike: {error}"
        if not any(strike.at >= at for strike in self._tally.happened):  # it may have a name of its own
            self._struck(name, at, monotonic() - at)
        return f"{name}: {outcome}"

    # ---- processes

    async def _kill(self, client: AsyncClient) -> str:
        worker = await self._random_worker(client, "router", *ENGINES)
        await self._end(worker, "kill")
        return worker.worker_id

    async def _end(self, worker: Worker, fault: str) -> None:
        at = monotonic()
        process = psutil.Process(worker.pid)
        process.kill()
        await asyncio.to_thread(_gone, process)
        self._struck(fault, at)
        self.watch.detect("exit", fault, worker, at)

    async def _rank(self, client: AsyncClient) -> str:
        """A rank of a worker of several dies, or stops for good: the worker must end."""
        worker = await self._random_worker(client)
        ranks = [one for one in psutil.Process(worker.pid).children() if RANK_PROCESS in one.cmdline()]
        if not ranks:
            raise NotStruck(f"{worker.worker_id} has one rank")
        rank, stops, at = self._chance.choice(ranks), self._chance.random() < 0.5, monotonic()
        (rank.suspend if stops else rank.kill)()
        self._hang(worker, "rank", at)
        return f"{worker.worker_id}, a rank {'stops' if stops else 'dies'}"

    async def _pool(self, client: AsyncClient) -> str:
        role = self._chance.choice(ENGINES)
        pool = await _pool(client, role)
        for worker in pool:
            with suppress(psutil.NoSuchProcess):
                await self._end(worker, "pool")
        return f"{', '.join(worker.worker_id for worker in pool)} killed"

    async def _freeze(self, client: AsyncClient) -> str:
        return await self._stop_one(client, "freeze", self._chance.uniform(0.1, FREEZE_S), ("router", *ENGINES))

    async def _hiccup(self, client: AsyncClient) -> str:
        return await self._stop_one(client, "hiccup", self._chance.uniform(*HICCUP_S), ENGINES)

    async def _stop_one(self, client: AsyncClient, fault: str, seconds: float, roles: tuple[str, ...]) -> str:
        worker, at = await self._random_worker(client, *roles), monotonic()
        await self._stop(psutil.Process(worker.pid), seconds)
        self.watch.out_of_order(worker, at + seconds)
        self._struck(f"{fault} of a router" if worker.role == "router" else fault, at, seconds)
        if seconds > HANG_S:
            self.watch.detect_while(worker, fault, at, seconds)
        return f"{worker.worker_id} for {seconds:.1f} s"

    async def _registry(self, client: AsyncClient) -> str:
        process, at = self._named("valkey"), monotonic()
        if self._chance.random() < 0.5:
            process.kill()
            await asyncio.to_thread(_gone, process)
            self._tally.registries += 1
            return "killed"
        seconds = self._chance.uniform(0.1, REGISTRY_S)
        await self._stop(process, seconds)
        self._struck("registry", at, seconds)
        return f"frozen for {seconds:.1f} s"

    async def _registry_flap(self, client: AsyncClient) -> str:
        """SIGKILL as soon as it is back, again and again."""
        lives = set()
        for _ in range(FLAPS):
            process = await self._valkey()
            lives.add(process.pid)
            self._tally.registries += 1
            process.kill()
            await asyncio.to_thread(_gone, process)
        await self._valkey()
        return f"{len(lives)} lives killed"

    async def _valkey(self) -> psutil.Process:
        """The registry, as soon as it answers."""
        path = str(self._second["redis"]).removeprefix("unix://")
        async with asyncio.timeout(FREEZE_S):
            while True:
                with suppress(OSError, Unavailable):
                    reader, writer = await asyncio.open_unix_connection(path)
                    writer.write(b"PING\r\n")
                    if (await reader.read(16)).startswith(b"+PONG"):
                        writer.close()
                        return self._named("valkey")
                await asyncio.sleep(LOOK_S)

    async def _supervisor(self, client: AsyncClient) -> str:
        process = self._named("SupervisorActor")
        process.kill()
        await asyncio.to_thread(_gone, process)
        return "killed"

    async def _two_supervisors(self, client: AsyncClient) -> str:
        """Another `tandem up` for the same cluster must be refused, and no worker may change for it."""
        self._struck("two-supervisors", monotonic())
        second = Process(["loadtest.scenarios.chaos.chaos_cluster"], environment(self._second, self._sockets))
        try:
            with suppress(Unavailable):  # it has ended
                ready = await asyncio.to_thread(second.line, "ready ", REFUSED_S)
                self._tally.wrong.append(f"two supervisors: a second one serves the same cluster: ready {ready}")
        except DeadlineExceeded:
            return f"waits, and is ended after {REFUSED_S:.0f} s"
        finally:
            await asyncio.to_thread(second.stop, REFUSED_S)
        return f"refused: {second.last_words().strip().splitlines()[-1:]}"

    async def _drain(self, client: AsyncClient) -> str:
        name = (await self._random_worker(client)).worker_id
        await client.drain(name, self._chance.choice([0.0, 1.0, 5.0]))
        return name

    async def _scale(self, client: AsyncClient) -> str:
        role = self._chance.choice(ENGINES)
        size = self._chance.randint(1, 3)
        return json.dumps(await client.scale(size if role == "prefill" else None, size if role == "decode" else None))

    # ---- inside a worker

    async def _kv_silent(self, client: AsyncClient) -> str:
        """gRPC works, and no KV comes from a prefill worker or to a decode worker."""
        seconds = self._chance.uniform(*SILENCE_S)
        target = await self._random_worker(client)
        readers = [target] if target.role == "decode" else await _pool(client, "decode")
        peer = "" if target.role == "decode" else target.worker_id
        orders = [self._order(reader, fault="kv-silent", seconds=seconds, peer=peer) for reader in readers]
        self.watch.out_of_order(target, monotonic() + seconds)
        await self._first("kv-silent", orders, seconds)
        return f"of {target.worker_id} for {seconds:.1f} s"

    async def _kv_errors(self, client: AsyncClient) -> str:
        readers = await _pool(client, "decode")
        how = self._chance.choice(["", "post", "completion"])
        orders = [self._order(reader, fault="kv-errors", seconds=ERRORS_S, share=0.25, at=how) for reader in readers]
        await self._first("kv-errors", orders, ERRORS_S)
        return f"one in four, at {how or 'post or completion'}, for {ERRORS_S:.0f} s"

    async def _step_fails(self, client: AsyncClient) -> str:
        target = await self._random_worker(client)
        at, error = self._chance.choice(["step", "forward"]), self._chance.choice(["oom", "runtime"])
        self._struck("step-fails", await self._order(target, fault="step-fails", at=at, error=error))
        return f"{target.worker_id}, {error} in the {at}"

    async def _step_hangs(self, client: AsyncClient) -> str:
        target = await self._random_worker(client)
        self._hang(target, "step-hangs", await self._order(target, fault="step-hangs"))
        return target.worker_id

    async def _transport_dies(self, client: AsyncClient) -> str:
        target = await self._random_worker(client)
        how = self._chance.choice(["", "hang"])
        self._hang(target, "transport-dies", await self._order(target, fault="transport-dies", at=how))
        return f"{target.worker_id}, its NIXL thread {'hangs' if how else 'ends'}"

    def _hang(self, worker: Worker, fault: str, at: float) -> None:
        def recover() -> None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(worker.pid).kill()

        self.watch.out_of_order(worker, at + KNOWN_S)
        self._struck(fault, at)
        self.watch.detect("hang", fault, worker, at, recover)

    async def _poison(self, client: AsyncClient) -> str:
        """A request that kills its worker must be stopped after three of them."""
        prompt = [*POISON, *self._chance.choices(range(2, 2000), k=20)]
        try:
            await client.generate(prompt, max_tokens=8, timeout=REFUSED_S)
        except InternalError as error:
            if error.reason != "KILLS_WORKERS":
                raise
            self._tally.internal[POISONED] += 1
            return "stopped"
        self._tally.wrong.append("poison: it was answered")
        return "answered"

    async def _order(self, worker: Worker, **order: Any) -> float:
        """When it struck. Raises NotStruck."""
        path = self._sockets / f"{worker.pid}.sock"
        within = max(STRIKES_S, order.get("seconds", 0.0))
        try:
            async with asyncio.timeout(within + 1.0):
                reader, writer = await asyncio.open_unix_connection(str(path))
                try:
                    writer.write(json.dumps({**order, "within": within}).encode() + b"\n")
                    for line in (await reader.readline(), await reader.readline()):
                        answer = json.loads(line or "{}")
                    fired = float(answer["fired"])
                except BaseException:
                    writer.close()
                    raise
        except (TimeoutError, OSError, KeyError, ValueError) as error:
            raise NotStruck(f"{worker.worker_id}: {error!r}") from error
        self.watch.later(self._note_silence(worker, reader, writer, fired, order.get("seconds", 0.0)))
        return fired

    async def _note_silence(
        self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fired: float, seconds: float
    ) -> None:
        """Records how long reads waited for a silent KV plane, which the worker reports when it is over."""
        waited = 0.0
        with suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(seconds + STRIKES_S):
                waited = json.loads(await reader.readline() or "{}").get("waited", 0.0)
        writer.close()
        if waited:
            known = Detection("silence", "kv-silent", worker.worker_id, worker.incarnation, fired)
            known.known_at, known.by = fired + waited, "reader"
            self._tally.detections.append(known)

    async def _first(self, fault: str, orders: list[Coroutine[Any, Any, float]], seconds: float) -> None:
        """Waits until one of the orders has struck; the fault lasts `seconds`."""
        began = monotonic()
        tasks = [asyncio.create_task(order) for order in orders]
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            struck = [task.result() for task in done if task.exception() is None]
            if struck:
                self._struck(fault, min(struck), began + seconds - min(struck))
                for task in left:
                    self.watch.later(_ended(task))
                self.watch.later(asyncio.sleep(began + seconds - monotonic()))
                return
        raise NotStruck(repr([task.exception() for task in tasks]))

    # ---- small things

    def _struck(self, fault: str, at: float, lasts: float = 0.0) -> None:
        self._tally.happened.append(Happened(fault, at, lasts))

    async def _random_worker(self, client: AsyncClient, *roles: str) -> Worker:
        """Of these roles; without any, of those that have an engine."""
        return self._chance.choice(await _pool(client, *(roles or ENGINES)))

    def _named(self, part: str) -> psutil.Process:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                if part in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        raise Unavailable(f"no process is called {part}")

    async def _stop(self, process: psutil.Process, seconds: float) -> None:
        """SIGSTOP, seen in /proc, and SIGCONT later."""
        process.suspend()

        async def thaw() -> None:
            await asyncio.sleep(seconds)
            with suppress(psutil.NoSuchProcess):
                process.resume()

        self.watch.later(thaw())
        await asyncio.to_thread(_is, process, psutil.STATUS_STOPPED)


async def _pool(client: AsyncClient, *roles: str) -> list[Worker]:
    """Raises NotStruck if there is none."""
    workers = [worker for worker in (await client.workers()).workers if worker.role in roles]
    if not workers:
        raise NotStruck(f"no {' or '.join(roles)} worker is registered")
    return sorted(workers, key=lambda worker: worker.worker_id)


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})
    task.exception()


def _gone(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        _is(process, psutil.STATUS_ZOMBIE)


def _is(process: psutil.Process, status: str) -> None:
    """Waits until /proc shows it, for a second. Raises NotStruck."""
    until = monotonic() + 1.0
    while process.status() != status:
        if monotonic() > until:
            raise NotStruck(f"{process} is not {status}")
        sleep(0.002)


def environment(settings: dict[str, object], sockets: Path) -> dict[str, str]:
    """Of loadtest.scenarios.chaos.chaos_cluster."""
    return environment_of(settings) | {VARIABLE: str(sockets)}
