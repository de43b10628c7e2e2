"""The adapters that a worker has loaded since its start: those in the registry's list, and those that its requests may
still use.

    prepare ─▶ kept for PREPARED_S ─▶ listed ─▶ served ─▶ no longer listed ─▶ kept for as long as a request may run

A request identifies an adapter by name and fingerprint. Before the request ends, the list may lose the adapter, and get
another one with the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import structlog

from cluster.state import adapter_list
from cluster.state.adapter_list import AdapterList
from cluster.state.registry import Registry
from engine.loading import lora_attachment
from engine.loading.lora_loader import CONFIG, WEIGHTS
from engine.runner.lora import Adapter, Lora
from services.adapter_follower import AdapterFollower
from tandem.errors import CheckpointRefused, InvalidRequest, NotFound, PreconditionFailed, TandemError
from tandem.settings import Settings

log = structlog.get_logger(__name__)
PREPARED_S = 60.0  # that a prepared adapter is kept until the registry lists it
RETRY_S = 30.0  # before a listed adapter that could not be read is tried again
MAX_PATH = 4096  # characters
# Reads the files of adapters. A file system that hangs must not hold asyncio's own threads, which digest KV, nor the
# reads of other adapters: there is a thread for each slot that a worker may have (`adapter_slots`), and for `prepare`.
READING = ThreadPoolExecutor(256 + 1, "adapter")


class RuntimeAdapters(AdapterFollower):
    """The runtime adapters of one worker, on its event loop. `served` are those in the registry's list, by name."""

    def __init__(self, lora: Lora | None, settings: Settings, registry: Registry, changed: Callable[[], None]) -> None:
        super().__init__(registry, settings.heartbeat_s * 2, changed)
        self.served: dict[str, Adapter] = {}
        self._lora = lora
        self._root = settings.adapter_root
        self._keep_s = settings.request_timeout_s
        self._kept: dict[tuple[str, bytes], tuple[Adapter, float]] = {}  # (name, fingerprint) -> until when
        self._reading_one = asyncio.Lock()  # one file is in memory at a time
        self._retry_at: float | None = None  # when to try unreadable adapters again

    async def start(self) -> None:
        if self._root is not None:
            await super().start()

    async def prepare(self, name: str, path: str) -> Adapter:
        """Reads the adapter and keeps it for PREPARED_S, without its matrices. Raises InvalidRequest and NotFound for
        the path, CheckpointRefused for an adapter that this worker cannot serve, PreconditionFailed where none may be
        loaded."""
        if self._root is None or self._lora is None:
            raise PreconditionFailed(
                "adapters cannot be loaded here while the cluster runs; start all workers with adapter_root",
                reason="NO_ADAPTER_ROOT",
                field="adapter_root",
                bound="the folder that has them",
            )
        if name in self._lora.known:
            raise adapter_list.taken(name)
        async with self._reading_one:
            reading = asyncio.get_running_loop().run_in_executor(READING, _read, self._lora, self._root, name, path)
            adapter = await reading
        self._keep(adapter, PREPARED_S)
        return adapter

    def kept(self, name: str, fingerprint: bytes) -> Adapter | None:
        """The adapter with this fingerprint, if it is not served but was lately."""
        kept = self._kept.get((name, fingerprint))
        return kept[0] if kept is not None and kept[1] > monotonic() else None

    async def _take(self, found: AdapterList) -> None:
        for name, adapter in list(self.served.items()):
            listed = found.adapters.get(name)
            if listed is None or listed.digest != adapter.fingerprint:
                del self.served[name]
                self._keep(adapter, self._keep_s)
        self._retry_at = None
        for name, listed in found.adapters.items():
            if name not in self.served and (new := await self._listed(name, listed.path, listed.digest)) is not None:
                self.served[name] = new

    async def _again(self) -> None:
        if self._retry_at is not None and monotonic() > self._retry_at:
            await self._take(self.list)

    async def _listed(self, name: str, path: str, fingerprint: bytes) -> Adapter | None:
        """None if this worker cannot serve the adapter; its requests go elsewhere."""
        adapter = self.kept(name, fingerprint)
        try:
            adapter = adapter or await self.prepare(name, path)
            if adapter.fingerprint != fingerprint:
                raise CheckpointRefused(f"adapter {name}: {path} is not what it was when it was loaded")
        except TandemError as error:
            self._retry_at = monotonic() + RETRY_S
            log.error("adapter.not_served", adapter=name, error=error.message)
            return None
        return adapter

    def _keep(self, adapter: Adapter, seconds: float) -> None:
        now = monotonic()
        self._kept = {key: (kept, until) for key, (kept, until) in self._kept.items() if until > now}
        key = adapter.name, adapter.fingerprint
        self._kept[key] = adapter, max(now + seconds, self._kept.get(key, (adapter, 0.0))[1])


def _read(lora: Lora, root: Path, name: str, path: str) -> Adapter:
    return lora_attachment.fitting(lora, name, folder_within(root, path))


def folder_within(root: Path, path: str) -> Path:
    """The folder of an adapter, without symbolic links. Raises InvalidRequest for a folder outside `root`, before
    reading it, and NotFound for a folder without an adapter."""
    outside = InvalidRequest(
        f"{path!r:.200} is not within adapter_root, which is {root}", field="path", bound=f"a folder within {root}"
    )
    if not path or len(path) > MAX_PATH or "\0" in path:
        raise outside
    try:
        root = root.expanduser().resolve(strict=True)
        folder = (root / path).resolve()
        if not folder.is_relative_to(root):
            raise outside
        files = [(folder / file).resolve() for file in (CONFIG, WEIGHTS)]
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise outside from error
    if not all(file.is_relative_to(root) for file in files):
        raise outside
    try:
        missing = None if all(file.is_file() for file in files) else f"it has no {CONFIG} or no {WEIGHTS}"
    except OSError as error:  # not permitted, or a network's file system that is gone
        missing = error.strerror
    if missing is not None:
        raise NotFound(
            f"no adapter was found in {path!r:.200}: {missing}",
            field="path",
            bound="a folder that PEFT has saved",
        )
    return folder
