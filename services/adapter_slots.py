"""Which adapter is in which slot of a worker's model, and how many requests use it.

    held(adapter) ─▶ its slot, or a free one, or the least recently used ─▶ loaded ─▶ the request runs ─▶ released

A slot is held by its requests from before their first block is reserved until their last one is dropped, so no adapter
is replaced under a running request. Requests that find all slots in use wait, in their order. For the first of them one
slot is closed: no request joins those that have it, so that it comes free. A later request whose adapter is in another
slot does not wait, until the first one has waited for half of its time: then all slots are closed. Requests for the
base model need no slot. An adapter that was unloaded keeps its slot while a request has it; then its slot is the first
to be used for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from engine.core.sequence import LoraSlot
from engine.engine_thread import EngineThread
from engine.loading import lora_loader
from engine.runner.lora import Adapter
from services.runtime_adapters import READING, RuntimeAdapters
from tandem.errors import Busy, NotFound
from tandem.tasks import end, failed

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Slot:
    number: int
    adapter: Adapter | None = None  # without its matrices; None: empty
    users: int = 0
    last_used: int = 0
    loading: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not self.users and (self.loading is None or self.loading.done())

    @property
    def fingerprint(self) -> bytes:
        return self.adapter.fingerprint if self.adapter else b""

    def has(self, adapter: Adapter) -> bool:
        return self.fingerprint == adapter.fingerprint

    @property
    def failed(self) -> bool:
        return self.loading is not None and failed(self.loading)


class AdapterSlots:
    """The slots of one worker, on its event loop. `timeout_s` is the longest wait of a request for a slot."""

    def __init__(self, engine_thread: EngineThread, timeout_s: float, runtime_adapters: RuntimeAdapters) -> None:
        self._engine_thread = engine_thread
        self._runtime_adapters = runtime_adapters
        self._timeout_s = timeout_s
        self._lora = engine_thread.engine.model.lora
        self._slots = [_Slot(number) for number in range(len(self._lora.slots) if self._lora else 0)]
        self._lock = asyncio.Lock()  # asyncio locks are fair: first come, first served
        self._closed: set[_Slot] = set()  # while the holder of the lock waits
        self._freed = asyncio.Event()
        self._uses = 0

    def fingerprints(self) -> dict[str, bytes]:
        """The fingerprints of the adapters that new requests may name, by name."""
        return {name: adapter.fingerprint for name, adapter in self._served().items()}

    def lacks(self, name: str, meant: bytes) -> str:
        """Why this worker cannot serve the adapter with the fingerprint `meant`, whose content may be any if that is
        empty; empty if it can."""
        try:
            found = self._find(name, meant).fingerprint
        except NotFound:
            return f"does not have the adapter {name}"
        return f"has another adapter named {name} than the request means" if meant and found != meant else ""

    def _served(self) -> dict[str, Adapter]:
        return {**self._runtime_adapters.served, **(self._lora.known if self._lora else {})}

    def _find(self, name: str, meant: bytes) -> Adapter:
        """The adapter with the fingerprint `meant` if this worker has it, otherwise the current one with this name."""
        served = self._served()
        adapter = served.get(name)
        if meant and (adapter is None or adapter.fingerprint != meant):
            adapter = self._runtime_adapters.kept(name, meant) or adapter
        if adapter is None:
            raise NotFound(
                f"there is no adapter {name!r:.140} on this worker", field="adapter", bound=", ".join(served) or "none"
            )
        return adapter

    @asynccontextmanager
    async def held(self, name: str, meant: bytes = b"") -> AsyncIterator[LoraSlot | None]:
        """The adapter in a slot of this worker's model until the block ends; None for the base, whose name is "".
        `meant` as for `lacks`; if no adapter has it, the current one with this name.

        Raises NotFound, Busy when no slot came free in time, CheckpointRefused when its folder has changed.
        """
        if not name:
            yield None
            return
        adapter = self._find(name, meant)
        slot = await self._take(adapter)
        try:
            if slot.loading is None:
                slot.loading = asyncio.create_task(self._load(slot), name=f"load adapter {adapter.name}")
                slot.loading.add_done_callback(lambda _: self._freed.set())
            await asyncio.shield(slot.loading)  # a cancelled request does not cancel the load for others
            yield LoraSlot(slot.number, adapter.fingerprint)
        finally:
            slot.users -= 1
            self._uses += 1
            slot.last_used = self._uses
            self._freed.set()

    async def close(self) -> None:
        for slot in self._slots:
            await end(slot.loading)

    async def _take(self, adapter: Adapter) -> _Slot:
        try:
            async with asyncio.timeout(self._timeout_s):
                if (slot := self._loaded(adapter)) is None or slot in self._closed:
                    async with self._lock:
                        slot = self._loaded(adapter) or await self._idle()
                        if not slot.has(adapter) or slot.failed:
                            slot.adapter, slot.loading = adapter, None
        except TimeoutError as error:
            raise Busy(
                f"all {len(self._slots)} adapter slots were in use for {self._timeout_s:g} s",
                reason="NO_ADAPTER_SLOT",
                retry_after=1.0,
            ) from error
        slot.users += 1
        return slot

    def _loaded(self, adapter: Adapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.has(adapter) and not slot.failed), None)

    async def _idle(self) -> _Slot:
        """The slot whose adapter is the least needed. Waits while all are in use."""
        if not any(slot.idle for slot in self._slots):
            closing = asyncio.get_running_loop().call_later(self._timeout_s / 2, self._closed.update, self._slots)
            self._closed.add(min(self._slots, key=lambda one: (one.users, one.last_used)))
            try:
                while not any(slot.idle for slot in self._slots):
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                closing.cancel()
                self._closed.clear()
        named = set(self.fingerprints().values())
        idle = (slot for slot in self._slots if slot.idle)
        # A slot whose load failed has nothing that is needed.
        return min(
            idle, key=lambda one: (one.adapter is not None and not one.failed, one.fingerprint in named, one.last_used)
        )

    async def _load(self, slot: _Slot) -> None:
        assert self._lora is not None
        assert slot.adapter is not None
        model, name = self._engine_thread.engine.model, slot.adapter.name
        before = self._lora.slots[slot.number]
        reading = asyncio.get_running_loop().run_in_executor(READING, lora_loader.read_again, slot.adapter)
        adapter = await reading
        await self._engine_thread.call(lambda: model.put_adapter(slot.number, adapter))  # between two steps
        log.info("adapter.loaded", adapter=name, slot=slot.number, instead_of=before.name if before else "")
