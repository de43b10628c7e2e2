"""Runs the batches whose lease this router holds, and takes over batches without an owner.

create or expiry of a lease ─▶ claim ─▶ read the input ─▶ WINDOW lines of each model at a time ─▶ results ─▶ files
              ▲                                                 │ its turn is over, and another batch waits
              └─────────────────────────────────────────────────┘ with the results that it has
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, time

import structlog

from cluster.state.batch_store import BatchRecord, BatchStatus, BatchStore, LineResult, Stored
from cluster.state.job_journal import Kept
from services.router.frontend.batches import batch_lines
from services.router.frontend.batches.batch_lines import Line
from services.router.frontend.batches.line_runner import LineRunner
from services.router.frontend.http_body import joined
from services.router.models import Models
from services.router.preprocess.offload import MEDIUM_BYTES, Offload
from tandem.errors import Busy, TandemError, Unavailable
from tandem.settings import Settings
from tandem.tasks import end, forever, once, within

log = structlog.get_logger(__name__)

LEASE_S = 6.0
MAX_RUNNING = 16  # batches that one router runs, each with its input in memory
TURN_S = 300.0  # for which a batch keeps its place while others wait; its input is read again after that
LINES_PER_SLICE = 512  # whose models are looked up before the event loop serves streams again
WINDOW = 8  # lines of one batch in progress, to one model
SATURATED_CHECK_S = 0.25  # between two checks whether requests still wait
RESULTS_PER_SCRIPT = 64
WHY_NOT_RUN = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was completed."),
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}
TOO_LARGE = "The answers of this batch are too large together: split it, or delete files."


class _NotOwner(Exception):
    """Another router owns the batch now."""


@dataclass(slots=True)
class _Running:
    """A batch that this router runs."""

    record: BatchRecord
    cancelled: bool
    since: float = field(default_factory=monotonic)
    limit: asyncio.Timeout | None = None  # of its lines, while they run
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def cancel(self) -> None:
        self.cancelled = True
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())


class BatchRunner:
    def __init__(self, store: BatchStore, lines: LineRunner, offload: Offload, models: Models) -> None:
        self._store = store
        self._lines = lines
        self._offload = offload
        self._models = models
        self._running: dict[tuple[str, str], _Running] = {}  # by tenant and id
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._keeping = forever(self._keep, name="batches")

    def look(self) -> None:
        """Checks at once for batches to claim, and for cancelled ones."""
        self._changed.set()

    async def leave(self) -> None:
        """Stops its batches and releases their leases, so that other routers continue them at once."""
        await end(self._keeping)
        owned = list(self._running.values())
        await asyncio.gather(*(end(one.task) for one in owned))
        try:
            await self._store.release([one.record for one in owned])
        except Unavailable as error:
            log.warning("batches.not_released", batches=len(owned), error=error.message)  # their leases expire

    async def _keep(self) -> None:
        """Renews its leases, and claims batches without an owner."""
        while True:
            self._changed.clear()
            try:
                await self._renew()
                until = monotonic() + LEASE_S / 3  # its own leases come first
                while len(self._running) < MAX_RUNNING and monotonic() < until:
                    record = await self._store.claim()
                    if record is None:
                        break
                    log.info("batch.claimed", batch=record.batch_id, owner=record.generation)
                    self._run_here(record)
                await self._take_turns()
            except TandemError as error:
                log.warning("batches.not_kept", error=error.message)
            await within(self._changed, LEASE_S / 3)

    async def _take_turns(self) -> None:
        """Where every place is taken, the oldest batch of a tenant that has the most gives its place to one that waits,
        once its turn is over. Those that wait are claimed in the order in which they began to."""
        places = Counter(tenant for tenant, _ in self._running)
        most = [one for (tenant, _), one in self._running.items() if places[tenant] == max(places.values())]
        if (
            len(self._running) < MAX_RUNNING
            or (last := min(most, key=lambda one: one.since)).since > monotonic() - TURN_S
        ):
            return
        if record := await self._store.claim():
            log.info("batch.turn", batch=record.batch_id, owner=record.generation, instead_of=last.record.batch_id)
            await end(last.task)
            self._run_here(record)
            await self._store.release([last.record])

    async def _renew(self) -> None:
        running = list(self._running.values())
        for one, kept in zip(running, await self._store.renew([one.record for one in running]), strict=True):
            if kept is Kept.CANCELLED and not one.cancelled:
                one.cancel()
            elif kept is Kept.LOST:
                once(end(one.task), name=f"end of {one.record.batch_id}")  # in another task: this one renews leases

    def _run_here(self, record: BatchRecord) -> None:
        key, one = (record.tenant, record.batch_id), _Running(record, record.cancelled)
        self._running[key] = one
        one.task = once(self._run(one), name=record.batch_id)
        one.task.add_done_callback(lambda _: self._running.pop(key, None) if self._running.get(key) is one else None)

    async def _run(self, one: _Running) -> None:
        """Runs the batch until it ends or another router owns it. After an error, the next owner continues it."""
        try:
            await self._work(one)
        except _NotOwner:
            log.warning("batch.lost", batch=one.record.batch_id)
        except BaseExceptionGroup as group:
            _, others = group.split((_NotOwner, Busy, Unavailable))
            if others is not None:
                raise
            log.warning("batch.not_kept", batch=one.record.batch_id, why=str(group.exceptions[0]))
        except (Busy, Unavailable) as error:
            log.warning("batch.not_kept", batch=one.record.batch_id, why=error.message)

    async def _work(self, one: _Running) -> None:
        record = one.record
        pieces = await self._store.input(record)
        endpoint = record.fields["endpoint"]
        # As a long text of any size: MAX_RUNNING bounds these bytes, and the tenant's requests go on meanwhile.
        found = await self._offload.run(record.tenant, MEDIUM_BYTES + 1, joined, pieces, batch_lines.read, endpoint)
        if found.errors:
            await self._end(record, BatchStatus.FAILED, found.errors)
            return
        _own(await self._store.begin(record, BatchStatus.IN_PROGRESS, total=len(found.lines)))
        status = await self._run_lines(one, found.lines)
        if status is not BatchStatus.COMPLETED:
            await self._give_up(record, found.lines, status)
        _own(await self._store.begin(record, BatchStatus.FINALIZING))
        await self._end(record, status)

    async def _run_lines(self, one: _Running, lines: Sequence[Line]) -> BatchStatus:
        """Runs the lines without a result. Returns the batch's next status."""
        answered = await self._store.answered(one.record)
        left = await self._by_model([line for line in lines if line.number not in answered])
        if one.cancelled:
            return BatchStatus.CANCELLED
        try:
            async with asyncio.timeout(one.record.number("expires_at") - time()) as one.limit:
                async with asyncio.TaskGroup() as group:
                    for model, some in left.items():
                        line = iter(some)
                        for place in range(min(WINDOW, len(some))):
                            group.create_task(self._run_some(one.record, line, model, yields=place > 0))
        except TimeoutError:
            return BatchStatus.CANCELLED if one.cancelled else BatchStatus.EXPIRED
        finally:
            one.limit = None
        return BatchStatus.COMPLETED

    async def _by_model(self, lines: Sequence[Line]) -> dict[str, list[Line]]:
        """The lines by the key of their model, so that lines to one model do not delay lines to another."""
        keys: dict[str, str] = {}
        found: defaultdict[str, list[Line]] = defaultdict(list)
        for at, line in enumerate(lines):
            if at % LINES_PER_SLICE == LINES_PER_SLICE - 1:
                await asyncio.sleep(0)  # each line may name another model
            if line.model not in keys:
                keys[line.model] = self._models.key_of(line.model)
            found[keys[line.model]].append(line)
        return found

    async def _run_some(self, record: BatchRecord, left: Iterator[Line], model: str, *, yields: bool) -> None:
        """Runs one line after another. `yields`: begins no line while requests to this model wait for room."""
        while True:
            if yields and self._models.waiting(model):
                await asyncio.sleep(SATURATED_CHECK_S)
                continue
            if (line := next(left, None)) is None:
                return
            result = await self._lines.run(record, line)
            if await self._add(record, [result]) is Stored.FULL:
                text = batch_lines.not_run(record.batch_id, line, "batch_output_too_large", TOO_LARGE)
                await self._add(record, [LineResult(line.number, text, completed=False)])
            await self._lines.forget(record, line)

    async def _give_up(self, record: BatchRecord, lines: Sequence[Line], status: BatchStatus) -> None:
        """Gives each line without a result one with the reason why it was not run."""
        await self._lines.cancel(record)
        answered = await self._store.answered(record)
        left = [line for line in lines if line.number not in answered]
        code, message = WHY_NOT_RUN[status]
        for start in range(0, len(left), RESULTS_PER_SCRIPT):
            some = left[start : start + RESULTS_PER_SCRIPT]
            texts = [batch_lines.not_run(record.batch_id, line, code, message) for line in some]
            results = [LineResult(line.number, text, False) for line, text in zip(some, texts, strict=True)]
            await self._add(record, results)

    async def _add(self, record: BatchRecord, results: Sequence[LineResult]) -> Stored:
        stored = await self._store.add(record, results)
        _own(stored is not Stored.LOST)
        return stored

    async def _end(self, record: BatchRecord, status: BatchStatus, errors: Sequence[dict[str, object]] = ()) -> None:
        _own(await self._store.end(record, status, errors))
        log.info("batch.ended", batch=record.batch_id, status=status.value)


def _own(kept: bool) -> None:
    if not kept:
        raise _NotOwner


def open_store(settings: Settings) -> BatchStore:
    return BatchStore(
        settings.redis or "",
        settings.cluster,
        lease_s=LEASE_S,
        kept_s=settings.batch_kept_s,
        most_bytes=settings.max_tenant_file_mib * 1024 * 1024,
    )
