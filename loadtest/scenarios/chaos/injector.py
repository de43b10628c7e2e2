"""A launcher for `cluster.local_cluster.LocalCluster` whose workers can be made to fail from the inside, on request
from outside.

Every worker listens on the unix socket `<LOADTEST_CHAOS>/<pid>.sock`. A connection carries one order (a JSON line);
the worker answers `{"armed": true}`, and `{"fired": <monotonic seconds>}` when the fault has happened for the first
time. An order whose second line never comes did not fire and must not be counted. After kv-silent a third line comes,
`{"waited": <seconds>}`: how long a reader waited at most for a transfer that was held back, until it gave up.

    step-fails      one engine step raises: before it began (`at` = "step") or in the forward ("forward")
    step-hangs      one engine step never returns
    transport-dies  the thread that owns the NIXL agent ends with an exception, or (`at` = "hang") blocks in a call
    kv-silent       for `seconds`, transfers from `peer` (a worker id; empty: from all) make no progress
    kv-errors       for `seconds`, a `share` of transfers fails, at the post or at completion

The KV faults sit between `kvtransfer.backends.nixl_agent` and NIXL: the transport calls a real agent through
`_Agent`. A transfer that is held back is not posted, so nothing of it can land later; the first look after the silence
posts it.

A forward with POISON among its tokens kills its worker, always, like a request that crashes a kernel.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from services import launch
from services.launch import Service, prepare
from tandem.settings import Settings

if TYPE_CHECKING:  # a router is started by this as well, and loads no torch
    from engine.engine import Engine
    from engine.engine_thread import EngineThread

__all__ = ["LAUNCHER", "POISON", "VARIABLE", "Injector", "Order", "prepare", "start"]

LAUNCHER = "loadtest.scenarios.chaos.injector"
VARIABLE = "LOADTEST_CHAOS"  # the folder of the sockets
POISON = (2047, 5, 2047, 5)
STEP, FORWARD, HANG, POST, COMPLETION = "step", "forward", "hang", "post", "completion"
_STEP_ERRORS = {"oom": "CUDA out of memory. Tried to allocate 20.00 MiB", "runtime": "the kernel failed"}


@dataclass(eq=False)
class Order:
    """One fault of this process."""

    fault: str
    at: str = ""
    error: str = "runtime"
    """Of step-fails: oom or runtime."""
    peer: str = ""
    seconds: float = 0.0
    share: float = 1.0
    within: float = 10.0
    """Seconds that it has to strike; after that it is withdrawn."""
    until: float = 0.0
    fired: threading.Event = field(default_factory=threading.Event)
    fired_at: float = 0.0
    waited: float = 0.0

    def fire(self) -> None:
        if not self.fired.is_set():
            self.fired_at = monotonic()
            self.fired.set()


class Injector:
    """The orders of one process, asked at the points where they may strike. Thread-safe."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._lock = threading.Lock()
        self._orders: list[Order] = []
        self._chance = chance or random.Random()

    def arm(self, order: Order) -> None:
        order.until = monotonic() + order.seconds
        with self._lock:
            self._orders.append(order)

    def withdraw(self, order: Order) -> None:
        with self._lock:
            if order in self._orders:
                self._orders.remove(order)

    def _once(self, fault: str, at: str | None = None) -> Order | None:
        """The first order of this kind, which is used up by this."""
        with self._lock:
            for order in self._orders:
                if order.fault == fault and at in (None, order.at):
                    self._orders.remove(order)
                    order.fire()
                    return order
        return None

    def _during(self, fault: str, worker_id: str) -> Order | None:
        """The order of this kind that is in force for transfers from this worker."""
        with self._lock:
            for order in self._orders:
                if order.fault == fault and order.peer in ("", worker_id) and monotonic() < order.until:
                    return order
        return None

    # ---- where faults strike

    def step(self) -> None:
        """Before a step of the engine."""
        if self._once("step-hangs"):
            block()
        self._fail_step(STEP)

    def forward(self, token_ids: list[int]) -> None:
        """Before the forward of a step, of these tokens."""
        if any(tuple(token_ids[at : at + len(POISON)]) == POISON for at in range(len(token_ids) - len(POISON) + 1)):
            os.kill(os.getpid(), signal.SIGKILL)
        self._fail_step(FORWARD)

    def owner(self) -> None:
        """Before a call of the NIXL agent."""
        if order := self._once("transport-dies"):
            if order.at == HANG:
                block()
            raise RuntimeError("injected: the owner thread ends")

    def transfer(self, worker_id: str) -> Order | None:
        """Before a transfer from this worker: the order that it meets."""
        if order := self._during("kv-silent", worker_id):
            order.fire()
            return order
        order = self._during("kv-errors", worker_id)
        if order and self._chance.random() < order.share:
            order.fire()
            return order
        return None

    def coin(self) -> bool:
        return self._chance.random() < 0.5

    def _fail_step(self, at: str) -> None:
        if order := self._once("step-fails", at):
            error: type[RuntimeError] = RuntimeError
            if order.error == "oom":
                import torch

                error = torch.OutOfMemoryError
            raise error(f"injected: {_STEP_ERRORS[order.error]}")


def block() -> NoReturn:
    while True:
        threading.Event().wait()


# ---- the engine


def harm_engine(engine: Engine, injector: Injector) -> None:
    step, forward = engine.step, engine.forward

    def harmed_step() -> Any:
        injector.step()
        return step()

    def harmed_forward(batch: Any) -> Any:
        injector.forward(batch.token_ids)
        return forward(batch)

    vars(engine)["step"] = harmed_step
    vars(engine)["forward"] = harmed_forward


# ---- the transport


@dataclass(eq=False)
class _Handle:
    """A descriptor list or a transfer of the real agent."""

    real: Any
    agent_name: str  # that it belongs to, or that it reads from: `<worker id>@<incarnation>`
    held: Order | None = None  # why it was not posted
    held_at: float = 0.0

    def release(self) -> None:
        self.real.release()


class _Agent:
    """A NIXL agent that fails as ordered."""

    def __init__(self, agent: Any, error: type[Exception], injector: Injector) -> None:
        self._agent, self._error, self._injector = agent, error, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self, *arguments: Any) -> Any:
        self._injector.owner()
        return self._agent.get_new_notifs(*arguments)

    def prep_xfer_dlist(self, name: str, *arguments: Any) -> _Handle:
        return _Handle(self._agent.prep_xfer_dlist(name, *arguments), name)

    def make_prepped_xfer(self, operation: str, local: _Handle, ours: Any, remote: _Handle, theirs: Any) -> _Handle:
        real = self._agent.make_prepped_xfer(operation, local.real, ours, remote.real, theirs)
        return _Handle(real, remote.agent_name)

    def initialize_xfer(self, operation: str, ours: Any, theirs: Any, name: str) -> _Handle:
        return _Handle(self._agent.initialize_xfer(operation, ours, theirs, name), name)

    def transfer(self, handle: _Handle) -> str:
        self._injector.owner()
        order = self._injector.transfer(handle.agent_name.partition("@")[0])
        if order is None:
            return str(self._agent.transfer(handle.real))
        if order.fault == "kv-errors" and (order.at or (POST if self._injector.coin() else COMPLETION)) == POST:
            raise self._error("injected: the post failed")
        handle.held, handle.held_at = order, monotonic()
        return "PROC"

    def check_xfer_state(self, handle: _Handle) -> str:
        self._injector.owner()
        if handle.held is None:
            return str(self._agent.check_xfer_state(handle.real))
        if handle.held.fault == "kv-errors":
            return "ERR"
        if monotonic() < handle.held.until:
            return "PROC"
        handle.held = None
        return str(self._agent.transfer(handle.real))


class _Nixl:
    """The NIXL module with such agents."""

    def __init__(self, module: Any, injector: Injector) -> None:
        self._module, self._injector = module, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def nixl_agent(self, *arguments: Any) -> _Agent:
        return _Agent(self._module.nixl_agent(*arguments), self._module.nixlBind.nixlBackendError, self._injector)


def harm_transport(injector: Injector) -> None:
    """Of every transport that this process makes from now on."""
    from kvtransfer.backends import nixl_agent, reads

    load = nixl_agent._load_nixl
    vars(nixl_agent)["_load_nixl"] = lambda: _Nixl(load(), injector)
    give_up = reads.Read.give_up

    def noted(read: Any, *arguments: Any) -> None:
        for handle in [flight.handle for flight in read.flights]:
            if handle.held is not None:
                handle.held.waited = max(handle.held.waited, monotonic() - handle.held_at)
        give_up(read, *arguments)

    setattr(reads.Read, "give_up", noted)  # noqa: B010


# ---- orders from outside


def listen(injector: Injector, path: Path) -> None:
    """Accepts orders at this socket, on separate threads, as long as the process runs."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_obey, args=(injector, connection), name="chaos order", daemon=True).start()

    threading.Thread(target=serve, name="chaos orders", daemon=True).start()


def _obey(injector: Injector, connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as lines:
        order = Order(**json.loads(lines.readline()))
        injector.arm(order)
        lines.write('{"armed": true}\n')
        lines.flush()
        if order.fired.wait(order.within):
            lines.write(json.dumps({"fired": order.fired_at}) + "\n")
            lines.flush()
            if order.fault == "kv-silent":
                threading.Event().wait(order.until - monotonic())
                lines.write(json.dumps({"waited": order.waited}) + "\n")
                lines.flush()
        else:
            injector.withdraw(order)


_here = Injector()


async def start(
    role: str, settings: Settings, worker_id: str, say: Callable[[str], None], engine: EngineThread | None = None
) -> Service:
    """As services.launch.start. An engine that was released is harmed already, and so is the transport."""
    options: dict[str, Any] = {} if engine is None else {"engine": engine}
    if role == "router":
        return await launch.start(role, settings, worker_id, say, **options)
    if engine is None:
        harm_transport(_here)
    service: Any = await launch.start(role, settings, worker_id, say, **options)
    if engine is None:
        await service.engine_thread.call(lambda: harm_engine(service.engine, _here))
        listen(_here, Path(os.environ[VARIABLE]) / f"{os.getpid()}.sock")
    return service  # type: ignore[no-any-return]
