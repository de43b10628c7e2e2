"""A worker's actor as the supervisor sees it, and calls of actors: their answers are errors of the tree.

    the connection breaks   ActorUnavailableError   the process may live, and may have been called: the call is repeated
    the process has died    ActorDiedError          Ray's head says so: WorkerLost

Each call may therefore be executed twice, also at the same time, so only those are made that may be. Ray's own retries
(`max_task_retries`) run one after another: the second wait() would begin after the first one, whose answer is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.placement import Needs
from cluster.ray_nodes import begun
from cluster.supervision.worker_process import Started
from tandem.errors import InternalError, TandemError, Unavailable, WorkerLost
from tandem.tasks import end

T = TypeVar("T")
log = logging.getLogger(__name__)
SERVES_AS_TIMEOUT_S = 5.0  # that a worker may take to report its id, before it is asked again
SERVES_AS_ASKED = 6  # times
LAST_STAGES_TIMEOUT_S = 1.0  # that a ready worker may take to report all stages of its start
PLACED_SOON_S = 10.0  # after which a worker that Ray has not placed is reported
UNREACHED_PAUSE_S = 1.0  # before a call whose connection broke is repeated
SPARE = "spare"  # the id of a process that is not a worker yet


async def answer(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of an actor to a call that may be executed twice. It is made again until the actor is reached or Ray
    knows that it is dead; callers have time limits of their own."""
    said = False
    while True:
        try:
            return await call()
        except ActorUnavailableError as error:
            if not said:
                log.warning("asked again after the connection broke: %s", error)
            said = True
        await asyncio.sleep(UNREACHED_PAUSE_S)


def as_tandem_error(error: RayError, who: str) -> TandemError:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, TandemError):
            return cause
        return InternalError(f"{who} failed: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
        return WorkerLost(f"{who}: its process died")
    return Unavailable(f"{who}: Ray cannot reach it: {error}")


class RayWorkerProcess:
    """One worker actor, with errors of the tree."""

    def __init__(self, actor: Any, worker_id: str, wanted: Needs | None = None) -> None:
        """`wanted`: of an actor that Ray may not have placed yet."""
        self._actor = actor
        self._worker_id = worker_id
        self._wanted = wanted
        self._switch: Callable[[], Awaitable[Started]] | None = None  # the last call of switch_role
        self.placed = False  # of a spare: its process runs, and has reported that it is one
        self.begun = True  # its process runs, as far as is known
        self.node = ""

    async def prepare(self) -> None:
        """Raises an error of the tree when this is not a spare, or a dead one."""
        try:
            if not self.placed and (worker_id := await self._call(self._actor.serves_as.remote)) != SPARE:
                raise InternalError(f"it serves as {worker_id}")
            self.placed = True
            self.node = await self._call(self._actor.node.remote)
            await self._call(self._actor.prepare.remote)
        except TandemError as error:
            log.warning("a spare process cannot be used: %s", error)
            raise

    def become(self, worker_id: str) -> None:
        """A spare becomes the worker that start() will start."""
        self._worker_id = worker_id

    async def start(self, report: Callable[[str], None]) -> Started:
        return await self._with_stages(partial(self._actor.start.remote, self._worker_id), report)

    async def switch_role(self, worker_id: str, grace_s: float, report: Callable[[str], None]) -> Started:
        self._worker_id = worker_id
        self._switch = partial(self._actor.switch_role.remote, worker_id, grace_s)
        return await self._with_stages(self._switch, report)

    async def serves_as(self) -> str:
        """The id of its current worker; the actor's name remains that of its first worker, which it still is if Ray has
        not started its process. Raises Unavailable if the process runs and does not answer: its id is unknown."""
        for _ in range(SERVES_AS_ASKED):
            try:
                async with asyncio.timeout(SERVES_AS_TIMEOUT_S):
                    self._worker_id = await self._call(self._actor.serves_as.remote)
                self.placed = self._worker_id == SPARE
                return self._worker_id
            except TimeoutError:
                log.warning("the process that began as %s does not report its worker id yet", self._worker_id)
            self.begun = await begun(self._actor)
            if not self.begun:
                return self._worker_id
        raise Unavailable(f"the process that began as {self._worker_id} does not report its worker id")

    async def _with_stages(self, call: Callable[[], Awaitable[Started]], report: Callable[[str], None]) -> Started:
        """The answer; `report` receives the stages meanwhile."""
        follow = asyncio.create_task(self._follow(report), name=f"stages of {self._worker_id}")
        try:
            started = await self._call(call)
            await asyncio.wait({follow}, timeout=LAST_STAGES_TIMEOUT_S)
            return started
        finally:
            await end(follow)

    async def _follow(self, report: Callable[[str], None]) -> None:
        reported = 0
        room = self._wanted or "room"  # what a survivor needs is not known
        waiting = f"Ray has not started its process yet; it needs a host with {room} free"
        late = asyncio.get_running_loop().call_later(PLACED_SOON_S, report, waiting)
        try:
            self.node = await self._call(self._actor.node.remote)
            late.cancel()
            while lines := await self._call(partial(self._actor.stages.remote, reported)):
                for line in lines:
                    report(line)
                reported += len(lines)
        except TandemError:
            return  # it is dead, and start() raises
        finally:
            late.cancel()

    async def wait(self) -> None:
        worker_id = self._worker_id

        def ended() -> Awaitable[object]:
            if self._switch is None or self._worker_id == worker_id:
                waiting: Awaitable[object] = self._actor.wait.remote()
                return waiting
            return self._switch()  # wait() would wait for the next worker, which serves once this one has drained

        await self._call(ended)

    async def stop(self, grace_s: float) -> None:
        await self._call(partial(self._actor.stop.remote, grace_s))

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await answer(call)
        except RayError as error:
            raise as_tandem_error(error, self._worker_id) from error
