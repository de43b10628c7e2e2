"""A service with only a port and a heartbeat, for tests of the processes around it.

The environment makes it misbehave: FAKE_REFUSE names a role that refuses to start, FAKE_CRASH one whose process ends
itself while starting, FAKE_BUSY one that uses its whole grace to stop. A prepared spare leaves a file in the folder
FAKE_SPARES, named by the number of its process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, State, WorkerRecord
from tandem.errors import CheckpointRefused
from tandem.settings import Settings

LAUNCHER = "tests.cluster.fake"


class FakeService:
    def __init__(self, role: str, settings: Settings, worker_id: str) -> None:
        assert settings.redis
        self.incarnation = secrets.token_hex(8)
        self.address = ""
        self._role = role
        self._settings = settings
        self._worker_id = worker_id
        self._state = State.READY
        self._running = 0
        self._ended = asyncio.Event()
        self._registry = Registry(settings.redis, settings.cluster, settings.heartbeat_ttl_s)
        self._heartbeat = Heartbeat(self._registry, self._describe, settings.heartbeat_s)

    async def start(self) -> None:
        port = self._settings.port if self._role == "router" else 0
        self._server = await asyncio.start_server(self._answer, self._settings.host, port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        await self._heartbeat.start()

    can_switch_role = True

    async def release(self, grace_s: float) -> str:
        """Returns its engine: the id of the process that loaded it."""
        await self.stop(grace_s)
        return str(os.getpid())

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self, grace_s: float) -> None:
        self._server.close()
        if os.environ.get("FAKE_BUSY") == self._role:
            await asyncio.sleep(grace_s)
        await self._heartbeat.stop()
        await self._registry.close()
        self._ended.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A request is a connection; its line ends it. `drain` ends the service, as an operator's drain would."""
        self._running += 1
        line = await reader.readline()
        self._running -= 1
        if line == b"drain\n":
            await self.stop(0)
        if line == b"answer\n":
            writer.write(b"answered\n")
        writer.close()

    def _describe(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self._worker_id,
            role=self._role,
            state=self._state,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address=self.address,
            running=self._running,
            max_running=self._settings.max_num_seqs,
            blocks_total=1000,
            prompt_rate=1000.0,
        )


def prepare() -> None:
    Path(os.environ["FAKE_SPARES"], str(os.getpid())).touch()


async def start(
    role: str, settings: Settings, worker_id: str, say: Callable[[str], None], engine: str | None = None
) -> FakeService:
    say(f"pretending to load for {worker_id}" if engine is None else f"loaded before, by {engine}")
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
    say(f"on {settings.host}, device {settings.device}, GPU {gpu}, {settings.host_workers} workers here")
    if os.environ.get("FAKE_REFUSE") == role:
        why = RuntimeError(threading.Lock())  # cannot be pickled, like errors of some libraries
        raise CheckpointRefused(f"the model {settings.model} cannot be served by {worker_id}", field="model") from why
    if os.environ.get("FAKE_CRASH") == role:
        os.kill(os.getpid(), signal.SIGKILL)
    service = FakeService(role, settings, worker_id)
    await service.start()
    say("loaded")
    return service
